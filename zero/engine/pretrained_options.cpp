#include "zero/engine/pretrained_options.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "zero/base/error.h"

namespace zero {

namespace {

using Sizes = std::vector<int64_t>;

std::string text(const Sizes& sizes) { return fmt::format("({})", fmt::join(sizes, ", ")); }

// The parameters by name.
class Parameters {
 public:
  // `options` is the name of the structure that the checked names stand in.
  Parameters(const std::vector<TensorInfo>& infos, std::string_view options) : options_(options) {
    for (const auto& info : infos) by_name_.emplace(info.name, &info);
  }

  const TensorInfo& find(std::string_view field, const std::string& name) const {
    if (const auto found = by_name_.find(name); found != by_name_.end()) return *found->second;
    std::vector<std::string> known;
    for (const auto& entry : by_name_) known.push_back(entry.first);
    throw ConfigError(
        fmt::format("{}::{} names '{}', which is none of the names of this engine's parameters "
                    "(Engine::parameter_names).{}",
                    options_, field, name, did_you_mean(name, known)));
  }

  void check(const std::map<std::string, PackedMatrix>& packed,
             const std::map<std::string, TensorPlace>& places) const {
    for (const auto& [name, matrix] : packed) {
      const auto& info = find("packed", name);
      const bool sizes = std::ranges::all_of(matrix.sizes, [](int64_t size) { return size > 0; });
      const bool formatted = matrix.format != BaseFormat::as_they_are && sizes;
      const int64_t bytes =
          formatted ? optim::packed_bytes(matrix.format, c10::multiply_integers(matrix.sizes)) : 0;
      if (!formatted || info.dtype != at::kByte || c10::multiply_integers(info.shape) != bytes) {
        throw ConfigError(fmt::format(
            "{}::packed has '{}' as a matrix of format {} and sizes {}, which takes {} bytes, but "
            "the parameter has {} of shape {}. Give what quantised_weights returns for the model.",
            options_, name, name_of(matrix.format), text(matrix.sizes), bytes,
            c10::toString(info.dtype), text(info.shape)));
      }
      if (places.contains(name)) {
        throw ConfigError(fmt::format(
            "{0}::places has '{1}', and so has {0}::packed. A matrix that is kept in bytes is a "
            "tensor of its own; leave its place out.",
            options_, name));
      }
    }
    for (const auto& [name, place] : places) check(find("places", name), place);
  }

 private:
  void check(const TensorInfo& info, const TensorPlace& place) const {
    const auto refuse = [&](std::string_view fault) {
      throw ConfigError(fmt::format(
          "{}::places puts '{}' of shape {} into the tensor '{}' of sizes {} at offsets "
          "{}{}: {}.",
          options_, info.name, text(info.shape), place.tensor, text(place.sizes),
          text(place.offsets), place.transposed ? ", transposed" : "", fault));
    };
    if (place.tensor.empty()) refuse("the tensor has no name");
    if (place.sizes.size() != info.shape.size())
      refuse("the tensor has another number of dimensions than the parameter");
    if (place.offsets.size() != place.sizes.size())
      refuse("there must be an offset for each dimension");
    if (place.transposed && info.shape.size() != 2)
      refuse("only a parameter of two dimensions lies transposed");
    const auto shape = shape_in(place, info.shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      const int64_t offset = place.offsets[d];
      if (offset < 0 || offset > place.sizes[d] || shape[d] > place.sizes[d] - offset)
        refuse(fmt::format("it reaches beyond dimension {}", d));
    }
  }

