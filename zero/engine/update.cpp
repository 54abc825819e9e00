#include "zero/engine/update.h"

#include <algorithm>
#include <limits>

#include "zero/device/memory.h"
#include "zero/engine/flat.h"
#include "zero/optim/narrow.h"

namespace zero {

using partition::intersect;

UpdateFlow::UpdateFlow(const EnginePlan& plan, StateTable& table, FactoredStates& factored,
                       const HyperParameters& hyper_parameters)
    : layout_(plan.layout()),
      table_(table),
      timeline_(plan.group().accounts().timeline),
      hyper_parameters_(hyper_parameters),
      model_(plan.model()),
      parameter_group_of_(model_.parameter_group_of()),
      sweeps_(plan, table, factored,
              [this](int64_t parameter) {
                return optim::suited(
                    in_force_[parameter_group_of_[static_cast<size_t>(parameter)]].optimizer,
                    model_.parameter(parameter).dim());
              }),
      steps_(parameter_group_of_.size(), 0) {
  // Without a limit nothing is cut off.
  if (const double limit = plan.config().gradient_clipping_value; limit != 0)
    gradient_limit_ = static_cast<float>(limit);
}

// The timeline shows the update of the unit while the result lives.
Timeline::Scope UpdateFlow::timeline_scope(int64_t unit) const {
  const auto& plan = table_.plan(unit);
  return {*timeline_, Activity::update, table_.label(unit),
          plan.owned.size() * static_cast<int64_t>(c10::elementSize(plan.dtype))};
}

void UpdateFlow::begin() {
  steps_before_ = steps_;
  in_force_ = hyper_parameters_.groups();
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
        return !two_sweeps(unit) && present[other] != 0 &&
               parameter_group_of_[other] == parameter_group_of_[p] && steps_[other] == steps_[p];
      };
      while (next < segments.size() && joins(parameter(next))) ++next;
      const auto mine = intersect({segments[first].offset, segments[next - 1].range().end}, owned);
      if (!mine.empty()) {
        runs.push_back({{mine.begin - owned.begin, mine.end - owned.begin},
                        segments[first].parameter,
                        parameter_group_of_[p],
                        steps_[p]});
      }
    }
    first = next;
  }
  return runs;
}

void UpdateFlow::count(int64_t unit, const std::vector<uint8_t>& present) {
  for (const auto& segment : layout_.unit(unit).segments) {
    const auto p = static_cast<size_t>(segment.parameter);
    if (present[p] != 0) ++steps_[p];
  }
}

Optimizer UpdateFlow::optimizer_of(int64_t unit, size_t parameter_group) const {
  const auto first = layout_.unit(unit).segments.front().parameter;
  return optim::suited(in_force_[parameter_group].optimizer, model_.parameter(first).dim());
}

