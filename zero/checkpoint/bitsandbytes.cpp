#include "zero/checkpoint/bitsandbytes.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/base/parallel.h"
#include "zero/optim/nf4.h"

// Products and sums are rounded one after the other here, as they are there: CMakeLists.txt.

namespace zero {
namespace {

constexpr std::string_view kState = ".quant_state.bitsandbytes__";
constexpr std::string_view kNumbers = ".weight.quant_map";
constexpr std::string_view kScalesOfRows = ".SCB";
constexpr auto kCodes = static_cast<int64_t>(optim::kNf4Values.size());
constexpr int64_t kScaleCodes = 256;

[[noreturn]] void refuse(const WeightPlace& place, std::string_view fault) {
  throw CheckpointError(fmt::format("{} holds the tensor '{}' of bitsandbytes, {}.",
                                    place.file.string(), excerpt(place.info.name), fault));
}

int64_t numel_of(const WeightPlace& place) { return c10::multiply_integers(place.info.shape); }

/// Takes a tensor that stands beside `weight` away.
WeightPlace take(WeightPlaces& places, const WeightPlace& weight, const std::string& name) {
  auto found = places.extract(name);
  if (found.empty()) refuse(weight, fmt::format("but no tensor '{}' beside it", excerpt(name)));
  return std::move(found.mapped());
}

void expect(const WeightPlace& place, int64_t numel, std::initializer_list<at::ScalarType> dtypes,
            std::string_view what) {
  if (numel_of(place) == numel && std::ranges::count(dtypes, place.info.dtype) > 0) return;
  refuse(place,
         fmt::format("which has {} elements of {} where {} are {} of {}", numel_of(place),
                     c10::toString(place.info.dtype), what, numel, c10::toString(*dtypes.begin())));
}

constexpr std::initializer_list<at::ScalarType> kFloats{at::kFloat, at::kBFloat16, at::kHalf};

std::vector<float> numbers(const WeightPlace& place, int64_t begin, int64_t count) {
  const auto values = place.range(begin, count).to(at::kFloat);
  const auto* first = values.const_data_ptr<float>();
  return {first, first + count};
}

/// A matrix in NF4.
struct Nf4Matrix {
  WeightPlace weight, absmax;
  std::optional<WeightPlace> nested_absmax{}, nested_quant_map{};
  std::vector<int64_t> shape{};
  int64_t numel = 1;
  int64_t block = 64;
  int64_t nested_block = 256;
  float offset = 0;
  at::ScalarType dtype = at::kHalf;

  int64_t blocks() const { return at::ceil_div(numel, block); }

  /// Returns the scales of blocks.
  std::vector<float> scales(int64_t first, int64_t last) const {
    if (!nested_absmax) return numbers(absmax, first, last - first);
    const int64_t second = first / nested_block;
    const auto second_scales =
        numbers(*nested_absmax, second, at::ceil_div(last, nested_block) - second);
    const auto meaning = numbers(*nested_quant_map, 0, kScaleCodes);
    const auto codes = absmax.range(first, last - first);
    const auto* code = codes.const_data_ptr<uint8_t>();
    std::vector<float> scales;
    scales.reserve(static_cast<size_t>(last - first));
    for (int64_t b = first; b < last; ++b) {
      const float product =
          meaning[code[b - first]] * second_scales[static_cast<size_t>(b / nested_block - second)];
      scales.push_back(product + offset);
    }
    return scales;
  }

