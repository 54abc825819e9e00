#include "zero/engine/factored_states.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "zero/base/host_memory.h"
#include "zero/engine/gather_arrays.h"

namespace zero {

FactoredStates::FactoredStates(const EnginePlan& plan)
    : group_(*plan.placement().shards),
      owners_(plan.step().factored_owners),
      states_(static_cast<size_t>(plan.model().size())) {
  const auto& model = plan.model();
  const auto is_here = [&](int64_t parameter) {
    return everywhere(parameter) || owners_[static_cast<size_t>(parameter)] == group_.rank();
  };
  const auto place = [&](int64_t parameter) -> size_t {
    const auto& unit = plan.units()[static_cast<size_t>(plan.layout().unit_of(parameter))];
    return unit.factored_at() == Tier::device ? 0 : 1;
  };
  std::vector<std::vector<optim::FactoredState>> planned;
  std::array<int64_t, 2> numel{};
  for (int64_t p = 0; p < model.size(); ++p) {
    const auto shape = model.shape_of(p);
    planned.push_back(factored_states_of(shape));
    factors_.push_back(factors_of(shape));
    for (const auto& state : planned.back()) {
      if (is_here(p)) numel[place(p)] += c10::multiply_integers(state.sizes);
    }
  }
  for (const size_t at : {0, 1}) {
    if (numel[at] == 0) {  // the matrices have no elements
      memory_[at] = at::zeros({0}, at::TensorOptions(at::kFloat));
      continue;
    }
    memory_[at] = host_zeros(numel[at], at::kFloat, plan.group().ledger(),
                             at == 0 ? Category::optimizer : Category::host_optimizer);
  }
  std::array<int64_t, 2> taken{};
  for (int64_t p = 0; p < model.size(); ++p) {
    const auto at = place(p);
    for (const auto& [name, sizes] : planned[static_cast<size_t>(p)]) {
      auto& state = states_[static_cast<size_t>(p)].emplace_back(Named{name, sizes, {}});
      if (!is_here(p)) continue;
      const int64_t count = c10::multiply_integers(sizes);
      state.values = memory_[at].narrow(0, taken[at], count).view(sizes);
      taken[at] += count;
    }
  }
}

const FactoredStates::Named* FactoredStates::find(int64_t parameter, std::string_view state) const {
  const auto& all = of(parameter);
  const auto found = std::ranges::find(all, state, &Named::name);
  return found == all.end() ? nullptr : &*found;
}

at::Tensor FactoredStates::read(int64_t parameter, const Named& state) const {
  if (everywhere(parameter)) return state.values;
  auto values = state.values.defined() ? state.values.clone()
                                       : at::empty(state.sizes, at::TensorOptions(at::kFloat));
  broadcast_array(group_, values, owners_[static_cast<size_t>(parameter)], state.name);
  return values;
}

void FactoredStates::clear() {
  for (const auto& memory : memory_) {
    if (memory.defined()) memory.zero_();
  }
}

}  // namespace zero
