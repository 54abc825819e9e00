// The functions of an Engine that ask one of its owners.
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>

#include "zero/base/device_limit.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/norm.h"
#include "zero/engine/replicas.h"

namespace zero {

void Engine::rehook() { impl_->plan.model().hook(); }
void Engine::complete_update() { impl_->changes.complete_update("Engine::complete_update"); }
void Engine::optimizer_eval() { impl_->evaluation.begin(); }
void Engine::optimizer_train() { impl_->evaluation.end(); }
bool Engine::passed() const { return impl_->progress.passed(); }
int64_t Engine::micro_batches() const { return impl_->progress.micro_batches(); }
int64_t Engine::steps() const { return impl_->progress.steps(); }
double Engine::loss_scale() const {
  const auto& scale = impl_->progress.loss_scale();
  return scale ? scale->value() : 1;
}

const Config& Engine::config() const { return impl_->plan.config(); }
comm::Group& Engine::group() { return impl_->plan.group(); }
int64_t Engine::parameter_count() const { return impl_->plan.layout().content(); }
const partition::Layout& Engine::layout() const { return impl_->plan.layout(); }
std::vector<std::string> Engine::parameter_names() const { return impl_->plan.model().names(); }
std::vector<TensorInfo> Engine::parameter_infos() const {
  const auto& model = impl_->plan.model();
  std::vector<TensorInfo> infos;
  for (int64_t i = 0; i < model.size(); ++i) {
    const auto& parameter = model.parameter(i);
    infos.push_back({model.name(i), parameter.scalar_type(), parameter.sizes().vec()});
  }
  return infos;
}
paging::Pager* Engine::pager() { return impl_->flows.gather().pager(); }
void Engine::set_buffer_policy(BufferPolicy policy) { impl_->buffer_policy = policy; }
BufferPolicy Engine::buffer_policy() const { return impl_->buffer_policy; }

// The functions for hyper-parameters.

void Engine::set_gradient_clipping(double norm) {
  if (!(norm >= 0)) {
    throw ConfigError(fmt::format(
        "Engine::set_gradient_clipping was given {}; the largest norm is a number above 0, or 0 to "
        "clip nothing.",
        norm));
  }
  if (norm > 0 && impl_->plan.timing().in_backward && !config().clip_by_previous_norm) {
    throw ConfigError(fmt::format(
        "Engine::set_gradient_clipping was given {}, but with update_in_backward weights are "
        "updated before the norm is known. Switch update_in_backward off, clip by the norm of the "
        "step before (clip_by_previous_norm), or do not clip.",
        norm));
  }
  impl_->plan.set_gradient_clipping(norm);
}

void Engine::set_lr(double lr, size_t index) { impl_->hyper_parameters.set_lr(lr, index); }
double Engine::lr(size_t index) const { return impl_->hyper_parameters.lr(index); }
Optimizer Engine::optimizer(size_t index) const { return impl_->hyper_parameters.optimizer(index); }
void Engine::set_optimizer(const Optimizer& optimizer, size_t index) {
  impl_->hyper_parameters.set_optimizer(optimizer, index);
}
void Engine::set_betas(double beta1, double beta2, size_t index) {
  impl_->hyper_parameters.set_betas(beta1, beta2, index);
}
size_t Engine::group_count() const { return impl_->hyper_parameters.groups().size(); }

std::vector<double> Engine::group_norms() {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  impl_->progress.check_gradients_kept();
  impl_->progress.check_whole_step();
  auto& reduce = impl_->flows.reduce();
  reduce.complete();
  auto norms = zero::group_norms(impl_->plan, reduce);
  for (auto& norm : norms) norm *= impl_->progress.mean_scale();
  return norms;
}

int64_t Engine::parameter_steps(std::string_view name) const {
  const auto index = static_cast<size_t>(impl_->plan.model().index_of(name));
  if (!impl_->flows.schedule().delayed()) impl_->flows.schedule().finish();
  return impl_->flows.update().steps()[index];
}

void Engine::set_parameter_steps(std::string_view name, int64_t count) {
  check_given(group(), "Engine::set_parameter_steps", name, count);
  if (count < 0) {
    throw ConfigError(fmt::format(
        "Engine::set_parameter_steps: parameter '{}' cannot have had {} updates.", name, count));
  }
  const auto index = static_cast<size_t>(impl_->plan.model().index_of(name));
  impl_->changes.complete_update("Engine::set_parameter_steps");
  auto& counts = impl_->flows.update().steps();
  counts[index] = count;
  impl_->progress.set_steps(std::ranges::max(counts));
}

std::vector<Divergence> Engine::diverged_parameters() {
  return zero::diverged_parameters(impl_->plan, impl_->flows);
}

// The functions for costs, by formula and as counted.

partition::LayoutMemory Engine::memory_formula() const {
  return planned_memory(impl_->plan.step(), Tier::device);
}
partition::LayoutMemory Engine::host_memory_formula() const {
  return planned_memory(impl_->plan.step(), Tier::host);
}
TrafficFormula Engine::traffic_formula(bool updated) const {
  auto step = impl_->plan.step();
  step.look_ups = impl_->flows.reduce().look_ups();
  step.rows = impl_->flows.gather().looked_up();
  return planned_traffic(step, updated);
}
int64_t Engine::host_update_bytes() const { return zero::host_update_bytes(impl_->plan.step()); }
DeviceTraffic Engine::host_traffic() const { return impl_->flows.table().copier().counts(); }
DiskUse Engine::disk() const { return impl_->flows.table().disk_use(); }
OutOfMemory Engine::explained(const c10::OutOfMemoryError& error) const {
  return impl_->memory.explained(error);
}

void Engine::record_schedule() {
  if (pager() == nullptr) {
    throw ConfigError(
        "Engine::record_schedule: parameters are replicated here, so that no pager sees which of "
        "them operators use. Use stage 3, on one rank with offload_param.device \"cpu\".");
  }
  impl_->recording.start(impl_->flows);
}
const paging::StepSchedule* Engine::schedule() const { return impl_->recording.schedule(); }

}  // namespace zero
