#include "zero/engine/evaluation_weights.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <utility>

#include "zero/base/device_limit.h"
#include "zero/optim/optimizer.h"

namespace zero {

namespace {

constexpr const char* kBegin = "Engine::optimizer_eval";
constexpr const char* kEnd = "Engine::optimizer_train";

}  // namespace

// Returns the number of optim::evaluated of a parameter.
std::optional<double> EvaluationWeights::share_of(int64_t parameter) const {
  const auto group = plan_.model().parameter_group_of()[static_cast<size_t>(parameter)];
  return optim::evaluated(hyper_parameters_.groups()[group].optimizer);
}

// Returns the trainable units with a parameter whose optimizer evaluates other weights.
std::vector<int64_t> EvaluationWeights::units() const {
  std::vector<int64_t> units;
  for (int64_t u = 0; u < plan_.layout().unit_count(); ++u) {
    if (!plan_.trainable(u)) continue;
    const bool any = std::ranges::any_of(plan_.layout().unit(u).segments, [&](const auto& segment) {
      return share_of(segment.parameter).has_value();
    });
    if (any) units.push_back(u);
  }
  return units;
}

bool EvaluationWeights::lies_apart(int64_t unit) const {
  const auto& plan = flows_.table().plan(unit);
  return plan.own_master() && !plan.split;
}

// Computes the weights for evaluation of a unit whose master weights are those of training.
at::Tensor EvaluationWeights::computed(int64_t unit) const {
  const auto& table = flows_.table();
  const auto& steps = flows_.update().steps();
  const int64_t begin = table.plan(unit).owned.begin;
  auto weights = table.read(unit, State::master).clone();
  for (const auto& segment : plan_.layout().unit(unit).segments) {
    const auto k = share_of(segment.parameter);
    const auto part = table.owned_part(segment.parameter);
    if (!k || steps[static_cast<size_t>(segment.parameter)] == 0 || part.empty()) continue;
    const partition::Range mine{part.begin - begin, part.end - begin};
    const auto y = weights.narrow(0, mine.begin, mine.size());
    // Each operator rounds on its own, so a result does not depend on the slice.
    y.add_((table.read(unit, State::first_moment, mine) - y).mul_(*k));
  }
  return weights;
}

void EvaluationWeights::begin() {
  const auto units = this->units();
  if (plan_.model().evaluates() || units.empty()) return;
  const HostScope not_refused;
  changes_.change_parameters(
      kBegin,
      [&] {
        auto& table = flows_.table();
        trained_.assign(plan_.units().size(), at::Tensor());
        for (const int64_t u : units) {
          if (!lies_apart(u))
            trained_[static_cast<size_t>(u)] = table.read(u, State::master).clone();
        }
        for (const int64_t u : units) {
          const auto state = lies_apart(u) ? State::parameters : State::master;
          table.write(u, state, table.all(u), computed(u));
        }
        plan_.model().set_evaluates(true);
      },
      units);
}

bool EvaluationWeights::end() {
  if (!plan_.model().evaluates()) return false;
  const auto units = this->units();
  const HostScope not_refused;
  changes_.change_parameters(
      kEnd,
      [&] {
        auto& table = flows_.table();
        for (const int64_t u : units) {
          const auto trained = std::exchange(trained_[static_cast<size_t>(u)], {});
          if (trained.defined()) {
            table.write(u, State::master, table.all(u), trained);
          } else {
            table.write(u, State::parameters, table.all(u), table.read(u, State::master));
          }
        }
        plan_.model().set_evaluates(false);
      },
      units);
  return true;
}

at::Tensor EvaluationWeights::read(int64_t unit) const {
  if (plan_.model().evaluates() && lies_apart(unit)) return computed(unit);
  return flows_.table().read(unit, State::master);
}

}  // namespace zero
