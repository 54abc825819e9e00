// The life of an Engine, and a step: backward, accumulate, step.
#include "zero/engine/engine.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/full_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>

#include "zero/base/not_finite.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/norm.h"
#include "zero/engine/replicas.h"
#include "zero/paging/pager.h"

namespace zero {

namespace {

// Ranks draw different numbers, so that dropout differs.
void seed_ranks(const EnginePlan& plan) {
  const int rank = plan.group().rank();
  if (!plan.config().seed_by_rank || rank == 0) return;
  const auto seed = [&](at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(generator.current_seed() + static_cast<uint64_t>(rank));
  };
  const auto device = plan.model().device();
  const auto& of_host = at::detail::getDefaultCPUGenerator();
  seed(of_host);
  if (device.is_cpu()) return;
  const auto& of_device = at::globalContext().defaultGenerator(device);
  if (of_device != of_host) seed(of_device);
}

}  // namespace

Engine::Impl::Impl(NamedTensors tensors, const std::vector<ParameterGroup>& groups, Config config,
                   std::shared_ptr<comm::Group> group)
    : plan(std::move(tensors), groups, std::move(config), std::move(group)),
      flows(plan, progress, hyper_parameters, memory, recording) {
  recording.start_first(flows);
  if (plan.group().size() > 1) shown = std::make_unique<ShownOperators>(plan.group());
  seed_ranks(plan);
}

Engine::Impl::~Impl() {
  plan.model().leave();
  recording.stop(flows);
}

namespace {

// Returns the group that an Engine was given, where one can be made.
std::shared_ptr<comm::Group> checked(std::shared_ptr<comm::Group> group) {
  if (group == nullptr) {
    throw ConfigError(
        "The Engine was given a null group. Give what zero::init returns, or leave the argument "
        "out to train in one process.");
  }
  if (c10::InferenceMode::is_enabled()) {
    throw ConfigError(
        "The Engine cannot be constructed under c10::InferenceMode: its tensors could not be "
        "written or trained later. Construct it outside; forward passes may run under it.");
  }
  return group;
}

}  // namespace

Engine::Engine(NamedTensors tensors, std::vector<ParameterGroup> groups, Config config,
               std::shared_ptr<comm::Group> group)
    : impl_(std::make_shared<Impl>(std::move(tensors), groups, std::move(config),
                                   checked(std::move(group)))) {
  if (pager() == nullptr) impl_->plan.model().allow_take_over([this] { release(); });
}

// A forked child has a copy of the engine, but threads, files, shared memory and peers are its
// parent's.
Engine::~Engine() {
  const auto& impl = impl_.shared();
  if (!impl) return;
  if (!impl->owner.here()) {
    impl_.abandon();
  } else {
    impl->plan.model().allow_take_over({});  // a zero::Gathered scope may outlive this
  }
}

// Another engine takes the model over.
void Engine::release() {
  if (!impl_->owner.here()) {
    impl_->plan.model().leave();
    impl_.abandon();
    return;
  }
  if (impl_.shared().use_count() > 1) {
    throw Error(
        "The model was given to another Engine while a zero::Gathered scope of its Engine is open. "
        "Close it before.");
  }
  complete_save();
  impl_->changes.complete_update("the start of another Engine");
  impl_.reset();
}

void Engine::Held::abandon() { (void)new std::shared_ptr<Impl>(std::move(impl_)); }

Engine::Impl& Engine::Held::operator*() const {
  if (impl_) return *impl_;
  throw Error(
      "The model of this Engine was taken over by another Engine, constructed after it. Use that "
      "one; this one can only be destroyed.");
}

std::vector<ParameterGroup> Engine::groups_of(const Config& config) {
  if (!config.optimizer) {
    throw ConfigError(
        "The configuration has no `optimizer` section, and the Engine was given no optimizer. Add "
        "{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 3e-4}}}, or pass zero::AdamW{} "
        "to the constructor.");
  }
  return {ParameterGroup{.optimizer = *config.optimizer, .rest = true}};
}

namespace {

// Runs `passes`, whose gradients go to the table.
void run_pass(const EnginePlan& plan, const MemoryBudget& memory, const Flows& flows,
              bool layer_major, const std::vector<int64_t>& shared,
              const std::function<void()>& passes) {
  const Timeline::Scope phase(*plan.group().accounts().timeline, Activity::backward);
  try {
    flows.pass().run(layer_major, shared, passes);
  } catch (const c10::OutOfMemoryError& error) {
    throw memory.explained(error);
  }
}

}  // namespace

void Engine::backward(const at::Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1) {
    throw Error(fmt::format("Engine::backward takes a loss of one element; this one has {}.",
                            loss.defined() ? loss.numel() : 0));
  }
  if (!loss.requires_grad()) {
    throw Error(
        "Engine::backward was given a loss that depends on no parameter that requires a gradient "
        "(computed under NoGradGuard or InferenceMode?).");
  }
  auto& impl = *impl_;
  const auto alive = impl_.shared();  // a hook may end this engine
  run_pass(impl.plan, impl.memory, impl.flows, false, {},
           [&] { loss.backward(loss_gradient(loss)); });
}

