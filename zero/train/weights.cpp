#include "zero/train/weights.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/comm/agreement.h"

namespace zero::train {
namespace {

void write_text(const std::filesystem::path& path, const std::string& text) {
  OutputFile file(path, fail<CheckpointError>);
  file.write(text.data(), text.size());
  file.commit();
}

using Places = std::map<std::string, TensorPlace>;

/// The file's tensors in the order of the model's parameters, in the dtype in which the engine
/// keeps them.
std::vector<TensorInfo> declarations(const torch::nn::Module& model, const Places& places,
                                     at::ScalarType dtype) {
  std::vector<TensorInfo> tensors;
  std::set<std::string> wholes;
  for (const auto& parameter : model.named_parameters()) {
    const auto place = places.find(parameter.key());
    if (place == places.end()) {
      tensors.push_back({parameter.key(), dtype, parameter.value().sizes().vec()});
    } else if (wholes.insert(place->second.tensor).second) {
      tensors.push_back({place->second.tensor, dtype, place->second.sizes});
    }
  }
  return tensors;
}

/// Puts tensors together; the parts of one come one after the other, so that few are held.
class Assembly {
 public:
  /// The whole tensor once all of its parts have come; undefined before.
  at::Tensor add(const TensorPlace& place, const at::Tensor& value) {
    auto& whole = wholes_[place.tensor];
    if (!whole.tensor.defined()) {
      whole.tensor = at::empty(place.sizes, value.options());
      whole.missing = whole.tensor.numel();
    }
    const auto part = place.transposed ? value.t() : value;
    auto target = whole.tensor;
    for (int64_t i = 0; i < part.dim(); ++i) {
      target = target.narrow(i, place.offsets.at(static_cast<size_t>(i)), part.size(i));
    }
    target.copy_(part);
    whole.missing -= value.numel();
    if (whole.missing > 0) return {};
    return wholes_.extract(place.tensor).mapped().tensor;
  }

 private:
  struct Whole {
    at::Tensor tensor;
    int64_t missing = 0;  // elements
  };
  std::map<std::string, Whole> wholes_;
};

}  // namespace

void write_weights(Engine& engine, LanguageModel& model, const RunFolder& folder) {
  const bool writes = engine.group().rank() == 0;
  std::optional<SafetensorsWriter> file;
  std::exception_ptr failure;
  const auto attempt = [&](const auto& body) {
    if (!writes || failure) return;
    try {
      body();
    } catch (const Error&) {
      failure = std::current_exception();  // the walk over the parameters is collective: it goes on
    }
  };
  const std::map<std::string, std::string> metadata{
      {"format", "pt"}};  // Hugging Face's loader asks for it
  const auto places = model.export_places();
  attempt([&] {
    file.emplace(folder.model(),
                 declarations(model.module(), places, engine.config().parameter_dtype()), metadata);
  });
  Assembly assembly;
  engine.visit_parameters([&](const std::string& name, const at::Tensor& value) {
    attempt([&] {
      const auto place = places.find(name);
      if (place == places.end()) return file->write(name, value);
      const auto whole = assembly.add(place->second, value);
      if (whole.defined()) file->write(place->second.tensor, whole);
    });
  });
  attempt([&] {
    file->commit();
    write_text(folder.model_config(), model.config().to_json() + "\n");
  });
  file.reset();
  comm::share_failure<CheckpointError>(engine.group(), "Writing the weights", failure);
}

}  // namespace zero::train