  std::string_view options_;
  std::map<std::string, const TensorInfo*> by_name_;
};

constexpr std::string_view kSave = "SavePretrainedOptions";

void check_product(const Parameters& parameters, const std::string& name,
                   const MergedProduct& product,
                   const std::map<std::string, PackedMatrix>& packed) {
  constexpr std::string_view kField = "merged";
  const auto& info = parameters.find(kField, name);
  const auto matrix = packed.find(name);
  const auto& sizes = matrix == packed.end() ? info.shape : matrix->second.sizes;
  if (matrix == packed.end() && !at::isFloatingType(info.dtype)) {
    throw ConfigError(fmt::format(
        "{0}::merged adds a product to '{1}', which keeps its values in bytes. Name it in "
        "{0}::packed, with what quantised_weights returns for the model.",
        kSave, name));
  }
  const auto& a = parameters.find(kField, product.a).shape;
  const auto& b = parameters.find(kField, product.b).shape;
  const auto fits = [](int64_t begin, int64_t size, int64_t whole) {
    return begin >= 0 && begin <= whole && size <= whole - begin;
  };
  const bool matrices = sizes.size() == 2 && a.size() == 2 && b.size() == 2;
  if (!matrices || a[0] != b[1] || !fits(product.out_begin, sizes[product.in_out ? 1 : 0], b[0]) ||
      !fits(product.in_begin, sizes[product.in_out ? 0 : 1], a[1])) {
    throw ConfigError(fmt::format(
        "{}::merged adds the product of '{}' of shape {} and '{}' of shape {}, from row {} and "
        "column {} on, to '{}' of shape {}{}, which it does not fit.",
        kSave, product.b, text(b), product.a, text(a), product.out_begin, product.in_begin, name,
        text(sizes), product.in_out ? " (in, out)" : ""));
  }
  if (product.magnitude.empty()) return;
  const auto& lengths = parameters.find(kField, product.magnitude).shape;
  if (lengths != Sizes{sizes[product.in_out ? 1 : 0]}) {
    throw ConfigError(
        fmt::format("{}::merged takes '{}' of shape {} as the lengths of the rows of '{}' of shape "
                    "{}{}, which has another number of them.",
                    kSave, product.magnitude, text(lengths), name, text(sizes),
                    product.in_out ? " (in, out)" : ""));
  }
}

// A tensor of which some parts have come.
struct Parts {
  Sizes sizes;
  at::ScalarType dtype = at::kFloat;
  int64_t missing = 0;                                     // elements
  std::vector<std::pair<std::string, Sizes>> begins = {};  // by the name of a parameter
  std::vector<Sizes> shapes = {};
};

bool overlap(const Sizes& begin, const Sizes& shape, const Sizes& other, const Sizes& of_other) {
  for (size_t d = 0; d < begin.size(); ++d) {
    if (begin[d] >= other[d] + of_other[d] || other[d] >= begin[d] + shape[d]) return false;
  }
  return true;
}

void add_part(Parts& whole, const TensorInfo& info, const TensorPlace& place) {
  if (whole.begins.empty()) {
    whole.sizes = place.sizes;
    whole.dtype = info.dtype;
    whole.missing = c10::multiply_integers(place.sizes);
  }
  const auto shape = shape_in(place, info.shape);
  for (size_t i = 0; i < whole.begins.size(); ++i) {
    const auto& [other, begin] = whole.begins[i];
    if (whole.sizes != place.sizes || whole.dtype != info.dtype) {
      throw ConfigError(fmt::format(
          "{}::places gives the tensor '{}' the sizes {} in {} for '{}', and {} in {} for '{}'.",
          kSave, place.tensor, text(whole.sizes), c10::toString(whole.dtype), other,
          text(place.sizes), c10::toString(info.dtype), info.name));
    }
    if (overlap(place.offsets, shape, begin, whole.shapes[i])) {
      throw ConfigError(fmt::format("{}::places puts '{}' and '{}' on the same elements of '{}'.",
                                    kSave, other, info.name, place.tensor));
    }
  }
  whole.begins.emplace_back(info.name, place.offsets);
  whole.shapes.push_back(shape);
  whole.missing -= c10::multiply_integers(info.shape);
}

}  // namespace

std::vector<int64_t> shape_in(const TensorPlace& place, std::vector<int64_t> shape) {
  if (place.transposed) std::reverse(shape.begin(), shape.end());
  return shape;
}

void check_options(const std::vector<TensorInfo>& parameters, const PretrainedOptions& options) {
  const Parameters known(parameters, "PretrainedOptions");
  known.check(options.packed, options.places);
  for (const auto& entry : options.tied) (void)known.find("tied", entry.second);
  for (const auto& name : options.added) (void)known.find("added", name);
}

WrittenTensors written_tensors(const std::vector<TensorInfo>& parameters,
                               const std::vector<TensorInfo>& buffers,
                               const SavePretrainedOptions& options, at::ScalarType dtype) {
  const Parameters known(parameters, kSave);
  known.check(options.packed, options.places);
  WrittenTensors written;
  for (const auto& [name, product] : options.merged) {
    check_product(known, name, product, options.packed);
    for (const auto& factor : {product.a, product.b, product.magnitude})
      if (!factor.empty()) written.factors.insert(factor);
  }
  std::map<std::string, Parts> wholes;
  std::map<std::string, std::string> taken;  // by the names of tensors, a parameter
  const auto add = [&](TensorInfo info, const std::string& of) {
    const auto [other, is_new] = taken.emplace(info.name, of);
    if (!is_new) {
      throw ConfigError(
          fmt::format("'{}' and '{}' would both be written as the tensor '{}'. Give one of them "
                      "another name in {}::places.",
                      other->second, of, info.name, kSave));
    }
    written.tensors.push_back(std::move(info));
  };
  for (const auto& info : parameters) {
    if (written.factors.contains(info.name)) continue;
    if (const auto place = options.places.find(info.name); place != options.places.end()) {
      auto& whole = wholes[place->second.tensor];
      add_part(whole, info, place->second);
      if (whole.missing == 0) add({place->second.tensor, info.dtype, whole.sizes}, info.name);
    } else if (const auto packed = options.packed.find(info.name); packed != options.packed.end()) {
      add({info.name, dtype, packed->second.sizes}, info.name);
    } else {
      add(info, info.name);
    }
  }
  for (const auto& [tensor, whole] : wholes) {
    if (whole.missing == 0) continue;
    throw ConfigError(fmt::format(
        "{}::places gives the tensor '{}' the sizes {}, of which {} elements belong to no "
        "parameter ('{}' lies there). Give the sizes that the parts make together.",
        kSave, tensor, text(whole.sizes), whole.missing, whole.begins.front().first));
  }
  for (const auto& info : buffers) add(info, info.name);
  return written;
}

}  // namespace zero
