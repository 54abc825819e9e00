#include "zero/engine/engine.h"

#include <ATen/ops/full_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/not_finite.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"
#include "zero/engine/norm.h"
#include "zero/paging/pager.h"

namespace zero {

class Engine::Impl::Passes final : public BackwardPass::Steps {
 public:
  explicit Passes(Impl& impl) : impl_(impl) {}
  void begin(bool holds, const std::vector<int64_t>& shared) override {
    impl_.model.check();
    impl_.model.hook();
    impl_.schedule->begin_pass(holds);
    const bool last = impl_.micro_batches + 1 >= impl_.config.gradient_accumulation_steps;
    impl_.reduce->begin_backward(holds, shared, last);
    if (impl_.timing.in_backward) impl_.update->begin();
  }
  void end() override {
    impl_.schedule->end_pass();
    impl_.reduce->end_backward();
    impl_.passed = true;
  }
  void fail() override {
    impl_.reduce->abandon_backward();
    // Some weights are updated from this pass already: the next call says that a checkpoint is to
    // be loaded.
    if (impl_.reduce->handed_over()) return;
    impl_.reduce->clear();
    impl_.micro_batches = 0;
    impl_.passed = false;
  }
  void check_unmarked() const override {
    if (!impl_.config.scales_loss() || impl_.scaled > 0) return;
    throw Error(
        "loss.backward() of a loss that is to be scaled (fp16): its small gradients would be lost. "
        "Call engine.backward(loss), or engine.scale(loss).backward().");
  }
  double loss_factor() const override { return impl_.loss_factor(); }
  void rethrow() const override {
    if (const auto& in_users_language = impl_.model.rethrow()) in_users_language();
  }

 private:
  Impl& impl_;
};

void Engine::Impl::make_pass() {
  pass = std::make_unique<BackwardPass>(*reduce, std::make_unique<Passes>(*this));
}

Engine::Engine(NamedTensors tensors, std::vector<ParameterGroup> groups, Config config,
               std::shared_ptr<comm::Group> group)
    : impl_(
          std::make_shared<Impl>(std::move(tensors), groups, std::move(config), std::move(group))) {
  if (pager() == nullptr) impl_->model.allow_take_over([this] { release(); });
}

// A forked child has a copy: threads, files, shared memory and peers are its parent's.
Engine::~Engine() {
  const auto& impl = impl_.shared();
  if (!impl) return;
  if (!impl->owner.here()) {
    impl_.abandon();
  } else {
    impl->model.allow_take_over({});  // a zero::Gathered scope may outlive this
  }
}

// Another engine takes the model over.
void Engine::release() {
  if (!impl_->owner.here()) {
    impl_->model.leave();
    impl_.abandon();
    return;
  }
  if (impl_.shared().use_count() > 1) {
    throw Error(
        "The model was given to another Engine while a zero::Gathered scope of its Engine is open. "
        "Close it before.");
  }
  impl_->complete_update("the start of another Engine");
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
  return {ParameterGroup{{}, *config.optimizer}};
}

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
  const auto alive = impl_.shared();  // a hook may end this engine
  impl_->collect(false, {}, [&] { loss.backward(loss_gradient(loss)); });
}

void Engine::accumulate(int64_t micro_batches,
                        const std::function<void(const std::function<void()>& layer_done)>& passes,
                        const std::vector<at::Tensor>& shared) {
  const auto alive = impl_.shared();  // a pass may end this engine
  auto& impl = *impl_;
  if (!impl.config.layer_major_accumulation) {
    throw ConfigError(
        "Engine::accumulate needs layer_major_accumulation to be true in the configuration: it "
        "decides where gradients of several micro-batches add up.");
  }
  const int64_t left = impl.config.gradient_accumulation_steps - impl.micro_batches;
  if (micro_batches < 1 || micro_batches > left) {
    throw ConfigError(
        fmt::format("Engine::accumulate was given {} micro-batches; this step has {} left of "
                    "gradient_accumulation_steps {}.",
                    micro_batches, left, impl.config.gradient_accumulation_steps));
  }
  std::vector<int64_t> indices;
  for (const auto& tensor : shared) {
    const auto found = impl.model.find(tensor);
    if (!found)
      throw ConfigError("Engine::accumulate: a shared tensor is no parameter of this model.");
    indices.push_back(*found);
  }
  impl.collect(true, indices, [&] { passes([&] { impl.reduce->release(); }); });
  impl.micro_batches += micro_batches - 1;
}

