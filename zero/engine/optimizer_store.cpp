#include "zero/engine/optimizer_store.h"

#include <ATen/ops/where.h>

#include <algorithm>
#include <utility>

#include "zero/base/host_memory.h"

namespace zero {

using partition::intersect;
using partition::Range;

OptimizerStore::OptimizerStore(const partition::Layout& layout, std::vector<Group> groups,
                               std::vector<size_t> group_of, std::vector<Unit> units,
                               const std::shared_ptr<Ledger>& ledger)
    : layout_(layout),
      groups_(std::move(groups)),
      group_of_(std::move(group_of)),
      units_(std::move(units)),
      arrays_(units_.size()),
      steps_(group_of_.size(), 0) {
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    const auto& unit = units_[static_cast<size_t>(u)];
    auto& arrays = arrays_[static_cast<size_t>(u)];
    if (unit.owned.empty()) continue;
    arrays.master = unit.parameters.scalar_type() == at::kFloat
                        ? unit.parameters
                        : host_zeros(unit.owned.size(), at::kFloat, ledger, Category::optimizer);
    const auto states = array_names(u).size() - 1;
    for (size_t i = 0; i < states; ++i) {
      arrays.states.push_back(
          host_zeros(unit.owned.size(), at::kFloat, ledger, Category::optimizer));
    }
  }
}

std::vector<std::string_view> OptimizerStore::array_names(int64_t unit) const {
  if (units_[static_cast<size_t>(unit)].owned.empty()) return {};
  std::vector<std::string_view> names{"master"};
  const auto states =
      optim::state_names(group_of(layout_.unit(unit).segments.front().parameter).optimizer);
  names.insert(names.end(), states.begin(), states.end());
  return names;
}

at::Tensor OptimizerStore::array(int64_t unit, std::string_view name) const {
  const auto names = array_names(unit);
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return {};
  const auto& arrays = arrays_[static_cast<size_t>(unit)];
  return found == names.begin() ? arrays.master
                                : arrays.states[static_cast<size_t>(found - names.begin() - 1)];
}

void OptimizerStore::set_master(int64_t parameter, const at::Tensor& values) {
  const int64_t u = layout_.unit_of(parameter);
  const auto& unit = units_[static_cast<size_t>(u)];
  const auto& segment = layout_.segment_of(parameter);
  const auto mine = intersect(segment.range(), unit.owned);
  if (mine.empty()) return;
  arrays_[static_cast<size_t>(u)]
      .master.narrow(0, mine.begin - unit.owned.begin, mine.size())
      .copy_(values.narrow(0, mine.begin - segment.offset, mine.size()));
}

void OptimizerStore::refresh_master(int64_t parameter) {
  const int64_t u = layout_.unit_of(parameter);
  const auto& unit = units_[static_cast<size_t>(u)];
  const auto mine = intersect(layout_.segment_of(parameter).range(), unit.owned);
  if (mine.empty() || unit.parameters.scalar_type() == at::kFloat) return;
  const auto written = unit.parameters.narrow(0, mine.begin - unit.owned.begin, mine.size());
  auto master =
      arrays_[static_cast<size_t>(u)].master.narrow(0, mine.begin - unit.owned.begin, mine.size());
  master.copy_(
      at::where(master.to(written.scalar_type()) == written, master, written.to(at::kFloat)));
}

void OptimizerStore::update(int64_t unit, const at::Tensor& gradient, double gradient_scale,
                            const std::vector<uint8_t>& present) {
  const auto& target = units_[static_cast<size_t>(unit)];
  const auto& arrays = arrays_[static_cast<size_t>(unit)];
  const auto& segments = layout_.unit(unit).segments;
  const auto at_byte = [](const at::Tensor& tensor, int64_t element) {
    return static_cast<char*>(tensor.data_ptr()) +
           element * static_cast<int64_t>(tensor.element_size());
  };
  const auto apply = [&](Range elements, int64_t parameter) {
    const auto mine = intersect(elements, target.owned);
    if (mine.empty()) return;
    const int64_t begin = mine.begin - target.owned.begin;
    optim::Range range{.numel = mine.size(),
                       .master = reinterpret_cast<float*>(at_byte(arrays.master, begin)),
                       .gradient = at_byte(gradient, begin),
                       .gradient_dtype = gradient.scalar_type()};
    for (size_t i = 0; i < arrays.states.size(); ++i)
      range.state[i] = reinterpret_cast<float*>(at_byte(arrays.states[i], begin));
    if (target.parameters.scalar_type() != at::kFloat) {
      range.parameter = at_byte(target.parameters, begin);
      range.parameter_dtype = target.parameters.scalar_type();
    }
    const auto& group = group_of(parameter);
    optim::update(group.optimizer, steps_[static_cast<size_t>(parameter)], group.lr, gradient_scale,
                  range);
  };
  for (const auto& segment : segments) {
    if (present[static_cast<size_t>(segment.parameter)] != 0)
      ++steps_[static_cast<size_t>(segment.parameter)];
  }
  // Neighbours with the same hyper-parameters and step are one range, the padding between them
  // included: it is zero and stays so.
  size_t first = 0;
  while (first < segments.size()) {
    const auto parameter = static_cast<size_t>(segments[first].parameter);
    size_t last = first;
    const auto joins = [&](size_t next) {
      const auto other = static_cast<size_t>(segments[next].parameter);
      return present[other] != 0 && group_of_[other] == group_of_[parameter] &&
             steps_[other] == steps_[parameter];
    };
    if (present[parameter] == 0) {
      ++first;
      continue;
    }
    while (last + 1 < segments.size() && joins(last + 1)) ++last;
    apply({segments[first].offset, segments[last].range().end}, segments[first].parameter);
    first = last + 1;
  }
}

}  // namespace zero
