// Hyper-parameters by parameter group. A Muon group has a twin for the parameters that are no
// matrices, which follows its settings.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <variant>

#include "zero/base/error.h"
#include "zero/engine/engine_impl.h"
#include "zero/optim/optimizer.h"

namespace zero {

OptimizerGroup& Engine::Impl::parameter_group(size_t index) const {
  auto& groups = update->groups();
  if (index >= groups.size())
    throw ConfigError(
        fmt::format("There is no parameter group {}; there are {}.", index, groups.size()));
  return groups[index];
}

void Engine::set_gradient_clipping(double norm) {
  if (!(norm >= 0)) {
    throw ConfigError(fmt::format(
        "Engine::set_gradient_clipping was given {}; the largest norm is a number above 0, or 0 to "
        "clip nothing.",
        norm));
  }
  if (norm > 0 && impl_->timing.in_backward) {
    throw ConfigError(
        fmt::format("Engine::set_gradient_clipping was given {}, but with update_in_backward "
                    "weights are updated "
                    "before the norm is known. Switch update_in_backward off, or do not clip.",
                    norm));
  }
  impl_->config.gradient_clipping = norm;
}

void Engine::set_lr(double lr, size_t index) {
  auto& group = impl_->parameter_group(index);
  group.lr = lr;
  if (const auto beside = impl_->model.beside_matrices_of(index)) {
    const auto& muon = std::get<Muon>(group.optimizer);
    impl_->parameter_group(*beside).lr =
        muon.lr > 0 ? lr * optim::beside_matrices(muon).lr / muon.lr : muon.adam_lr.value_or(lr);
  }
}

double Engine::lr(size_t index) const { return impl_->parameter_group(index).lr; }
Optimizer Engine::optimizer(size_t index) const {
  const auto& group = impl_->parameter_group(index);
  auto with_rate = group.optimizer;
  std::visit([&](auto& each) { each.lr = group.lr; }, with_rate);
  if (const auto beside = impl_->model.beside_matrices_of(index))
    std::get<Muon>(with_rate).adam_lr = lr(*beside);
  return with_rate;
}

void Engine::set_optimizer(const Optimizer& optimizer, size_t index) {
  auto& group = impl_->parameter_group(index);
  const auto described = [](const Optimizer& each) {
    const auto states = optim::state_names(each);
    return fmt::format("{} with {}", optim::name(each),
                       states.empty() ? "no states" : fmt::format("{}", fmt::join(states, ", ")));
  };
  if (optimizer.index() != group.optimizer.index() ||
      optim::state_names(optimizer) != optim::state_names(group.optimizer)) {
    throw ConfigError(fmt::format(
        "Parameter group {} has {}, and was given {}. Hyper-parameters may change while training, "
        "but not the states. Construct a new Engine.",
        index, described(group.optimizer), described(optimizer)));
  }
  optim::check(optimizer);
  group = {.optimizer = optimizer, .lr = optim::lr(optimizer)};
  if (const auto beside = impl_->model.beside_matrices_of(index)) {
    const Optimizer others = optim::beside_matrices(std::get<Muon>(optimizer));
    impl_->parameter_group(*beside) = {.optimizer = others, .lr = optim::lr(others)};
  }
}

void Engine::set_betas(double beta1, double beta2, size_t index) {
  auto changed = impl_->parameter_group(index).optimizer;
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

size_t Engine::group_count() const { return impl_->update->groups().size(); }

}  // namespace zero
