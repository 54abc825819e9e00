#include "zero/engine/update.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

namespace zero {

using partition::intersect;

UpdateFlow::UpdateFlow(const partition::Layout& layout, StateTable& table,
                       std::vector<OptimizerGroup> groups, std::vector<size_t> group_of)
    : layout_(layout),
      table_(table),
      groups_(std::move(groups)),
      group_of_(std::move(group_of)),
      steps_(group_of_.size(), 0) {}

void UpdateFlow::begin() {
  rates_.clear();
  for (const auto& group : groups_) rates_.push_back(group.lr);
}

UpdateFlow::Runs UpdateFlow::runs(int64_t unit, const std::vector<uint8_t>& present) const {
  const auto& segments = layout_.unit(unit).segments;
  const auto& owned = table_.plan(unit).owned;
  const auto parameter = [&](size_t i) { return static_cast<size_t>(segments[i].parameter); };
  Runs runs;
  for (size_t first = 0; first < segments.size();) {
    const size_t p = parameter(first);
    size_t next = first + 1;
    if (present[p] != 0) {
      const auto joins = [&](size_t other) {
        return present[other] != 0 && group_of_[other] == group_of_[p] &&
               steps_[other] == steps_[p];
      };
      while (next < segments.size() && joins(parameter(next))) ++next;
      const auto mine = intersect({segments[first].offset, segments[next - 1].range().end}, owned);
      if (!mine.empty()) {
        runs.push_back(
            {{mine.begin - owned.begin, mine.end - owned.begin}, group_of_[p], steps_[p]});
      }
    }
    first = next;
  }
  return runs;
}

void UpdateFlow::update(int64_t unit, const at::Tensor& gradient, double gradient_scale,
                        const std::vector<uint8_t>& present) {
  for (const auto& segment : layout_.unit(unit).segments) {
    const auto p = static_cast<size_t>(segment.parameter);
    if (present[p] != 0) ++steps_[p];
  }
  const auto runs = this->runs(unit, present);
  if (runs.empty()) return;
  const auto gradient_dtype =
      gradient.defined() ? gradient.scalar_type() : table_.plan(unit).gradient_dtype;
  table_.for_each_block(unit, gradient, [&](const StateTable::Block& block) {
    apply(unit, runs, block, gradient_dtype, gradient_scale);
  });
}

void UpdateFlow::apply(int64_t unit, const Runs& runs, const StateTable::Block& block,
                       at::ScalarType gradient_dtype, double gradient_scale) const {
  const auto& plan = table_.plan(unit);
  const auto& at = block.at;
  const auto address = [&](State state, at::ScalarType dtype, int64_t element) -> void* {
    return at[column(state)] +
           (element - block.begin) * static_cast<int64_t>(c10::elementSize(dtype));
  };
  if (block.fresh) {
    int64_t updated = 0;
    for (const auto& run : runs)
      updated += std::max<int64_t>(0, intersect(run.owned, {block.begin, block.end}).size());
    if (updated < block.end - block.begin) {
      // What is not updated is written all the same: it is the rounded master.
      const auto all = [&](State state, at::ScalarType dtype) {
        return at::from_blob(at[column(state)], {block.end - block.begin},
                             at::TensorOptions().dtype(dtype));
      };
      all(State::parameters, plan.dtype).copy_(all(State::master, at::kFloat));
    }
  }
  for (const auto& run : runs) {
    const auto mine = intersect(run.owned, {block.begin, block.end});
    if (mine.empty()) continue;
    optim::Range range{.numel = mine.size(),
                       .gradient = address(State::gradients, gradient_dtype, mine.begin),
                       .gradient_dtype = gradient_dtype};
    auto* master = address(State::master, plan.master_dtype(), mine.begin);
    if (plan.split) {
      range.lower = static_cast<uint16_t*>(master);
    } else {
      range.master = static_cast<float*>(master);
    }
    for (size_t i = 0; i < plan.moments.size(); ++i) {
      range.state[i] =
          static_cast<float*>(address(moment(static_cast<int64_t>(i)), at::kFloat, mine.begin));
    }
    if (at[column(State::parameters)] != nullptr) {
      range.parameter = address(State::parameters, plan.dtype, mine.begin);
      range.parameter_dtype = plan.dtype;
    }
    optim::update(groups_[run.group].optimizer, run.step, rates_[run.group], gradient_scale, range);
  }
}

}  // namespace zero
