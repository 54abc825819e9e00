#include "zero/engine/weights_source.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/engine/flat.h"
#include "zero/engine/matrix_packer.h"
#include "zero/engine/pretrained_options.h"

namespace zero {

using partition::Range;

namespace {

// Models are saved with and without the part that holds all but the head, or a wrapper.
constexpr std::array<std::string_view, 4> kPrefixes{"model.", "transformer.", "bert.", "module."};
// Names of the files of TensorFlow, which the first BERTs had.
constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kOlder{
    {{"LayerNorm.weight", "LayerNorm.gamma"}, {"LayerNorm.bias", "LayerNorm.beta"}}};

constexpr int64_t kRowPiece = int64_t{1} << 22;  // elements that are read at a time

std::vector<std::string> spellings(const std::vector<std::string>& names) {
  auto all = names;
  for (const auto& name : names) {
    for (const auto& [now, older] : kOlder) {
      if (name.ends_with(now))
        all.push_back(name.substr(0, name.size() - now.size()) + std::string(older));
    }
  }
  for (const auto& name : std::vector(all)) {
    for (const auto prefix : kPrefixes) {
      all.push_back(std::string(prefix) + name);
      if (name.starts_with(prefix)) all.push_back(name.substr(prefix.size()));
    }
  }
  return all;
}

std::string shape_text(at::IntArrayRef sizes) {
  return fmt::format("({})", fmt::join(sizes, ", "));
}

class WeightsSource final : public StateSource {
 public:
  WeightsSource(const StateParts& parts, const std::filesystem::path& path,
                const PretrainedOptions& options, PretrainedReport& report)
      : parts_(parts), files_(path), report_(report) {
    report_ = {};
    const auto& model = parts.model;
    for (int64_t p = 0; p < model.size(); ++p) places_.push_back(place_of(p, options));
    check_missing(options);
    for (const auto& [name, buffer] : model.plain_buffers()) {
      buffers_.push_back(find({buffer_key(name), name}));
      if (buffers_.back().empty()) {
        report_.kept_buffers.push_back(name);
      } else {
        check(buffers_.back(), buffer.sizes().vec(), name, buffer.scalar_type());
      }
    }
    for (const auto& name : files_.names()) {
      if (!used_.contains(name)) report_.left_over.push_back(name);
    }
  }

  Progress progress() const override {
    Progress none;
    none.parameter_steps.assign(places_.size(), 0);
    if (parts_.config.scales_loss()) none.loss_scale.emplace(parts_.config.loss_scaling);
    return none;
  }

  bool has(int64_t /*parameter*/, State /*moment*/) const override { return false; }
  at::Tensor factored(int64_t /*parameter*/, std::string_view /*state*/) const override {
    return {};
  }
  at::Tensor buffer(size_t index) const override {
    return buffers_[index].empty() ? at::Tensor() : files_.read(buffers_[index]);
  }

  at::Tensor read(int64_t parameter, State state, Range elements) const override {
    const auto& [tensor, is_part, place, packed] = places_[static_cast<size_t>(parameter)];
    if (tensor.empty()) return present(parameter, state, elements);
    if (packed != BaseFormat::as_they_are) return packer(tensor, packed).bytes(elements);
    const auto& like = parts_.model.parameter(parameter);
    if (!is_part && like.is_contiguous())
      return files_.read(tensor, elements.begin, elements.size()).to(at::kFloat);
    auto values = is_part ? part(place, like) : files_.read(tensor);
    return flattened(values, like, at::kFloat).narrow(0, elements.begin, elements.size());
  }

 private:
  struct Found {
    std::string tensor;  // empty where the files have none
    bool is_part = false;
    TensorPlace place;
    BaseFormat packed = BaseFormat::as_they_are;  // the parameter keeps its bytes
  };

  Found place_of(int64_t p, const PretrainedOptions& options) {
    const auto& model = parts_.model;
    const auto& like = model.parameter(p);
    const auto place = options.places.find(model.name(p));
    const bool is_part = place != options.places.end();
    const auto packed = options.packed.find(model.name(p));
    const bool packs = packed != options.packed.end();
    Found found{.tensor = is_part ? find({place->second.tensor}) : find(model.names_of(p), p),
                .is_part = is_part,
                .place = is_part ? place->second : TensorPlace{},
                .packed = packs ? packed->second.format : BaseFormat::as_they_are};
    auto others = is_part ? std::vector<std::string>() : model.names_of(p);
    for (const auto& [name, parameter] : options.tied) {
      if (parameter == model.name(p)) others.push_back(name);
    }
    // The spellings of one name at a time: a name that is found hides the others no longer.
    for (const auto& name : others) {
      const auto also = find({name}, p);
      if (also.empty()) continue;
      if (found.tensor.empty()) found.tensor = also;
      check_tied(p, found.tensor, also);
    }
    if (found.tensor.empty()) {
      auto& list = options.added.contains(model.name(p)) ? report_.kept : report_.missing;
      list.push_back(model.name(p));
    } else {
      found.place.tensor = found.tensor;
      check(found.tensor,
            packs     ? packed->second.sizes
            : is_part ? found.place.sizes
                      : like.sizes().vec(),
            model.name(p), packs ? at::kFloat : like.scalar_type());
    }
    return found;
  }

