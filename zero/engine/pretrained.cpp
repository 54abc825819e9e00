#include "zero/engine/pretrained.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/comm/agreement.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/pretrained_options.h"
#include "zero/engine/weights_source.h"

namespace zero {

namespace fs = std::filesystem;

PretrainedReport Engine::load_weights_of(const std::string& path, const PretrainedOptions& options,
                                         std::string_view label) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  comm::agree<ConfigError>(group(), label, [&] { check_options(parameter_infos(), options); });
  PretrainedReport report;
  impl_->load_states(label, [&] { return open_weights(impl_->parts(), path, options, report); });
  return report;
}

void Engine::load_weights(const std::string& path) {
  (void)load_weights_of(path, {}, "Engine::load_weights");
}

PretrainedReport load_pretrained(Engine& engine, const std::string& path,
                                 const PretrainedOptions& options) {
  return engine.load_weights_of(path, options, "load_pretrained");
}

namespace {

/// Makes the values that are written of parameters: reads packed matrices back, and adds
/// low-rank products.
class Merging {
 public:
  /// Rank 0 keeps the products' matrices. Collective.
  Merging(Engine& engine, const SavePretrainedOptions& options)
      : products_(options.merged),
        packed_(options.packed),
        dtype_(engine.config().parameter_dtype()) {
    for (const auto& [name, product] : products_) {
      for (const auto& factor : {product.a, product.b, product.magnitude}) {
        if (factor.empty() || !factors_.try_emplace(factor).second) continue;
        const auto value = engine.parameter(factor);
        if (engine.group().rank() == 0) factors_[factor] = value;
      }
    }
  }

  at::Tensor merged(const std::string& name, const at::Tensor& full) const {
    const auto packed = packed_.find(name);
    const auto product = products_.find(name);
    if (packed == packed_.end() && product == products_.end()) return full;
    auto sum = packed == packed_.end() ? full.to(at::kFloat, false, /*copy=*/true)
                                       : read_back(full, packed->second);
    if (product != products_.end()) add(product->second, sum);
    return sum.to(packed == packed_.end() ? full.scalar_type() : dtype_);
  }

 private:
  static at::Tensor read_back(const at::Tensor& packed, const PackedMatrix& matrix) {
    const auto bytes = packed.cpu();
    auto values = at::empty(matrix.sizes, at::kFloat);
    optim::unpack(matrix.format, static_cast<const std::byte*>(bytes.const_data_ptr()),
                  values.numel(), values.mutable_data_ptr(), at::kFloat);
    return values;
  }

  void add(const MergedProduct& product, at::Tensor& sum) const {
    const int64_t out = sum.size(product.in_out ? 1 : 0);
    const int64_t in = sum.size(product.in_out ? 0 : 1);
    const auto a = factors_.at(product.a).narrow(1, product.in_begin, in);
    const auto b = factors_.at(product.b).narrow(0, product.out_begin, out);
    const auto added = at::mm(b, a).mul_(product.scale).to(sum.device());
    auto rows = product.in_out ? sum.t() : sum;
    rows.add_(added);
    if (product.magnitude.empty()) return;
    const auto lengths = rows.norm(2, 1);
    rows.mul_((factors_.at(product.magnitude).to(sum.device()) / lengths).unsqueeze(1));
  }

  const std::map<std::string, MergedProduct>& products_;
  const std::map<std::string, PackedMatrix>& packed_;
  at::ScalarType dtype_;
  std::map<std::string, at::Tensor> factors_;  // undefined on other ranks
};

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
    for (int64_t i = 0; i < part.dim(); ++i)
      target = target.narrow(i, place.offsets.at(static_cast<size_t>(i)), part.size(i));
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

int64_t bytes_of(const TensorInfo& info) {
  return c10::multiply_integers(info.shape) * static_cast<int64_t>(c10::elementSize(info.dtype));
}

/// Writes tensors, which come in a known order, to as many files as they need.
class ShardedWriter {
 public:
  ShardedWriter(fs::path folder, const std::vector<TensorInfo>& tensors, int64_t shard_bytes)
      : folder_(std::move(folder)) {
    int64_t bytes = 0;
    for (const auto& info : tensors) {
      if (shards_.empty() || bytes + bytes_of(info) > shard_bytes) {
        shards_.emplace_back();
        bytes = 0;
      }
      bytes += bytes_of(info);
      total_bytes_ += bytes_of(info);
      total_elements_ += c10::multiply_integers(info.shape);
      shards_.back().push_back(info);
    }
  }