  at::Tensor read(int64_t begin, int64_t count) const {
    const int64_t first = begin / block;
    const int64_t last = at::ceil_div(begin + count, block);
    const auto scale = scales(first, last);
    // A block begins with a whole element of any dtype.
    const auto element = static_cast<int64_t>(c10::elementSize(weight.info.dtype));
    const int64_t from = first * block / 2 / element;
    const int64_t end = at::ceil_div(std::min(last * block, numel), 2 * element);
    const auto codes = weight.range(from, end - from);
    const auto* bytes = static_cast<const uint8_t*>(codes.const_data_ptr());
    auto values = at::empty({count}, at::kFloat);
    auto* out = values.mutable_data_ptr<float>();
    parallel_for(first, last, 1024, [&](int64_t begin_block, int64_t end_block) {
      for (int64_t b = begin_block; b < end_block; ++b) {
        auto of = optim::kNf4Values;
        for (auto& value : of) value *= scale[static_cast<size_t>(b - first)];
        const int64_t stop = std::min((b + 1) * block, begin + count);
        for (int64_t i = std::max(b * block, begin); i < stop; ++i) {
          const int64_t place = i - first * block;
          const uint8_t both = bytes[place / 2];
          out[i - begin] = of[place % 2 == 0 ? both >> 4 : both & 0xF];
        }
      }
    });
    return values.to(dtype);
  }
};

/// The JSON of a matrix's state.
class MatrixState {
 public:
  explicit MatrixState(const WeightPlace& place) : place_(place) {
    if (place.info.dtype != at::kByte) refuse(place, "which is not in bytes");
    const auto bytes = place.read().contiguous();
    try {
      json_ = parse_json({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
    } catch (const Error& error) {
      refuse(place, fmt::format("whose JSON {}", error.what()));
    }
    if (!json_.is_object()) refuse(place, "whose JSON is no object");
  }

  /// Returns a whole number.
  int64_t whole(const char* key) const {
    const auto& found = value(key);
    if (!found.is_number_integer()) fault(key, found);
    return found.get<int64_t>();
  }
  /// Returns the elements of a block.
  int64_t block(const char* key) const {
    const int64_t size = whole(key);
    if (size < 32 || size > 4096 || !std::has_single_bit(static_cast<uint64_t>(size)))
      fault(key, value(key));
    return size;
  }
  float number(const char* key) const {
    const auto& found = value(key);
    if (!found.is_number()) fault(key, found);
    return found.get<float>();
  }
  at::ScalarType dtype() const {
    const auto& found = value("dtype");
    for (const auto& [name, dtype] :
         {std::pair{"float16", at::kHalf}, {"bfloat16", at::kBFloat16}, {"float32", at::kFloat}}) {
      if (found == name) return dtype;
    }
    fault("dtype", found);
  }
  void expect_type(std::string_view type) const {
    const auto& found = value("quant_type");
    if (found != type) fault("quant_type", found);
  }
  std::vector<int64_t> shape() const {
    const auto& found = value("shape");
    if (!found.is_array() || found.empty()) fault("shape", found);
    std::vector<int64_t> shape;
    int64_t numel = 1;
    for (const auto& size : found) {
      if (!size.is_number_integer()) fault("shape", found);
      shape.push_back(size.get<int64_t>());
      if (shape.back() < 1 || numel > std::numeric_limits<int64_t>::max() / 64 / shape.back())
        fault("shape", found);
      numel *= shape.back();
    }
    return shape;
  }

 private:
  const nlohmann::json& value(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) refuse(place_, fmt::format("whose JSON has no '{}'", key));
    return *found;
  }
  [[noreturn]] void fault(const char* key, const nlohmann::json& value) const {
    refuse(place_,
           fmt::format("whose '{}' is {}, which cannot be read back", key, excerpt(value.dump())));
  }

  const WeightPlace& place_;
  nlohmann::json json_;
};

/// Returns what `read` makes of ranges, as a place.
template <class Read>
WeightPlace place_of(TensorInfo info, const std::filesystem::path& file, Read read) {
  const auto shape = info.shape;
  const int64_t numel = c10::multiply_integers(shape);
  return {std::move(info), file, [read, shape, numel] { return read(0, numel).view(shape); }, read};
}

WeightPlace nf4(WeightPlaces& places, const std::string& name, const WeightPlace& state_tensor) {
  const MatrixState state(state_tensor);
  state.expect_type("nf4");
  auto weight = take(places, state_tensor, name);
  auto matrix = std::make_shared<Nf4Matrix>(
      Nf4Matrix{.weight = weight, .absmax = take(places, weight, name + ".absmax")});
  matrix->shape = state.shape();
  matrix->numel = c10::multiply_integers(matrix->shape);
  matrix->block = state.block("blocksize");
  matrix->dtype = state.dtype();
  const auto element = static_cast<int64_t>(c10::elementSize(weight.info.dtype));
  const int64_t bytes = at::ceil_div(matrix->numel, int64_t{2});
  if (numel_of(weight) * element != bytes) {
    refuse(weight, fmt::format("which has {} bytes, but its 'shape' takes {}",
                               numel_of(weight) * element, bytes));
  }
  const auto map = take(places, weight, name + ".quant_map");
  expect(map, kCodes, kFloats, "the numbers of NF4");
  if (!std::ranges::equal(numbers(map, 0, kCodes), optim::kNf4Values))
    refuse(map, "whose numbers are not those of NF4");
  if (matrix->absmax.info.dtype == at::kByte) {
    expect(matrix->absmax, matrix->blocks(), {at::kByte}, "the codes of scales");
    matrix->nested_block = state.block("nested_blocksize");
    matrix->offset = state.number("nested_offset");
    matrix->nested_absmax = take(places, weight, name + ".nested_absmax");
    expect(*matrix->nested_absmax, at::ceil_div(matrix->blocks(), matrix->nested_block), kFloats,
           "second scales");
    matrix->nested_quant_map = take(places, weight, name + ".nested_quant_map");
    expect(*matrix->nested_quant_map, kScaleCodes, kFloats, "the meanings of codes");
  } else {
    expect(matrix->absmax, matrix->blocks(), kFloats, "the scales");
  }
  return place_of({name, matrix->dtype, matrix->shape}, weight.file,
                  [matrix](int64_t begin, int64_t count) { return matrix->read(begin, count); });
}

/// A matrix of LLM.int8.
struct Int8Matrix {
  WeightPlace weight, scales;
  at::ScalarType dtype = at::kFloat;

