// Full states by name, at any stage.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"
#include "zero/paging/pager.h"

namespace zero {

at::Tensor Engine::Impl::full(int64_t unit, const at::Tensor& owned) {
  const int64_t numel = layout.unit(unit).numel;
  auto slice = owned.to(table->device());
  if (owned.numel() == numel) return slice;
  auto whole = at::empty({numel}, slice.options());
  placement.shards->all_gather(whole, slice, model.name(first_of(unit))).wait();
  return whole;
}

void Engine::Impl::write_owned(int64_t index, State state, const at::Tensor& values) {
  const int64_t u = layout.unit_of(index);
  const auto mine = table->owned_part(index);
  const int64_t first = table->plan(u).owned.begin;
  if (mine.empty()) return;
  table->write(u, state, {mine.begin - first, mine.end - first},
               values.narrow(0, mine.begin - layout.segment_of(index).offset, mine.size()));
}

namespace {

// A segment of a full unit as a tensor of the parameter's shape, in fp32.
at::Tensor pick(const at::Tensor& unit, const partition::Segment& segment, const at::Tensor& like) {
  return unflattened(unit.narrow(0, segment.offset, segment.numel).to(at::kFloat), like);
}

void check_shape(const at::Tensor& value, const at::Tensor& like, std::string_view name) {
  if (value.defined() && value.sizes() == like.sizes()) return;
  throw ConfigError(
      fmt::format("Parameter '{}' has shape ({}), but the given value has ({}).", name,
                  fmt::join(like.sizes(), ", "),
                  value.defined() ? fmt::format("{}", fmt::join(value.sizes(), ", ")) : "none"));
}

void check_trainable(bool trainable, std::string_view name, std::string_view what) {
  if (!trainable)
    throw ConfigError(
        fmt::format("Parameter '{}' is frozen (requires_grad was false when the Engine was made): "
                    "it has no {}.",
                    name, what));
}

}  // namespace

at::Tensor Engine::parameter(std::string_view name) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  const int64_t i = impl_->model.index_of(name);
  const int64_t u = impl_->layout.unit_of(i);
  impl_->change_parameters("Engine::parameter");  // the user's writes so far count
  const auto state = impl_->trainable(u) ? State::master : State::parameters;
  const auto unit = impl_->full(u, impl_->table->read(u, state));
  return pick(unit, impl_->layout.segment_of(i), impl_->model.parameter(i));
}

void Engine::set_parameter(std::string_view name, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  const int64_t i = impl_->model.index_of(name);
  const auto& like = impl_->model.parameter(i);
  check_shape(value, like, name);
  const int64_t u = impl_->layout.unit_of(i);
  const auto values = flattened(value, like, at::kFloat);
  impl_->change_parameters("Engine::set_parameter",
                           [&] {
                             impl_->table->write_parameter(i, values);
                             if (impl_->model.trainable(i)) impl_->table->write_master(i, values);
                           },
                           {u});
}

at::Tensor Engine::gradient(std::string_view name) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  const int64_t i = impl_->model.index_of(name);
  const int64_t u = impl_->layout.unit_of(i);
  check_trainable(impl_->trainable(u), name, "gradient");
  impl_->check_gradients_kept();
  impl_->reduce->finish();
  if (impl_->reduce->present()[static_cast<size_t>(i)] == 0) return {};
  const double scale = impl_->mean_scale();
  const auto unit = impl_->full(u, impl_->reduce->sum(u));
  return pick(unit, impl_->layout.segment_of(i), impl_->model.parameter(i)).mul_(scale);
}

void Engine::set_gradient(std::string_view name, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  const int64_t i = impl_->model.index_of(name);
  const auto& like = impl_->model.parameter(i);
  check_trainable(impl_->trainable(impl_->layout.unit_of(i)), name, "gradient");
  check_shape(value, like, name);
  impl_->check_gradients_kept();
  impl_->reduce->set(i, flattened(value, like, at::kFloat) / impl_->mean_scale());
}

at::Tensor Engine::optimizer_state(std::string_view name, std::string_view state) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  const int64_t i = impl_->model.index_of(name);
  const int64_t u = impl_->layout.unit_of(i);
  check_trainable(impl_->trainable(u), name, "optimizer state");
  impl_->check_between_steps("Engine::optimizer_state");
  impl_->complete_update("Engine::optimizer_state");
  if (const auto factored = impl_->factored->find(i, state); factored.defined())
    return factored.clone();
  const auto cell = impl_->table->find(u, state);
  if (!cell) {
    std::vector<std::string> known;
    for (const auto& entry : impl_->table->names(u)) known.emplace_back(entry);
    if (impl_->factored->has(i))
      known.insert(known.end(), FactoredStates::kNames.begin(), FactoredStates::kNames.end());
    throw ConfigError(fmt::format("Parameter '{}' has no optimizer state '{}'; it has {}.{}", name,
                                  state, fmt::join(known, ", "), did_you_mean(state, known)));
  }
  return pick(impl_->full(u, impl_->table->read(u, *cell)), impl_->layout.segment_of(i),
              impl_->model.parameter(i));
}

int64_t Engine::parameter_steps(std::string_view name) const {
  return impl_->update->steps()[static_cast<size_t>(impl_->model.index_of(name))];
}

void Engine::set_parameter_steps(std::string_view name, int64_t count) {
  if (count < 0) {
    throw ConfigError(fmt::format(
        "Engine::set_parameter_steps: parameter '{}' cannot have had {} updates.", name, count));
  }
  const int64_t i = impl_->model.index_of(name);
  impl_->complete_update("Engine::set_parameter_steps");
  auto& counts = impl_->update->steps();
  counts[static_cast<size_t>(i)] = count;
  impl_->steps = *std::max_element(counts.begin(), counts.end());
}

void Engine::set_optimizer_state(std::string_view name, std::string_view state,
                                 const at::Tensor& value) {
  if (state == "master") {
    set_parameter(name, value);
    return;
  }
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  const int64_t i = impl_->model.index_of(name);
  const int64_t u = impl_->layout.unit_of(i);
  const auto& like = impl_->model.parameter(i);
  check_trainable(impl_->trainable(u), name, "optimizer state");
  const auto factored = impl_->factored->find(i, state);
  check_shape(value, factored.defined() ? factored : like, name);
  impl_->check_between_steps("Engine::set_optimizer_state");
  impl_->complete_update("Engine::set_optimizer_state");
  if (factored.defined()) {
    factored.copy_(value);
    return;
  }
  const auto cell = impl_->table->find(u, state);
  if (!cell)
    throw ConfigError(fmt::format("Parameter '{}' has no optimizer state '{}'.", name, state));
  impl_->write_owned(i, *cell, flattened(value, like, at::kFloat));
}

void Engine::visit_parameters(
    const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  impl_->change_parameters("Engine::visit_parameters");
  int64_t gathered = -1;
  at::Tensor unit;
  for (size_t p = 0; p < impl_->model.names().size(); ++p) {
    const auto i = static_cast<int64_t>(p);
    const int64_t u = impl_->layout.unit_of(i);
    if (u != gathered) {
      unit = at::Tensor();
      unit = impl_->gather->full(u);
      gathered = u;
    }
    const auto& segment = impl_->layout.segment_of(i);
    if (impl_->group().rank() == 0)
      visit(impl_->model.names()[p], unflattened(unit.narrow(0, segment.offset, segment.numel),
                                                 impl_->model.parameters()[p]));
  }
}

}  // namespace zero
