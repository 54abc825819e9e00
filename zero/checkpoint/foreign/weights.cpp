// Reads files of weights alone as views: files of safetensors or torch.save, one or several with an
// index.
#include <memory>
#include <utility>

#include "zero/checkpoint/foreign/readers.h"
#include "zero/checkpoint/weight_files.h"

namespace zero::foreign {

CheckpointView view_weights(const std::filesystem::path& path) {
  const auto files = std::make_shared<const WeightFiles>(path, WeightFiles::Folder::any);
  files->verify();
  CheckpointView view;
  view.form = "weights";
  view.missing.emplace_back(
      "states of an optimizer, steps and hyper-parameters: training begins with new ones");
  view.left_out = files->left_out();
  for (const auto& name : files->names_by_file()) {
    const auto& info = files->info(name);
    LazyTensor tensor{info.dtype, info.shape, [files, name] { return files->read(name); }};
    // Files do not say which floating-point tensors are buffers; the engine finds them.
    if (!at::isFloatingType(info.dtype)) {
      view.buffers[name] = std::move(tensor);
      continue;
    }
    auto& parameter = view.parameters.emplace_back();
    parameter.name = name;
    parameter.shape = info.shape;
    parameter.states["parameter"] = std::move(tensor);
    for (const auto& [other, kept] : files->ties()) {
      if (kept == name) parameter.other_names.push_back(other);
    }
  }
  return view;
}

}  // namespace zero::foreign