void Engine::Impl::collect(bool holds, const std::vector<int64_t>& shared,
                           const std::function<void()>& passes) {
  const Timeline::Scope phase(*group().accounts().timeline, Activity::backward);
  try {
    pass->run(holds, shared, passes);
  } catch (const c10::OutOfMemoryError& error) {
    throw explained(error);
  }
}

// The pass that begins with the scaled loss counts as scaled until autograd lets go of it.
at::Tensor Engine::scale(const at::Tensor& loss) {
  if (!impl_->config.scales_loss()) return loss;
  auto scaled = loss * impl_->loss_factor();
  if (!scaled.requires_grad()) return scaled;
  scaled.register_hook([weak = std::weak_ptr(impl_.shared())](const at::Tensor&) {
    const auto impl = weak.lock();
    if (!impl) return;
    ++impl->scaled;
    const std::shared_ptr<void> counted(nullptr, [weak](void*) {
      if (const auto alive = weak.lock()) --alive->scaled;
    });
    torch::autograd::Engine::get_default_engine().queue_callback([counted] {});
  });
  return scaled;
}

void Engine::rehook() { impl_->model.hook(); }

// As DeepSpeed divides a loss in fp16: micro-batches may add up in it.
double Engine::Impl::loss_factor() const {
  if (!loss_scale) return 1;
  return loss_scale->value() / static_cast<double>(config.gradient_accumulation_steps);
}

double Engine::Impl::mean_scale() const {
  const double divided = config.gradient_predivisor(placement.ranks(), placement.sharded.gradients);
  const auto terms = static_cast<double>(placement.ranks() * config.gradient_accumulation_steps);
  return divided / (terms * loss_factor());
}

at::Tensor Engine::loss_gradient(const at::Tensor& loss) const {
  // Not of the loss's own dtype, which may not hold the number: infinity is an overflow like any.
  const auto wide = loss.options().dtype(at::kFloat).requires_grad(false);
  return at::full_like(loss, impl_->loss_factor(), wide).to(loss.scalar_type());
}

StepResult Engine::step(bool update) {
  auto& impl = *impl_;
  const Timeline::Scope phase(*impl.group().accounts().timeline, Activity::step);
  if (!update && impl.timing.in_backward) {
    throw Error(
        "Engine::step without an update, with update_in_backward: backward has updated weights "
        "already.");
  }
  const c10::NoGradGuard no_grad;
  // Refusals come first: a `step` that was refused may be called again.
  impl.model.check();
  if (impl.reduce->only_foreign()) {
    throw Error(
        "Engine::step without a backward pass for it: the gradients since the last step came in "
        "passes of other engines (engine.backward of a loss that goes through this model), and "
        "were "
        "dropped. Call engine.backward(loss) of this engine; or Engine::zero_grad, where nothing "
        "was to be learnt from them.");
  }
  const int64_t k = impl.config.gradient_accumulation_steps;
  impl.passed = false;
  impl.micro_batches = std::min(impl.micro_batches + 1, k);
  if (impl.micro_batches < k) return {.step = impl.steps};
  impl.model.check_names();
  if (const auto* pages = pager()) pages->check_unpinned();
  impl.reduce->finish();
  StepResult result{.boundary = true, .step = impl.steps};
  // The one place where gradients are scaled: sums over ranks and micro-batches become the mean.
  double scale = impl.mean_scale();
  auto global = global_norm(impl.layout, *impl.table, impl.placement, impl.reduce->norms(),
                            impl.written_units());
  const bool finite = global.finite;
  result.grad_norm = global.norm * scale;
  impl.frozen_written = std::move(global.frozen_written);
  if (impl.timing.in_backward)
    impl.refuse_writes("in a step whose backward updates it (update_in_backward)");
  const bool updates = update && (finite || (config().bf16 && !config().check_grad_overflow));
  if (!updates && impl.timing.undoes) {
    impl.schedule->take_back_updates();
  } else if (!updates && impl.timing.in_backward) {
    throw NotFinite(
        "A gradient is infinite or NaN, and with update_in_backward other weights have been "
        "updated from this step already. Load the last checkpoint; without update_in_backward such "
        "a step is left out.");
  }
  if (updates) {
    const double clip = impl.config.gradient_clipping;
    // As torch::nn::utils::clip_grad_norm_: the small constant keeps the quotient below one.
    if (clip > 0 && result.grad_norm > clip)
      scale *= std::min(1.0, clip / (result.grad_norm + 1e-6));
  }
  impl.gather->settle();
  impl.schedule->finish();  // of the step before, where they are delayed
  impl.micro_batches = 0;   // from here on nothing is refused
  impl.commit_writes();
  impl.invalidate();
  if (auto* pages = pager()) pages->end_step();
  if (updates) {
    impl.schedule->start(scale, impl.steps);
    result.updated = true;
    result.step = ++impl.steps;
  }
  // An update that runs here publishes each unit itself. What the user wrote to sharded parameters
  // must reach the peers in any case.
  if (impl.schedule->beside() || (!updates && impl.placement.sharded.parameters)) {
    for (int64_t u = 0; u < impl.layout.unit_count(); ++u) impl.publish(u);
  }
  impl.gather->finish_publish();
  impl.reduce->clear();
  const auto& feedback = impl.config.quantised.feedback;
  if (result.updated && feedback && impl.steps % feedback->reset_every == 0)
    impl.reduce->forget_losses();
  impl.model.synchronize_buffers(impl.buffer_policy, impl.group());
  // A step that was skipped has not had the memory that an update takes.
  if (result.updated && !std::exchange(impl.budget_spent, true)) impl.spend_budget();
  if (impl.recorder) impl.end_recording(result.updated);
  if (impl.loss_scale) {
    result.loss_scale = impl.loss_scale->value();
    if (!impl.loss_scale->update(!finite)) {
      throw NotFinite(fmt::format(
          "A gradient is infinite or NaN, and the loss scale is at its minimum already "
          "(fp16.min_loss_scale, {}): it cannot be lowered any more, and nothing was updated in "
          "this "
          "step. Lower the learning rate, clip gradients, or use bf16.enabled, which has fp32's "
          "range.",
          result.loss_scale));
    }
    result.next_loss_scale = impl.loss_scale->value();
    // They are of gradients at the old scale.
    if (result.next_loss_scale != result.loss_scale) impl.reduce->forget_losses();
  }
  return result;
}