  void write(const std::string& name, const at::Tensor& value) {
    if (!file_) {
      file_.emplace(folder_ / file_name(next_), shards_[next_],
                    std::map<std::string, std::string>{{"format", "pt"}});  // loaders ask for it
    }
    file_->write(name, value);
    if (++written_ < shards_[next_].size()) return;
    file_->commit();
    file_.reset();
    written_ = 0;
    ++next_;
  }

  /// Writes the index, and removes the weights that were there before. Throws CheckpointError, and
  /// removes nothing, unless all tensors were written.
  void finish() {
    if (next_ < shards_.size()) {
      throw CheckpointError(
          fmt::format("The tensor '{}' was not written to {}, whose files stay as they were.",
                      shards_[next_][written_].name, folder_.string()));
    }
    if (shards_.size() > 1) {
      std::map<std::string, std::string> files;
      for (size_t i = 0; i < shards_.size(); ++i) {
        for (const auto& info : shards_[i]) files[info.name] = file_name(i);
      }
      const nlohmann::ordered_json index{
          {"metadata", {{"total_size", total_bytes_}, {"total_parameters", total_elements_}}},
          {"weight_map", files}};
      write_file(folder_ / kWeightsIndex, index.dump(2) + "\n", fail<CheckpointError>);
    }
    std::error_code ignored;
    for (const auto& path : own_weights_in(folder_)) {
      if (!is_new(path.filename().string())) fs::remove(path, ignored);
    }
  }

 private:
  std::string file_name(size_t shard) const {
    if (shards_.size() == 1) return kWeightsFile;
    return fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards_.size());
  }
  bool is_new(const std::string& name) const {
    if (shards_.size() > 1 && name == kWeightsIndex) return true;
    for (size_t i = 0; i < shards_.size(); ++i) {
      if (name == file_name(i)) return true;
    }
    return false;
  }

  fs::path folder_;
  std::vector<std::vector<TensorInfo>> shards_;
  int64_t total_bytes_ = 0;
  int64_t total_elements_ = 0;
  std::optional<SafetensorsWriter> file_;
  size_t next_ = 0;
  size_t written_ = 0;
};

}  // namespace

void save_pretrained(Engine& engine, const std::string& folder,
                     const SavePretrainedOptions& options) {
  if (options.shard_bytes < 1) {
    throw ConfigError(fmt::format("SavePretrainedOptions::shard_bytes is {}; it must be positive.",
                                  options.shard_bytes));
  }
  const auto buffers = engine.buffers();
  const auto written = comm::agree<ConfigError>(engine.group(), "save_pretrained", [&] {
    std::vector<TensorInfo> infos;
    for (const auto& [name, buffer] : buffers)
      infos.push_back({name, buffer.scalar_type(), buffer.sizes().vec()});
    return written_tensors(engine.parameter_infos(), infos, options,
                           engine.config().parameter_dtype());
  });
  const bool writes = engine.group().rank() == 0;
  std::exception_ptr failure;
  const auto attempt = [&](const auto& body) {
    if (!writes || failure) return;
    try {
      body();
    } catch (...) {
      failure = std::current_exception();  // the walk over the parameters is collective: it goes on
    }
  };
  const c10::NoGradGuard no_grad;
  const Merging merging(engine, options);
  ShardedWriter files(folder, written.tensors, options.shard_bytes);
  Assembly assembly;
  engine.visit_parameters([&](const std::string& name, const at::Tensor& full) {
    if (written.factors.contains(name)) return;
    attempt([&] {
      const auto value = merging.merged(name, full);
      const auto place = options.places.find(name);
      if (place == options.places.end()) return files.write(name, value);
      const auto whole = assembly.add(place->second, value);
      if (whole.defined()) files.write(place->second.tensor, whole);
    });
  });
  attempt([&] {
    for (const auto& [name, buffer] : buffers) files.write(name, buffer.cpu());
    files.finish();
    if (!options.config_json.empty())
      write_file(fs::path(folder) / "config.json", options.config_json, fail<CheckpointError>);
  });
  comm::share_failure<CheckpointError>(engine.group(), "Writing the weights", failure);
}

}  // namespace zero