namespace {

// Returns the address of an element in a block's array of a state, or null if it has no array.
std::byte* place_of(const StateTable::Block& block, State state, int64_t element,
                    at::ScalarType dtype) {
  auto* begin = block.at[column(state)];
  if (begin == nullptr) return nullptr;
  return begin + (element - block.begin) * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace

// Updates `mine` of a unit whose bf16 parameters are their own master weights, or whose states are
// narrow.
void UpdateFlow::update_narrow(int64_t unit, const Run& run, partition::Range mine,
                               const StateTable::Block& block, at::ScalarType gradient_dtype,
                               double gradient_scale) const {
  const auto& plan = table_.plan(unit);
  optim::NarrowOperands operands{.wide = operands_of(unit, block, mine, gradient_dtype),
                                 .state_format = plan.moment_format,
                                 .key = optim::rounding_key(unit, run.step),
                                 .first = plan.owned.begin + mine.begin};
  if (plan.narrow) {
    operands.weights = reinterpret_cast<uint16_t*>(
        place_of(block, State::master, mine.begin, plan.master_dtype()));
  }
  for (size_t i = 0; i < plan.moments.size(); ++i) {
    const auto state = moment(static_cast<int64_t>(i));
    operands.state[i] = block.at[column(state)] + plan.bytes_of(state, mine.begin - block.begin);
  }
  const auto& in_force = in_force_[run.parameter_group];
  optim::update(in_force.optimizer, run.step, in_force.lr, gradient_scale, operands);
}

c10::Device UpdateFlow::updated_on(int64_t unit) const {
  return table_.device_of(table_.plan(unit).updated_at());
}

at::ScalarType UpdateFlow::gradient_dtype(int64_t unit, const at::Tensor& gradient) const {
  return gradient.defined() ? gradient.scalar_type() : table_.plan(unit).gradient_dtype;
}

void UpdateFlow::update(int64_t unit, const at::Tensor& gradient, double gradient_scale,
                        const std::vector<uint8_t>& present) {
  const auto scope = timeline_scope(unit);
  const bool second = two_sweeps(unit);
  if (!second) count(unit, present);
  const auto runs = this->runs(unit, present);
  if (runs.empty()) {
    if (second) sweeps_.end(unit);
    return;
  }
  const auto dtype = gradient_dtype(unit, gradient);
  table_.for_each_block(unit, gradient, [&](const StateTable::Block& block) {
    write_fresh(unit, runs, block);
    for (const auto& run : runs) {
      const auto mine = intersect(run.owned, {block.begin, block.end});
      if (mine.empty()) continue;
      if (table_.plan(unit).updates_narrow()) {
        update_narrow(unit, run, mine, block, dtype, gradient_scale);
        continue;
      }
      auto operands = operands_of(unit, block, mine, dtype);
      const auto& in_force = in_force_[run.parameter_group];
      if (!second) {
        optim::update(in_force.optimizer, run.step, in_force.lr, gradient_scale, operands);
        continue;
      }
      operands.gradient = sweeps_.direction(unit, mine.begin);
      operands.gradient_dtype = at::kFloat;
      operands.gradient_limit = std::numeric_limits<float>::infinity();
      optim::second_sweep(optimizer_of(unit, run.parameter_group), run.step, in_force.lr,
                          sweeps_.ratio(run.parameter), operands);
    }
  });
  if (second) sweeps_.end(unit);
}

void UpdateFlow::first_sweep(int64_t unit, const at::Tensor& gradient, double gradient_scale,
                             const std::vector<uint8_t>& present) {
  const auto scope = timeline_scope(unit);
  count(unit, present);
  sweeps_.begin(unit);
  for (const auto& segment : layout_.unit(unit).segments) {
    const auto p = static_cast<size_t>(segment.parameter);
    if (present[p] != 0) sweeps_.begin(segment.parameter, steps_[p]);
  }
  const auto runs = this->runs(unit, present);
  if (runs.empty()) return;
  const auto dtype = gradient_dtype(unit, gradient);
  const auto sweep = [&](const StateTable::Block& block) {
    write_fresh(unit, {}, block);
    for (const auto& run : runs) {
      const auto mine = intersect(run.owned, {block.begin, block.end});
      if (mine.empty()) continue;
      auto found = sweeps_.findings(unit, mine.begin);
      optim::first_sweep(optimizer_of(unit, run.parameter_group), run.step, gradient_scale,
                         operands_of(unit, block, mine, dtype), found);
      sweeps_.add(run.parameter, found);
    }
  };
  table_.for_each_block(unit, gradient, sweep, StateTable::Weights::unchanged);
}

// Writes elements that are not updated: their new value is the rounded master weight.
void UpdateFlow::write_fresh(int64_t unit, const Runs& runs, const StateTable::Block& block) const {
  if (!block.fresh) return;
  int64_t updated = 0;
  for (const auto& run : runs)
    updated += std::max<int64_t>(0, intersect(run.owned, {block.begin, block.end}).size());
  if (updated == block.end - block.begin) return;
  const auto all = [&](State state, at::ScalarType dtype) {
    return tensor_at(block.at[column(state)], block.end - block.begin, dtype, updated_on(unit));
  };
  all(State::parameters, table_.plan(unit).dtype).copy_(all(State::master, at::kFloat));
}

optim::Operands UpdateFlow::operands_of(int64_t unit, const StateTable::Block& block,
                                        partition::Range elements,
                                        at::ScalarType gradient_dtype) const {
  const auto& plan = table_.plan(unit);
  const auto address = [&](State state, at::ScalarType dtype) {
    return place_of(block, state, elements.begin, dtype);
  };
  optim::Operands operands{.numel = elements.size(),
                           .device = updated_on(unit),
                           .gradient = address(State::gradients, gradient_dtype),
                           .gradient_dtype = gradient_dtype,
                           .gradient_limit = gradient_limit_};
  auto* master = address(State::master, plan.master_dtype());
  if (plan.split) {
    operands.lower = reinterpret_cast<uint16_t*>(master);
  } else if (!plan.narrow) {
    operands.master = reinterpret_cast<float*>(master);
  }
  for (size_t i = 0; i < plan.moments.size() && !plan.updates_narrow(); ++i) {
    operands.state[i] =
        reinterpret_cast<float*>(address(moment(static_cast<int64_t>(i)), at::kFloat));
  }
  if (block.at[column(State::parameters)] != nullptr) {
    operands.parameter = address(State::parameters, plan.dtype);
    operands.parameter_dtype = plan.dtype;
  }
  return operands;
}

}  // namespace zero
