#include "zero/engine/factored_states.h"

#include <ATen/ops/zeros.h>
#include <utility>

#include "zero/base/host_memory.h"

namespace zero {

FactoredStates::FactoredStates(const EnginePlan& plan)
    : entries_(static_cast<size_t>(plan.model().size())) {
  const auto& model = plan.model();
  const auto place = [&](int64_t parameter) -> size_t {
    const auto& unit = plan.units()[static_cast<size_t>(plan.layout().unit_of(parameter))];
    return unit.factored_at() == Tier::device ? 0 : 1;
  };
  std::array<int64_t, 2> numel{};
  for (int64_t p = 0; p < model.size(); ++p) {
    auto factors = factors_of(model.shape_of(p));
    if (!factors) continue;
    numel[place(p)] += factors->rows() + factors->columns();
    entries_[static_cast<size_t>(p)] = Entry{*std::move(factors), {}};
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
    auto& entry = entries_[static_cast<size_t>(p)];
    if (!entry) continue;
    const auto at = place(p);
    const std::array<int64_t, 2> counts{entry->factors.rows(), entry->factors.columns()};
    for (const size_t side : {0, 1}) {
      entry->values[side] = memory_[at].narrow(0, taken[at], counts[side]);
      taken[at] += counts[side];
    }
  }
}

at::Tensor FactoredStates::find(int64_t parameter, std::string_view state) const {
  if (!has(parameter)) return {};
  if (state == kNames[0]) return rows(parameter).view(factors(parameter).row_shape());
  if (state == kNames[1]) return columns(parameter).view(factors(parameter).column_shape());
  return {};
}

void FactoredStates::clear() {
  for (const auto& memory : memory_) {
    if (memory.defined()) memory.zero_();
  }
}

}  // namespace zero