void Engine::accumulate(int64_t micro_batches,
                        const std::function<void(const std::function<void()>& layer_done)>& passes,
                        const std::vector<at::Tensor>& shared) {
  const auto alive = impl_.shared();  // a pass may end this engine
  auto& impl = *impl_;
  const auto& config = impl.plan.config();
  if (!config.layer_major_accumulation) {
    throw ConfigError(
        "Engine::accumulate needs layer_major_accumulation to be true in the configuration: it "
        "decides where gradients of several micro-batches add up.");
  }
  const int64_t left = impl.progress.micro_batches_left();
  if (micro_batches < 1 || micro_batches > left) {
    throw ConfigError(
        fmt::format("Engine::accumulate was given {} micro-batches; this step has {} left of "
                    "gradient_accumulation_steps {}.",
                    micro_batches, left, config.gradient_accumulation_steps));
  }
  std::vector<int64_t> indices;
  for (const auto& tensor : shared) {
    const auto found = impl.plan.model().find(tensor);
    if (!found)
      throw ConfigError("Engine::accumulate: a shared tensor is no parameter of this model.");
    indices.push_back(*found);
  }
  run_pass(impl.plan, impl.memory, impl.flows, true, indices,
           [&] { passes([&] { impl.flows.reduce().reduce_ready(); }); });
  impl.progress.pass_together(micro_batches);
}

// The pass that begins with the scaled loss counts as scaled until autograd lets go of it.
at::Tensor Engine::scale(const at::Tensor& loss) {
  if (!config().scales_loss()) return loss;
  auto scaled = loss * impl_->progress.loss_factor();
  if (!scaled.requires_grad()) return scaled;
  scaled.register_hook([weak = std::weak_ptr(impl_.shared())](const at::Tensor&) {
    const auto impl = weak.lock();
    if (!impl) return;
    impl->progress.begin_scaled_pass();
    const std::shared_ptr<void> counted(nullptr, [weak](void*) {
      if (const auto alive = weak.lock()) alive->progress.end_scaled_pass();
    });
    torch::autograd::Engine::get_default_engine().queue_callback([counted] {});
  });
  return scaled;
}

at::Tensor Engine::loss_gradient(const at::Tensor& loss) const {
  // The number is not made in the loss's own dtype, which may not hold it: infinity is an overflow
  // like any other.
  const auto wide = loss.options().dtype(at::kFloat).requires_grad(false);
  return at::full_like(loss, impl_->progress.loss_factor(), wide).to(loss.scalar_type());
}

namespace {

// Lowers or raises the loss scale, if there is one.
void adapt_loss_scale(bool finite, StepProgress& progress, ReduceFlow& reduce, StepResult& result) {
  auto& scale = progress.loss_scale();
  if (!scale) return;
  result.loss_scale = scale->value();
  if (!scale->update(!finite)) {
    throw NotFinite(fmt::format(
        "A gradient is infinite or NaN, and the loss scale is at its minimum already "
        "(fp16.min_loss_scale, {}): it cannot be lowered any more, and nothing was updated in this "
        "step. Lower the learning rate, clip gradients, or use bf16.enabled, which has fp32's "
        "range.",
        result.loss_scale));
  }
  result.next_loss_scale = scale->value();
  // The residuals of sums belong to gradients at the old scale.
  if (result.next_loss_scale != result.loss_scale) reduce.forget_residuals();
}

}  // namespace

