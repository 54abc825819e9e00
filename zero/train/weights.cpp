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

/// Where a tile of a linear layer lies in the tensor that Hugging Face has in its place.
struct Tile {
  std::string whole;
  std::vector<int64_t> shape;  // of the whole: (in, out), or (out) of a bias
  int64_t in = 0;              // the tile's first features
  int64_t out = 0;
};

/// By the tiles' names; empty where the model has none.
std::map<std::string, Tile> tiles_of(const Gpt2& model) {
  std::map<std::string, Tile> tiles;
  for (const auto& module : model->named_modules()) {
    const auto* layer = module.value()->as<Conv1dImpl>();
    if (layer == nullptr || !layer->tiles) continue;
    const auto& [path, parts] = std::pair(module.key(), layer->tiles);
    const auto& sizes = parts->options();
    for (int64_t o = 0; o < sizes.out_splits; ++o) {
      const int64_t out = parts->out_part(o).begin;
      tiles[fmt::format("{}.tiles.bias_{}", path, o)] = {
          path + ".bias", {sizes.out_features}, 0, out};
      for (int64_t i = 0; i < sizes.in_splits; ++i) {
        tiles[fmt::format("{}.tiles.weight_{}_{}", path, o, i)] = {
            path + ".weight",
            {sizes.in_features, sizes.out_features},
            parts->in_part(i).begin,
            out};
      }
    }
  }
  return tiles;
}

/// The file's tensors in the order of the model's parameters, in the dtype in which the engine
/// keeps them.
std::vector<TensorInfo> declarations(const Gpt2& model, const std::map<std::string, Tile>& tiles,
                                     bool bf16) {
  std::vector<TensorInfo> tensors;
  std::set<std::string> wholes;
  const auto dtype = bf16 ? at::kBFloat16 : at::kFloat;
  for (const auto& parameter : model->named_parameters()) {
    const auto tile = tiles.find(parameter.key());
    if (tile == tiles.end()) {
      tensors.push_back({parameter.key(), dtype, parameter.value().sizes().vec()});
    } else if (wholes.insert(tile->second.whole).second) {
      tensors.push_back({tile->second.whole, dtype, tile->second.shape});
    }
  }
  return tensors;
}

/// Puts tiles together; the tiles of one tensor come one after the other, so that few are held.
class Assembly {
 public:
  /// The whole tensor once all of its tiles have come; undefined before.
  at::Tensor add(const Tile& tile, const at::Tensor& value) {
    auto& whole = wholes_[tile.whole];
    if (!whole.tensor.defined()) {
      whole.tensor = at::empty(tile.shape, value.options());
      whole.missing = whole.tensor.numel();
    }
    if (value.dim() == 1) {
      whole.tensor.narrow(0, tile.out, value.size(0)).copy_(value);
    } else {
      whole.tensor.narrow(0, tile.in, value.size(1))
          .narrow(1, tile.out, value.size(0))
          .copy_(value.t());
    }
    whole.missing -= value.numel();
    if (whole.missing > 0) return {};
    return wholes_.extract(tile.whole).mapped().tensor;
  }

 private:
  struct Whole {
    at::Tensor tensor;
    int64_t missing = 0;  // elements
  };
  std::map<std::string, Whole> wholes_;
};

}  // namespace

void write_weights(Engine& engine, const Gpt2& model, const RunFolder& folder) {
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
  const auto tiles = tiles_of(model);
  attempt([&] {
    file.emplace(folder.model(), declarations(model, tiles, engine.config().bf16), metadata);
  });
  Assembly assembly;
  engine.visit_parameters([&](const std::string& name, const at::Tensor& value) {
    attempt([&] {
      const auto tile = tiles.find(name);
      if (tile == tiles.end()) return file->write(name, value);
      const auto whole = assembly.add(tile->second, value);
      if (whole.defined()) file->write(tile->second.whole, whole);
    });
  });
  attempt([&] {
    file->commit();
    write_text(folder.model_config(), model->config().to_json() + "\n");
  });
  file.reset();
  comm::share_failure<CheckpointError>(engine.group(), "Writing the weights", failure);
}

}  // namespace zero::train