  // The first of the names, or of their spellings, that the files have; `of`: but not one that is
  // the name of another parameter.
  std::string find(const std::vector<std::string>& names, std::optional<int64_t> of = {}) {
    for (auto& name : spellings(names)) {
      if (!files_.contains(name)) continue;
      if (of && parts_.model.find(name).value_or(*of) != *of) continue;
      used_.insert(name);
      return std::move(name);
    }
    return {};
  }

  void check(const std::string& tensor, const std::vector<int64_t>& sizes, const std::string& of,
             at::ScalarType dtype) const {
    const auto& info = files_.info(tensor);
    const bool any = at::isFloatingType(dtype);
    if (info.shape == sizes && (any ? at::isFloatingType(info.dtype) : info.dtype == dtype)) return;
    throw CheckpointError(fmt::format(
        "{} holds the tensor '{}' in {} of shape {}, but '{}' of the model takes {} of shape {}.",
        files_.path().string(), tensor, c10::toString(info.dtype), shape_text(info.shape), of,
        any ? "any floating-point dtype" : c10::toString(dtype), shape_text(sizes)));
  }

  // The ranks look at their own elements, which together are all; where a parameter has other
  // elements than the tensors, each looks at all, once.
  void check_tied(int64_t p, const std::string& one, const std::string& other) {
    if (one == other) return;
    auto mine = parts_.table.owned_part(p);  // in elements of the unit
    const int64_t offset = parts_.layout.segment_of(p).offset;
    mine = {mine.begin - offset, mine.end - offset};
    const int64_t numel = c10::multiply_integers(files_.info(one).shape);
    if (numel != parts_.model.parameter(p).numel()) {
      mine = {0, numel};
      if (!same_.emplace(one, other).second) return;
    }
    const auto refuse = [&] {
      throw CheckpointError(
          fmt::format("{} holds '{}' and '{}' with different values, but the model ties them. Set "
                      "tie_word_embeddings to false in its config.json, or give a module of your "
                      "own two tensors.",
                      files_.path().string(), one, other));
    };
    if (files_.info(one).shape != files_.info(other).shape) refuse();
    for (int64_t begin = mine.begin; begin < mine.end; begin += kRowPiece) {
      const int64_t count = std::min(kRowPiece, mine.end - begin);
      if (!files_.read(one, begin, count).equal(files_.read(other, begin, count))) refuse();
    }
  }

  void check_missing(const PretrainedOptions& options) const {
    const auto& missing = report_.missing;
    const bool keeps = options.allow_missing && !parts_.model.awaits_values();
    if (missing.empty() || keeps) return;
    throw CheckpointError(
        fmt::format("{} holds no tensor for {} of the model's {} parameters: '{}'.{}",
                    files_.path().string(), missing.size(), parts_.model.size(),
                    fmt::join(missing, "', '"), did_you_mean(missing.front(), files_.names())));
  }

  // Elements of a parameter as they are now.
  at::Tensor present(int64_t parameter, State state, Range elements) const {
    const int64_t unit = parts_.layout.unit_of(parameter);
    const int64_t first =
        parts_.layout.segment_of(parameter).offset - parts_.table.plan(unit).owned.begin;
    return parts_.table.read(unit, state, {first + elements.begin, first + elements.end}).clone();
  }

  // A part of a tensor, of the shape of `like`, read some whole rows at a time.
  at::Tensor part(const TensorPlace& place, const at::Tensor& like) const {
    if (place.sizes.empty()) return files_.read(place.tensor);
    const auto shape = shape_in(place, like.sizes().vec());
    auto values = at::empty(shape, files_.info(place.tensor).dtype);
    if (values.numel() == 0) return values;
    const int64_t row = c10::multiply_integers(place.sizes) / place.sizes.front();
    const int64_t rows = std::max<int64_t>(1, kRowPiece / row);
    for (int64_t begin = 0; begin < shape.front(); begin += rows) {
      const int64_t count = std::min(rows, shape.front() - begin);
      auto sizes = place.sizes;
      sizes.front() = count;
      auto piece =
          files_.read(place.tensor, (place.offsets.front() + begin) * row, count * row).view(sizes);
      for (size_t d = 1; d < shape.size(); ++d)
        piece = piece.narrow(static_cast<int64_t>(d), place.offsets[d], shape[d]);
      values.narrow(0, begin, count).copy_(piece);
    }
    return place.transposed ? values.t() : values;
  }

  // Returns what quantises a tensor; several ranges of one are asked for after each other.
  MatrixPacker& packer(const std::string& tensor, BaseFormat format) const {
    if (packer_of_ != tensor) {
      packer_.emplace(format, c10::multiply_integers(files_.info(tensor).shape),
                      [this, tensor](int64_t begin, int64_t count) {
                        return files_.read(tensor, begin, count);
                      });
      packer_of_ = tensor;
    }
    return *packer_;
  }

  StateParts parts_;
  WeightFiles files_;
  PretrainedReport& report_;          // of the caller, while this is made
  std::vector<Found> places_;         // by parameter
  std::vector<std::string> buffers_;  // their tensors; empty where the files have none
  std::set<std::string> used_;
  std::set<std::pair<std::string, std::string>> same_;  // tied tensors that were compared whole
  mutable std::string packer_of_;                       // the tensor that this quantises
  mutable std::optional<MatrixPacker> packer_;
};

}  // namespace

std::unique_ptr<StateSource> open_weights(const StateParts& parts,
                                          const std::filesystem::path& path,
                                          const PretrainedOptions& options,
                                          PretrainedReport& report) {
  return std::make_unique<WeightsSource>(parts, path, options, report);
}

}  // namespace zero
