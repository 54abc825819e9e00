#include "zero/partition/layout.h"

#include <ATen/ceil_div.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "zero/base/error.h"

namespace zero::partition {

Range intersect(Range a, Range b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

Layout::Layout(std::vector<Parameter> parameters, int shards, int64_t unit_bytes, int replicas)
    : parameters_(std::move(parameters)), places_(parameters_.size()), shards_(shards) {
  if (shards < 1) {
    throw ConfigError(fmt::format("The world size is {}; it must be at least 1.", shards));
  }
  if (unit_bytes < 1) {
    throw ConfigError(fmt::format("The unit size is {} bytes; it must be at least 1.", unit_bytes));
  }
  std::map<int64_t, int64_t> open;  // the open unit of each kind
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const int64_t footprint = at::round_up(parameter.numel, kAlignment);
    const auto found = open.find(parameter.kind);
    int64_t index = found == open.end() ? -1 : found->second;
    if (index < 0 || (unit(index).numel + footprint) * parameter.element_bytes > unit_bytes) {
      index = unit_count();
      units_.push_back(
          {.kind = parameter.kind, .element_bytes = parameter.element_bytes, .segments = {}});
      open[parameter.kind] = index;
    }
    auto& unit = units_[static_cast<size_t>(index)];
    places_[i] = {index, static_cast<int64_t>(unit.segments.size())};
    unit.segments.push_back({static_cast<int64_t>(i), unit.numel, parameter.numel});
    unit.content += parameter.numel;
    unit.numel += footprint;
  }
  for (auto& unit : units_) unit.numel = at::round_up(unit.numel, shards_ * replicas * kAlignment);
}

const Segment& Layout::segment_of(int64_t parameter) const {
  const auto& place = places_[static_cast<size_t>(parameter)];
  return unit(place.unit).segments[static_cast<size_t>(place.segment)];
}

Range Layout::slice(int64_t unit, int rank) const {
  const int64_t length = slice_numel(unit);
  return {rank * length, (rank + 1) * length};
}

int64_t Layout::content() const {
  int64_t sum = 0;
  for (const auto& unit : units_) sum += unit.content;
  return sum;
}

int64_t Layout::numel() const {
  int64_t sum = 0;
  for (const auto& unit : units_) sum += unit.numel;
  return sum;
}

}  // namespace zero::partition