void Engine::zero_grad() {
  auto& impl = *impl_;
  impl.check_between_steps("Engine::zero_grad");
  impl.reduce->join_begun();
  impl.reduce->clear();
  impl.micro_batches = 0;
  impl.passed = false;
}

void Engine::drop_gradients() {
  auto& impl = *impl_;
  bool any = impl.passed;
  if (impl.reduce->drops_together())
    any = comm::any_rank(impl.group(), any || impl.reduce->has_begun(), "passes to drop");
  if (any) zero_grad();
}

std::vector<double> Engine::group_norms() {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  impl.check_gradients_kept();
  if (!impl.passed || impl.micro_batches + 1 < impl.config.gradient_accumulation_steps) {
    throw Error(fmt::format(
        "Engine::group_norms is of a whole step, between its last backward and Engine::step; {} of "
        "its {} micro-batches have been passed.",
        impl.micro_batches + (impl.passed ? 1 : 0), impl.config.gradient_accumulation_steps));
  }
  impl.reduce->finish();
  auto norms = zero::group_norms(impl.layout, *impl.table, impl.placement, *impl.reduce,
                                 impl.model.group_of(), group_count());
  for (auto& norm : norms) norm *= impl.mean_scale();
  return norms;
}

bool Engine::passed() const { return impl_->passed; }
int64_t Engine::micro_batches() const { return impl_->micro_batches; }
void Engine::set_buffer_policy(BufferPolicy policy) { impl_->buffer_policy = policy; }
BufferPolicy Engine::buffer_policy() const { return impl_->buffer_policy; }

void Engine::complete_update() { impl_->complete_update("Engine::complete_update"); }
const Config& Engine::config() const { return impl_->config; }
comm::Group& Engine::group() { return impl_->group(); }
int64_t Engine::steps() const { return impl_->steps; }
double Engine::loss_scale() const { return impl_->loss_scale ? impl_->loss_scale->value() : 1; }
int64_t Engine::parameter_count() const { return impl_->layout.content(); }
const partition::Layout& Engine::layout() const { return impl_->layout; }
std::vector<std::string> Engine::parameter_names() const { return impl_->model.names(); }
paging::Pager* Engine::pager() { return impl_->gather->pager(); }

}  // namespace zero