  at::Tensor read(int64_t begin, int64_t count) const {
    const int64_t columns = weight.info.shape[1];
    const int64_t first = begin / columns;
    const int64_t last = at::ceil_div(begin + count, columns);
    const auto scale = numbers(scales, first, last - first);
    const auto codes = weight.range(begin, count);
    const auto* code = codes.const_data_ptr<int8_t>();
    auto values = at::empty({count}, at::kFloat);
    auto* out = values.mutable_data_ptr<float>();
    for (int64_t row = first; row < last; ++row) {
      const float of = scale[static_cast<size_t>(row - first)];
      const int64_t stop = std::min((row + 1) * columns, begin + count);
      for (int64_t i = std::max(row * columns, begin); i < stop; ++i) {
        const float product = static_cast<float>(code[i - begin]) * of;
        out[i - begin] = product * (1.0F / 127);
      }
    }
    return values.to(dtype);
  }
};

std::optional<WeightPlace> int8(WeightPlaces& places, const std::string& layer,
                                const WeightPlace& scales, at::ScalarType dtype) {
  const auto found = places.find(layer + ".weight");
  if (found == places.end())
    refuse(scales, fmt::format("but no tensor '{}.weight' beside it", excerpt(layer)));
  if (found->second.info.dtype != at::kChar) return std::nullopt;  // a matrix as it was
  auto weight = take(places, scales, layer + ".weight");
  if (weight.info.shape.size() != 2 || numel_of(weight) == 0)
    refuse(weight, "which is in int8 and no matrix");
  expect(scales, weight.info.shape[0], kFloats, "the scales of rows");
  if (const auto format = places.extract(layer + ".weight_format"); !format.empty()) {
    const auto& place = format.mapped();
    if (numel_of(place) != 1 || place.read().to(at::kLong).item<int64_t>() != 0)
      refuse(place, "which says that the rows are not in order (0)");
  }
  const auto matrix = std::make_shared<Int8Matrix>(Int8Matrix{weight, scales, dtype});
  return place_of({weight.info.name, dtype, weight.info.shape}, weight.file,
                  [matrix](int64_t begin, int64_t count) { return matrix->read(begin, count); });
}

/// Returns the dtype of the first weight that is not quantised.
at::ScalarType other_dtype(const WeightPlaces& places) {
  for (const auto& [name, place] : places) {
    if (at::isFloatingType(place.info.dtype) && !name.ends_with(kScalesOfRows))
      return place.info.dtype;
  }
  return at::kFloat;
}

}  // namespace

void read_back_bitsandbytes(WeightPlaces& places) {
  std::vector<std::string> states, scales;
  for (const auto& [name, place] : places) {
    if (name.find(kState) != std::string::npos) states.push_back(name);
    if (name.ends_with(kScalesOfRows)) scales.push_back(name);
  }
  for (const auto& name : states) {
    const auto state = std::move(places.extract(name).mapped());
    const auto at = name.find(kState);
    const auto type = name.substr(at + kState.size());
    if (type != "nf4") {
      refuse(state, fmt::format("whose quantisation is '{}', and only nf4 and 8 bits are read back",
                                excerpt(type)));
    }
    const auto matrix = name.substr(0, at);
    places.insert_or_assign(matrix, nf4(places, matrix, state));
  }
  for (const auto& [name, place] : places) {
    if (name.ends_with(kNumbers))
      refuse(place, fmt::format("but no state ('{}nf4') beside it", kState));
  }
  const auto dtype = other_dtype(places);
  for (const auto& name : scales) {
    const auto layer = name.substr(0, name.size() - kScalesOfRows.size());
    auto matrix = int8(places, layer, places.at(name), dtype);
    if (!matrix) continue;
    places.insert_or_assign(layer + ".weight", std::move(*matrix));
    places.erase(name);
  }
}

}  // namespace zero
