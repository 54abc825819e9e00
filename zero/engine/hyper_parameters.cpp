#include "zero/engine/hyper_parameters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <variant>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/config/config.h"
#include "zero/optim/sweeps.h"

namespace zero {

OptimizerInForce::OptimizerInForce(const Optimizer& of)
    : optimizer(of), lr(optim::lr(of)), hash(Hash().add(dump(of)).value()) {}

HyperParameters::HyperParameters(const Model& model) : model_(model) {
  for (const auto& each : model.optimizers()) groups_.emplace_back(each);
}

int64_t HyperParameters::hash(double clipping) const {
  Hash all;
  all.add(std::bit_cast<int64_t>(clipping));
  for (const auto& group : groups_)
    all.add(std::bit_cast<int64_t>(group.lr)).add(static_cast<int64_t>(group.hash));
  return static_cast<int64_t>(all.value() >> 16U);
}

void HyperParameters::check_same(const std::vector<int64_t>& by_rank, int rank,
                                 double clipping) const {
  const auto other = std::ranges::find_if(by_rank, [&](int64_t s) { return s != by_rank[0]; });
  if (other == by_rank.end()) return;
  std::vector<double> rates;
  for (const auto& group : groups_) rates.push_back(group.lr);
  throw Error(fmt::format(
      "Engine::step: rank {} has another learning rate, hyper-parameter or gradient clipping than "
      "rank 0 (learning rates of rank {}: {}; gradient clipping: {}). Set the same on every rank, "
      "from numbers that all ranks share: for a schedule that follows the loss, its mean over "
      "ranks.",
      other - by_rank.begin(), rank, fmt::join(rates, ", "), clipping));
}

size_t HyperParameters::checked(size_t index) const {
  if (index < groups_.size()) return index;
  throw ConfigError(
      fmt::format("There is no parameter group {}; there are {}.", index, groups_.size()));
}

void HyperParameters::set_lr(double lr, size_t index) {
  auto& changed = in_force(index);
  if (!std::isfinite(lr) || lr < 0) {
    throw ConfigError(fmt::format(
        "Engine::set_lr was given the learning rate {} for parameter group {}; it must be a number "
        "of at least 0. The rate stays {}.",
        lr, index, changed.lr));
  }
  changed.lr = lr;
  if (const auto beside = model_.beside_matrices_of(index)) {
    const double given = optim::lr(changed.optimizer);
    const double of_beside = optim::beside_matrices(changed.optimizer)->lr;
    const auto* own = optim::rate_beside_matrices(changed.optimizer);
    in_force(*beside).lr = given > 0 ? lr * of_beside / given : own->value_or(lr);
  }
}

Optimizer HyperParameters::optimizer(size_t index) const {
  auto with_rate = in_force(index).optimizer;
  std::visit([&](auto& each) { each.lr = lr(index); }, with_rate);
  if (const auto beside = model_.beside_matrices_of(index))
    *optim::rate_beside_matrices(with_rate) = lr(*beside);
  return with_rate;
}

// Throws ConfigError if states of the group would have other shapes.
void HyperParameters::check_same_shapes(const Optimizer& now, const Optimizer& before,
                                        size_t index) const {
  for (int64_t p = 0; p < model_.size(); ++p) {
    if (model_.parameter_group_of()[static_cast<size_t>(p)] != index) continue;
    auto shape = model_.shape_of(p);
    const auto states = [&](const Optimizer& by) {
      shape.optimizer = optim::suited(by, static_cast<int64_t>(shape.sizes.size()));
      return factored_states_of(shape);
    };
    const auto kept = states(before);
    const auto given = states(now);
    const auto [had, has] = std::ranges::mismatch(kept, given);
    if (had == kept.end()) continue;
    throw ConfigError(fmt::format(
        "Parameter group {} was given {} whose state {} of '{}' has the shape ({}), but it is "
        "({}). "
        "Hyper-parameters may change while training, but not the states. Construct a new Engine.",
        index, optim::name(now), had->name, shape.name, fmt::join(has->sizes, ", "),
        fmt::join(had->sizes, ", ")));
  }
}

void HyperParameters::set_optimizer(const Optimizer& optimizer, size_t index) {
  auto& changed = in_force(index);
  const auto described = [](const Optimizer& each) {
    const auto states = optim::state_names(each);
    return fmt::format("{} with {}", optim::name(each),
                       states.empty() ? "no states" : fmt::format("{}", fmt::join(states, ", ")));
  };
  if (optimizer.index() != changed.optimizer.index() ||
      optim::state_names(optimizer) != optim::state_names(changed.optimizer)) {
    throw ConfigError(fmt::format(
        "Parameter group {} has {}, and was given {}. Hyper-parameters may change while training, "
        "but not the states. Construct a new Engine.",
        index, described(changed.optimizer), described(optimizer)));
  }
  optim::check(optimizer);
  check_same_shapes(optimizer, changed.optimizer, index);
  changed = OptimizerInForce(optimizer);
  if (const auto beside = model_.beside_matrices_of(index)) {
    in_force(*beside) = OptimizerInForce(*optim::beside_matrices(optimizer));
  }
}

void HyperParameters::set_betas(double beta1, double beta2, size_t index) {
  auto changed = in_force(index).optimizer;
  std::visit(
      [&](auto& optimizer) {
        if constexpr (requires { optimizer.beta1; }) {
          optimizer.beta1 = beta1;
          optimizer.beta2 = beta2;
        } else {
          throw ConfigError(fmt::format(
              "Engine::set_betas: the optimizer of parameter group {} has no betas.", index));
        }
      },
      changed);
  const double rate = lr(index);
  set_optimizer(changed, index);
  set_lr(rate, index);
}

}  // namespace zero
