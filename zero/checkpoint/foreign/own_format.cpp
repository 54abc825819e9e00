// Reads libzero's own checkpoints as views, and writes views as such checkpoints.
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/readers.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/state_format.h"

namespace zero::foreign {

namespace fs = std::filesystem;

namespace {

// A range of a parameter's elements, and the file that has it.
struct SliceOf {
  int64_t begin = 0;
  int64_t end = 0;
  fs::path file;
};

LazyTensor own_state(const Manifest::Parameter& parameter, const Manifest::State& state,
                     const std::vector<SliceOf>& slices) {
  const bool coded = state.format.starts_with("8bit");
  const auto dtype = coded ? std::optional(at::kFloat) : safetensors_dtype(state.format);
  if (!dtype)
    throw CheckpointError(fmt::format("the state '{}' of '{}' has the unknown format '{}'",
                                      state.name, parameter.name, state.format));
  const auto sign = state.format == "8bit_positive" ? optim::Sign::positive : optim::Sign::either;
  return {*dtype, parameter.shape,
          [slices, coded, sign, key = state.name + "." + parameter.name, dtype = *dtype,
           shape = parameter.shape, strides = parameter.strides, numel = parameter.numel()] {
            auto whole = at::empty({numel}, dtype);
            for (const auto& [begin, end, path] : slices) {
              auto values = SafetensorsReader(path).read(key);
              if (coded) {
                const auto blocks = at::ceil_div(end - begin, optim::kCodedBlock);
                const auto decoded = at::empty({blocks * optim::kCodedBlock}, at::kFloat);
                optim::decode(static_cast<const std::byte*>(values.const_data_ptr()),
                              decoded.mutable_data_ptr<float>(), decoded.numel(), sign);
                values = decoded.narrow(0, 0, end - begin);
              }
              whole.narrow(0, begin, end - begin).copy_(values);
            }
            return whole.as_strided(shape, strides).contiguous();
          }};
}

}  // namespace

CheckpointView view_own(const fs::path& path) {
  const auto manifest = read_manifest(path);
  verify(path, manifest);
  CheckpointView view;
  view.form = fmt::format("libzero, stage {} of {} ranks", manifest.stage, manifest.files.size());
  view.stage = manifest.stage;
  view.steps = manifest.steps;
  view.loss_scale = manifest.loss_scale;
  view.grad_norm = manifest.grad_norm;
  view.groups = manifest.groups;
  std::vector<std::vector<SliceOf>> slices(manifest.parameters.size());
  for (const auto& file : manifest.files) {
    for (const auto& [parameter, begin, end] : file.slices) {
      if (begin < end)
        slices[static_cast<size_t>(parameter)].push_back({begin, end, path / file.name});
    }
  }
  const auto in_file = [&](const Manifest::File& file, const std::string& key, at::ScalarType dtype,
                           std::vector<int64_t> shape) {
    return LazyTensor{dtype, std::move(shape),
                      [from = path / file.name, key] { return SafetensorsReader(from).read(key); }};
  };
  const auto factored_files = manifest.factored_files();
  for (size_t p = 0; p < slices.size(); ++p) {
    const auto& from = manifest.parameters[p];
    auto& to = view.parameters.emplace_back();
    to.name = from.name;
    to.other_names = from.other_names;
    to.shape = from.shape;
    to.strides = from.strides;
    to.optimizer = from.optimizer;
    to.group = from.group;
    to.steps = from.steps;
    for (const auto& state : from.states) to.states[state.name] = own_state(from, state, slices[p]);
    for (const auto& [name, shape] : from.factored)
      to.states[name] =
          in_file(manifest.files[factored_files[p]], name + "." + from.name, at::kFloat, shape);
  }
  const auto buffers_in = [&](const Manifest::File& file) {
    std::map<std::string, LazyTensor> buffers;
    for (const auto& [name, dtype, shape] : manifest.buffers)
      buffers[name] = in_file(file, "buffer." + name, dtype, shape);
    return buffers;
  };
  view.buffers = buffers_in(manifest.files.front());
  view.attached = manifest.files.front().attached;
  for (size_t rank = 1; rank < manifest.files.size(); ++rank) {
    const auto& file = manifest.files[rank];
    view.other_ranks.push_back({buffers_in(file), file.attached});
  }
  return view;
}

namespace {

// Writes the files of all ranks side by side, so that each tensor is read once.
class OwnWriter {
 public:
  OwnWriter(const CheckpointView& view, const fs::path& folder, int ranks)
      : view_(view), folder_(folder), ranks_(ranks) {
    manifest_.stage = view.stage;
    manifest_.steps = view.steps;
    manifest_.loss_scale = view.loss_scale;
    manifest_.grad_norm = view.grad_norm;
    manifest_.groups = view.groups;
    manifest_.buffer_policy = "per_rank";
    manifest_.files.resize(static_cast<size_t>(ranks));
    infos_.resize(static_cast<size_t>(ranks));
    for (const auto& parameter : view.parameters) add(parameter);
    for (const auto& [name, buffer] : view.buffers) {
      manifest_.buffers.push_back({name, buffer.dtype, buffer.shape});
      tensors_.push_back({"buffer." + name, &buffer, kEach});
      for (auto& infos : infos_) infos.push_back({"buffer." + name, buffer.dtype, buffer.shape});
    }
    // The tensors of each file are in this order, which is that of SafetensorsWriter.
    std::stable_sort(tensors_.begin(), tensors_.end(), [](const Item& a, const Item& b) {
      return c10::elementSize(a.tensor->dtype) > c10::elementSize(b.tensor->dtype);
    });
  }

