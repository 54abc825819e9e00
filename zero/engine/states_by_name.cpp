// Full states by name, at any stage.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "zero/base/error.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"
#include "zero/engine/replicas.h"

namespace zero {

namespace {

// A parameter that was asked for.
struct Asked {
  Asked(const EnginePlan& plan, std::string_view name)
      : index(plan.model().index_of(name)),
        unit(plan.layout().unit_of(index)),
        segment(plan.layout().segment_of(index)),
        like(plan.model().parameter(index)) {}

  // Returns the parameter in fp32 (packed weights as their bytes) and in its shape. `owned` is this
  // rank's part of the unit.
  at::Tensor picked(const StateTable& table, const at::Tensor& owned) const {
    const auto values = table.full(unit, owned).narrow(0, segment.offset, segment.numel);
    return unflattened(values.scalar_type() == at::kByte ? values : values.to(at::kFloat), like);
  }

  int64_t index;
  int64_t unit;
  const partition::Segment& segment;
  const at::Tensor& like;
};

Asked trainable(const EnginePlan& plan, std::string_view name, std::string_view what) {
  const Asked asked(plan, name);
  if (plan.trainable(asked.unit)) return asked;
  throw ConfigError(
      fmt::format("Parameter '{}' is frozen (requires_grad was false when the Engine was made): "
                  "it has no {}.",
                  name, what));
}

void check_shape(const at::Tensor& value, c10::IntArrayRef wanted, std::string_view name) {
  if (value.defined() && value.sizes() == wanted) return;
  throw ConfigError(fmt::format(
      "Parameter '{}' has shape ({}), but the given value has ({}).", name, fmt::join(wanted, ", "),
      value.defined() ? fmt::format("{}", fmt::join(value.sizes(), ", ")) : "none"));
}

// Throws ConfigError, naming the states that there are, if the table has no state of that name.
State state_of(const Flows& flows, const Asked& asked, std::string_view name,
               std::string_view state) {
  if (const auto found = flows.table().find(asked.unit, state)) return *found;
  std::vector<std::string> known;
  for (const auto& entry : flows.table().names(asked.unit)) known.emplace_back(entry);
  for (const auto& factored : flows.factored().of(asked.index)) known.emplace_back(factored.name);
  throw ConfigError(fmt::format("Parameter '{}' has no optimizer state '{}'; it has {}.{}", name,
                                state, fmt::join(known, ", "), did_you_mean(state, known)));
}

}  // namespace

at::Tensor Engine::parameter(std::string_view name) {
  const Aside aside(impl_->flows);
  auto& impl = *impl_;
  const Asked asked(impl.plan, name);
  impl.plan.model().check_values("Engine::parameter");
  impl.changes.change_parameters("Engine::parameter");  // the user's writes so far count
  const auto& table = impl.flows.table();
  return asked.picked(table, impl.plan.trainable(asked.unit)
                                 ? impl.evaluation.read(asked.unit)
                                 : table.read(asked.unit, State::parameters));
}

void Engine::set_parameter(std::string_view name, const at::Tensor& value) {
  const Aside aside(impl_->flows);
  auto& impl = *impl_;
  const Asked asked(impl.plan, name);
  impl.changes.check_trains("Engine::set_parameter");
  check_given(group(), "Engine::set_parameter", name, value);
  check_shape(value, asked.like.sizes(), name);
  const auto values = flattened(value, asked.like, at::kFloat);
  const auto write = [&] {
    impl.flows.table().write_parameter(asked.index, values);
    if (impl.plan.model().trainable(asked.index))
      impl.flows.table().write_owned(asked.index, State::master, values);
  };
  impl.changes.change_parameters("Engine::set_parameter", write, {asked.unit});
}

at::Tensor Engine::gradient(std::string_view name) {
  const Aside aside(impl_->flows);
  auto& impl = *impl_;
  const auto asked = trainable(impl.plan, name, "gradient");
  impl.progress.check_gradients_kept();
  auto& reduce = impl.flows.reduce();
  reduce.complete();
  if (reduce.present()[static_cast<size_t>(asked.index)] == 0) return {};
  return asked.picked(impl.flows.table(), reduce.sum(asked.unit)).mul_(impl.progress.mean_scale());
}

std::vector<uint8_t> Engine::gradients_present() {
  const Aside aside(impl_->flows);
  auto& impl = *impl_;
  impl.progress.check_gradients_kept();
  const bool passed = impl.progress.passed() || impl.progress.micro_batches() > 0;
  if (!comm::any_rank(group(), passed, "gradients present"))
    return std::vector<uint8_t>(static_cast<size_t>(impl.plan.model().size()), 0);
  impl.flows.reduce().complete();
  return impl.flows.reduce().present();
}

const std::vector<uint8_t>& Engine::gradients_used() const { return impl_->gradients_used; }

void Engine::set_gradient(std::string_view name, const at::Tensor& value) {
  const Aside aside(impl_->flows);
  auto& impl = *impl_;
  const auto asked = trainable(impl.plan, name, "gradient");
  check_given(group(), "Engine::set_gradient", name, value);
  impl.progress.check_gradients_kept();
  if (!value.defined()) {
    impl.flows.reduce().drop(asked.index);
    return;
  }
  check_shape(value, asked.like.sizes(), name);
  impl.flows.reduce().set(asked.index,
                          flattened(value, asked.like, at::kFloat) / impl.progress.mean_scale());
}

at::Tensor Engine::optimizer_state(std::string_view name, std::string_view state) {
  const Aside aside(impl_->flows);
  auto& impl = *impl_;
  const auto asked = trainable(impl.plan, name, "optimizer state");
  impl.plan.model().check_values("Engine::optimizer_state");
  impl.changes.check_between_steps("Engine::optimizer_state");
  impl.changes.complete_update("Engine::optimizer_state");
  const auto& factored = impl.flows.factored();
  if (const auto* found = factored.find(asked.index, state))
    return factored.read(asked.index, *found).clone();
  const auto& table = impl.flows.table();
  return asked.picked(table, table.read(asked.unit, state_of(impl.flows, asked, name, state)));
}

void Engine::set_optimizer_state(std::string_view name, std::string_view state,
                                 const at::Tensor& value) {
  if (state == "master") {
    set_parameter(name, value);
    return;
  }
  const Aside aside(impl_->flows);
  auto& impl = *impl_;
  const auto asked = trainable(impl.plan, name, "optimizer state");
  impl.changes.check_trains("Engine::set_optimizer_state");
  check_given(group(), fmt::format("Engine::set_optimizer_state {}", state), name, value);
  const auto* factored = impl.flows.factored().find(asked.index, state);
  check_shape(value, factored ? c10::IntArrayRef(factored->sizes) : asked.like.sizes(), name);
  impl.changes.check_between_steps("Engine::set_optimizer_state");
  impl.changes.complete_update("Engine::set_optimizer_state");
  if (factored) {
    if (factored->values.defined()) factored->values.copy_(value);
    return;
  }
  impl.flows.table().write_owned(asked.index, state_of(impl.flows, asked, name, state),
                                 flattened(value, asked.like, at::kFloat));
}

std::vector<std::pair<std::string, at::Tensor>> Engine::buffers() const {
  return impl_->plan.model().plain_buffers();
}

void Engine::visit_parameters(
    const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  const Aside aside(impl_->flows);
  const auto& plan = impl_->plan;
  plan.model().check_values("Engine::visit_parameters");
  impl_->changes.change_parameters("Engine::visit_parameters");
  int64_t gathered = -1;
  at::Tensor unit;
  for (int64_t i = 0; i < plan.model().size(); ++i) {
    const int64_t u = plan.layout().unit_of(i);
    if (u != gathered) {
      unit = at::Tensor();
      unit = impl_->flows.gather().full(u);
      gathered = u;
    }
    const auto& segment = plan.layout().segment_of(i);
    if (plan.group().rank() == 0)
      visit(plan.model().name(i),
            unflattened(unit.narrow(0, segment.offset, segment.numel), plan.model().parameter(i)));
  }
}

}  // namespace zero