StepResult Engine::step(bool update) {
  auto& impl = *impl_;
  auto& plan = impl.plan;
  auto& progress = impl.progress;
  const auto& flows = impl.flows;
  const bool in_backward = plan.timing().in_backward;
  const Timeline::Scope phase(*group().accounts().timeline, Activity::step);
  if (!update && in_backward) {
    throw Error(
        "Engine::step without an update, with update_in_backward: backward has updated weights "
        "already.");
  }
  const c10::NoGradGuard no_grad;
  // Refusals come first: a `step` that was refused may be called again.
  plan.model().check();
  if (flows.reduce().only_foreign()) {
    throw Error(
        "Engine::step without a backward pass for it: the gradients since the last step came in "
        "passes of other engines (engine.backward of a loss that goes through this model), and "
        "were dropped. Call engine.backward(loss) of this engine; or Engine::zero_grad, where "
        "nothing was to be learnt from them.");
  }
  if (!progress.end_micro_batch()) return {.step = progress.steps()};
  plan.model().check_names();
  std::optional<paging::Pager::Change> change;
  if (auto* pager = this->pager()) change.emplace(*pager);
  flows.reduce().complete();
  StepResult result{.boundary = true, .step = progress.steps()};
  // Sums over ranks and micro-batches become the mean here. (With update_in_backward this happens
  // in UpdateSchedule::update_in_backward; prescaling divides before the sums.)
  double scale = progress.mean_scale();
  const auto& rates = impl.hyper_parameters;
  auto agreed = agree_on_step(plan, flows.reduce().norms(), flows.writes().written_units(),
                              rates.hash(config().gradient_clipping));
  result.grad_norm = agreed.norm * scale;
  flows.writes().set_frozen_written(std::move(agreed.frozen_written));
  rates.check_same(agreed.settings, group().rank(), config().gradient_clipping);
  if (in_backward)
    flows.writes().refuse("in a step whose backward updates it (update_in_backward)");
  if (agreed.written) check_writes(plan, flows, "before Engine::step");
  result.updated = update && (agreed.finite || (config().bf16 && !config().check_grad_overflow));
  if (!result.updated && plan.timing().keeps_old_states) {
    flows.schedule().take_back_updates();
  } else if (!result.updated && in_backward) {
    throw NotFinite(
        "A gradient is infinite or NaN, and with update_in_backward other weights have been "
        "updated from this step already. Load the last checkpoint; without update_in_backward such "
        "a step is left out.");
  }
  if (result.updated) scale *= progress.clipping_factor(result.grad_norm);
  flows.gather().settle();
  flows.schedule().finish();  // the delayed updates of the step before
  progress.restart();         // from here on the step cannot be repeated
  flows.writes().commit();
  flows.writes().invalidate();
  if (auto* pager = this->pager()) pager->end_step();
  if (result.updated) {
    flows.schedule().start(scale, progress.steps());
    progress.set_steps(progress.steps() + 1);
    if (agreed.finite && std::isfinite(result.grad_norm)) progress.set_last_norm(result.grad_norm);
    result.step = progress.steps();
  }
  // `start` has published each unit. Otherwise there may be what the user wrote to sharded
  // parameters, and what a delayed update has made.
  if (!result.updated && (flows.schedule().beside() || plan.placement().sharded.parameters)) {
    for (int64_t u = 0; u < plan.layout().unit_count(); ++u) flows.writes().publish(u);
  }
  flows.gather().finish_publish();
  impl.gradients_used = flows.reduce().present();
  flows.reduce().clear();
  flows.gather().expect_look_ups(flows.reduce().expected_look_ups());
  const auto& feedback = config().quantised.feedback;
  if (result.updated && feedback && progress.steps() % feedback->reset_every == 0)
    flows.reduce().forget_residuals();
  plan.model().synchronize_buffers(impl.buffer_policy, group());
  // A step that was skipped has not allocated the memory that an update takes.
  if (result.updated) impl.memory.spend(flows);
  impl.recording.end_step(result.updated, flows);
  adapt_loss_scale(agreed.finite, progress, flows.reduce(), result);
  return result;
}

void Engine::zero_grad() {
  impl_->changes.check_between_steps("Engine::zero_grad");
  impl_->changes.drop_gradients();
}

void Engine::drop_gradients() {
  const auto& reduce = impl_->flows.reduce();
  // A step that was refused has left gradients too.
  bool any = impl_->progress.passed() || impl_->progress.micro_batches_left() == 0;
  if (reduce.drops_together())
    any = comm::any_rank(group(), any || reduce.has_begun(), "passes to drop");
  if (any) zero_grad();
}

}  // namespace zero