  void write() {
    std::vector<std::unique_ptr<SafetensorsWriter>> files;
    for (int rank = 0; rank < ranks_; ++rank) {
      auto& entry = manifest_.files[static_cast<size_t>(rank)];
      entry.name = fmt::format("rank-{}-of-{}.safetensors", rank, ranks_);
      files.push_back(std::make_unique<SafetensorsWriter>(
          folder_ / entry.name, infos_[static_cast<size_t>(rank)],
          std::map<std::string, std::string>{
              {"format", fmt::format("{} {}", Manifest::kFormat, Manifest::kVersion)}}));
    }
    for (const auto& [key, tensor, parameter] : tensors_) {
      if (parameter == kEach) {
        const auto name = key.substr(kBuffer.size());
        for (int rank = 0; rank < ranks_; ++rank)
          files[static_cast<size_t>(rank)]->write(key, read(view_.buffers_of(rank).at(name), key));
        continue;
      }
      auto values = read(*tensor, key);
      if (parameter == kFirst) {
        files.front()->write(key, values);
        continue;
      }
      // Slices have the elements in the order of the storage.
      const auto& entry = manifest_.parameters[static_cast<size_t>(parameter)];
      values = at::empty_strided(entry.shape, entry.strides, values.options())
                   .copy_(values)
                   .as_strided({tensor->numel()}, {1});
      for (int rank = 0; rank < ranks_; ++rank) {
        const auto [begin, end] = range(tensor->numel(), rank);
        if (begin < end)
          files[static_cast<size_t>(rank)]->write(key, values.narrow(0, begin, end - begin));
      }
    }
    for (size_t rank = 0; rank < files.size(); ++rank) {
      files[rank]->commit();
      manifest_.files[rank].sums = files[rank]->sums();
      manifest_.files[rank].attached = view_.attached_of(static_cast<int>(rank));
    }
    write_manifest(folder_, manifest_);
  }

 private:
  static constexpr std::string_view kBuffer = "buffer.";
  // Values of Item::parameter for a buffer, of which every file has its rank's, and for a tensor
  // that only the first file has.
  static constexpr int64_t kEach = -1;
  static constexpr int64_t kFirst = -2;
  struct Item {
    std::string key;
    const LazyTensor* tensor = nullptr;
    int64_t parameter = kEach;
  };

  static at::Tensor read(const LazyTensor& tensor, const std::string& key) {
    auto values = tensor.read();
    if (values.scalar_type() != tensor.dtype || !values.sizes().equals(tensor.shape))
      throw CheckpointError(fmt::format("the tensor '{}' is not of the shape announced", key));
    return values;
  }

  // Slices begin at multiples of 64, as the format requires.
  std::pair<int64_t, int64_t> range(int64_t numel, int rank) const {
    const auto share = at::round_up(at::ceil_div(numel, int64_t{ranks_}), optim::kCodedBlock);
    return {std::min(numel, share * rank), std::min(numel, share * (rank + 1))};
  }

  void add(const CheckpointView::Parameter& from) {
    const auto p = static_cast<int64_t>(manifest_.parameters.size());
    auto& to = manifest_.parameters.emplace_back();
    to.name = from.name;
    to.other_names = from.other_names;
    to.shape = from.shape;
    to.strides = from.strides.empty() ? row_major(from.shape) : from.strides;
    to.optimizer = from.optimizer;
    to.group = from.group;
    to.steps = from.steps;
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto [begin, end] = range(to.numel(), rank);
      if (begin < end) manifest_.files[static_cast<size_t>(rank)].slices.push_back({p, begin, end});
    }
    for (const auto& [name, tensor] : from.states) {
      const auto key = name + "." + from.name;
      if (std::ranges::find(optim::kFactoredStates, name) != optim::kFactoredStates.end()) {
        to.factored.emplace_back(name, tensor.shape);
        tensors_.push_back({key, &tensor, kFirst});
        infos_.front().push_back({key, tensor.dtype, tensor.shape});
        continue;
      }
      if (tensor.shape != from.shape)
        throw CheckpointError(
            fmt::format("the state '{}' of '{}' has another shape than it", name, from.name));
      to.states.push_back({name, std::string(safetensors_name(tensor.dtype))});
      tensors_.push_back({key, &tensor, p});
      for (int rank = 0; rank < ranks_; ++rank) {
        const auto [begin, end] = range(to.numel(), rank);
        if (begin < end)
          infos_[static_cast<size_t>(rank)].push_back({key, tensor.dtype, {end - begin}});
      }
    }
  }

  const CheckpointView& view_;
  fs::path folder_;
  int ranks_;
  Manifest manifest_;
  std::vector<Item> tensors_;
  std::vector<std::vector<TensorInfo>> infos_;  // by rank
};

}  // namespace

void write_checkpoint(const CheckpointView& view, const fs::path& to, int ranks) {
  if (fs::exists(to) && !is_save(to) && !(fs::is_directory(to) && fs::is_empty(to)))
    throw CheckpointError(fmt::format(
        "'{}' is there and is no checkpoint of libzero. Name a folder that does not exist.",
        to.string()));
  WholeFolder folder(to, &fail<CheckpointError>);
  OwnWriter(view, folder.path(), ranks).write();
  folder.commit();
}

}  // namespace zero::foreign
