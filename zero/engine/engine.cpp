#include "zero/engine/engine.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/full_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/not_finite.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/device/memory.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"
#include "zero/engine/norm.h"
#include "zero/optim/passes.h"
#include "zero/paging/pager.h"

namespace zero {

namespace {

Config validated(Config config) {
  config.validate();
  return config;
}

Config with_tiers(Config config, const Model& model, int ranks, int64_t available) {
  // What is gathered there is not the host's memory.
  if (is_asynchronous(model.device())) return config;
  auto size = step_size(model.shape(), ranks);
  size.available = available;
  return choose_tiers(std::move(config), size).config;
}

// Collective where states live on disk: a rank whose disk cannot hold them fails all.
std::unique_ptr<store::DiskTier> make_disk(const std::vector<UnitPlan>& plans, const Config& config,
                                           const UpdateTiming& timing, comm::Group& group) {
  const auto& section = config.offload_optimizer;
  if (section.device != OffloadDevice::nvme && config.offload_param.device != OffloadDevice::nvme)
    return nullptr;
  const store::DiskTier::Options options{
      .folders = config.nvme_folders(),
      .buffer_count = section.buffer_count,
      .read_ahead = section.pipeline_read,
      .write_behind = section.pipeline_write,
      .file = {.block_bytes = config.aio.block_size,
               .queue_depth = static_cast<int>(config.aio.queue_depth),
               .uring = config.aio.use_io_uring,
               .checksums = config.aio.checksums,
               .timeline = group.accounts().timeline}};
  return comm::agree<StoreError>(group, "Making files for states", [&] {
    return std::make_unique<store::DiskTier>(
        StateTable::units_on_disk(plans, timing.hides(), timing.undoes), options, group.ledger());
  });
}

std::vector<OptimizerGroup> with_rates(const std::vector<Optimizer>& optimizers) {
  std::vector<OptimizerGroup> groups;
  for (const auto& each : optimizers) groups.push_back({each, optim::lr(each)});
  return groups;
}

}  // namespace

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
    if (impl_.timing.in_backward) return;
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

// What can be refused is refused before anything of the model changes.
Engine::Impl::Impl(NamedTensors tensors, const std::vector<ParameterGroup>& groups,
                   Config configuration, std::shared_ptr<comm::Group> ranks)
    : config(validated(std::move(configuration))),
      model(std::move(tensors), groups),
      placement((model.agree(config, *ranks), place(config, group_on_device(ranks, model)))),
      layout(lay_out(model.shape(), config, placement.planned().grid)),
      link(model.device()) {
  const c10::NoGradGuard no_grad;
  const int shards = placement.shards->size();
  const int64_t available = memory_of_rank(group());
  config = with_tiers(std::move(config), model, shards, available);
  placement.sharded = sharded_states(config, shards);
  timing = UpdateTiming::of(config, placement.sharded);
  plans = plan_units(layout, model.shape(), config, placement.planned());
  if (config.scales_loss()) loss_scale.emplace(config.loss_scaling);
  check_passes();
  check_on_device(config, timing, model, placement.shards->topology());
  check_budget();
  check_memory(available);
  limit_device();
  model.take_over();
  model.make_dense();
  model.move_buffers();
  if (group().size() > 1) model.synchronize_buffers(BufferPolicy::rank_0, group());
  try {
    make_table();
    make_factored();
    make_gather();
    // At stage 3 the arrays of gradients are slices, and most come later: so nothing is left to be
    // refused once parameters move.
    if (placement.sharded.parameters) make_reduce();
    move_in();
    if (!placement.sharded.parameters) make_reduce();
    make_updates();
    start();
  } catch (...) {
    model.disown();
    throw;
  }
  if (group().size() > 1) shown = std::make_unique<ShownOperators>(group());
  seed_ranks();
}

Engine::Impl::~Impl() { model.leave(); }

void Engine::Impl::check_passes() const {
  const auto refuse = [](const Optimizer& optimizer, std::string_view what, std::string_view why) {
    throw ConfigError(fmt::format(
        "{}, and an optimizer is {}, whose update takes two passes: {} Leave the key out, "
        "or use an optimizer that updates elements by themselves (AdamW).",
        what, optim::name(optimizer), why));
  };
  for (const auto& optimizer : model.optimizers()) {
    if (optim::reach(optimizer) == optim::Reach::element) continue;
    if (config.bf16_master_weights_and_grads)
      refuse(optimizer, "bf16.bf16_master_weights_and_grads is true",
             "its directions are kept for fp32 weights.");
    if (config.optimizer_states != optim::StateFormat::fp32)
      refuse(optimizer, "data_types.optimizer_state_dtype is not \"fp32\"",
             "the second would read states that the first has rounded.");
    if (timing.undoes)
      refuse(optimizer, "update_in_backward is true with fp16",
             "the first is not taken back where a gradient overflows.");
  }
}

void Engine::Impl::seed_ranks() const {
  if (!config.seed_by_rank || group().rank() == 0) return;
  const auto seed = [&](at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(generator.current_seed() + static_cast<uint64_t>(group().rank()));
  };
  const auto& of_host = at::detail::getDefaultCPUGenerator();
  seed(of_host);
  if (model.device().is_cpu()) return;
  const auto& of_device = at::globalContext().defaultGenerator(model.device());
  if (of_device != of_host) seed(of_device);
}

void Engine::Impl::make_table() {
  // Every rank has a device of its own: where there is one, units are copied to it.
  const bool shares =
      model.device().is_cpu() && (config.device_memory == 0 || placement.shards->size() == 1);
  const bool one_host = placement.shards->topology().hosts == 1;
  table = std::make_unique<StateTable>(
      layout, plans, placement, link, make_disk(plans, config, timing, group()),
      StateTable::Options{
          .keeps_old_parameters = timing.hides(),
          .keeps_old_states = timing.undoes,
          .in_place = kept_on_hosts() || (config.one_sided_gather && shares && one_host)});
}

void Engine::Impl::make_factored() {
  factored = std::make_unique<FactoredStates>(layout, plans, model, group().ledger());
}

void Engine::Impl::make_gather() {
  const int64_t slice_bytes = config.unit_bytes / placement.shards->size();
  gather = std::make_unique<GatherFlow>(
      layout, *table, placement,
      GatherFlow::Options{.live_bytes = spends_budget() ? 0 : bytes_of(config.max_live_parameters),
                          .prefetch_bytes = bytes_of(config.prefetch_bucket_size),
                          .disk = {.ahead_bytes = config.offload_param.buffer_count * slice_bytes,
                                   .slice_bytes = slice_bytes},
                          .rethrow = model.rethrow(),
                          .touched = [this] {
                            if (recorder) recorder->touched();
                          }});
}

void Engine::Impl::make_reduce() {
  std::optional<float> feedback;
  if (const auto& chosen = config.quantised.feedback) feedback = static_cast<float>(chosen->beta);
  reduce = std::make_unique<ReduceFlow>(
      layout, model.parameters(), *table, placement,
      ReductionSettings{
          .unit_bytes = config.unit_bytes,
          .predivisor = config.gradient_predivisor(placement.ranks(), placement.sharded.gradients),
          .feedback = feedback,
          .doubled = timing.delayed_after.has_value(),
          .hands_over = timing.in_backward});
}

void Engine::Impl::make_updates() {
  update = std::make_unique<UpdateFlow>(layout, *table, model, placement, *factored,
                                        with_rates(model.optimizers()), planned().pass_batches,
                                        config.gradient_clipping_value);
  schedule = std::make_unique<UpdateSchedule>(layout, *table, *update, *reduce,
                                              model.names().size(), timing, *this);
  reduce->hand_over_to(*schedule);
}

void Engine::Impl::move_in() {
  const auto take = [&](int64_t i) {
    const auto& parameter = model.parameter(i);
    const int64_t u = layout.unit_of(i);
    const auto& plan = table->plan(u);
    const auto original = flat_view(parameter);
    // The master weights come from the original values, not from the rounded ones.
    if (plan.own_master()) table->write_master(i, original);
    if (parameter.scalar_type() != plan.dtype) parameter.set_data(table->narrowed(u, parameter));
    gather->take(i, parameter);
  };
  const auto move = [&] {
    std::exception_ptr failed;  // on this rank alone: the others' broadcasts go on
    for (int64_t i = 0; i < model.size(); ++i) {
      model.settle_values(i, group());
      if (failed) continue;
      try {
        take(i);
      } catch (const StoreError&) {
        failed = std::current_exception();
      }
    }
    if (failed) std::rethrow_exception(failed);
    model.tie();
    for (int64_t u = 0; u < layout.unit_count(); ++u) table->reset_new_parameters(u);
  };
  if (table->disk() == nullptr) {
    move();
  } else {  // which may fail on one rank alone
    comm::agree<StoreError>(group(), "Writing parameters to the disk", move);
  }
}

void Engine::Impl::start() {
  gather->start(model.parameters(), *schedule);
  pass = std::make_unique<BackwardPass>(*reduce, std::make_unique<Passes>(*this));
  model.settle(gather->pager() != nullptr, *pass);
  // What the construction held is not what a step holds: the memory of the tensors as they were
  // goes back to the system, and the peaks are the steps'.
  HostAllocator::instance().trim();
  HostAllocator::instance().reset_peaks();
  reset_peak_memory(model.device());
  group().ledger()->reset_peaks();
  if (limit && model.device().is_cpu()) {
    // Ranks that are threads share the tensors' allocator: none is capped while another still holds
    // the model twice.
    group().barrier("start of the engine");
    limit->include_tensors();
  }
  // Where units are read in place nothing is gathered ahead.
  chooses_prefetch =
      config.prefetch_speeds.compute > 0 && gather->pager() != nullptr && !gather->in_place();
  if (chooses_prefetch) record_with(std::make_unique<StepRecorder>(*gather->pager()));
}

Engine::Engine(NamedTensors tensors, std::vector<ParameterGroup> groups, Config config,
               std::shared_ptr<comm::Group> group)
    : impl_(
          std::make_shared<Impl>(std::move(tensors), groups, std::move(config), std::move(group))) {
  if (pager() == nullptr) impl_->model.allow_take_over([this] { release(); });
}

// What a forked child has is a copy: threads, files, shared memory and peers are its parent's.
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

OptimizerGroup& Engine::Impl::parameter_group(size_t index) const {
  auto& groups = update->groups();
  if (index >= groups.size())
    throw ConfigError(
        fmt::format("There is no parameter group {}; there are {}.", index, groups.size()));
  return groups[index];
}

void Engine::complete_update() { impl_->complete_update("Engine::complete_update"); }
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
const Config& Engine::config() const { return impl_->config; }
comm::Group& Engine::group() { return impl_->group(); }
int64_t Engine::steps() const { return impl_->steps; }
double Engine::loss_scale() const { return impl_->loss_scale ? impl_->loss_scale->value() : 1; }
int64_t Engine::parameter_count() const { return impl_->layout.content(); }
const partition::Layout& Engine::layout() const { return impl_->layout; }
std::vector<std::string> Engine::parameter_names() const { return impl_->model.names(); }
paging::Pager* Engine::pager() { return impl_->gather->pager(); }

}  // namespace zero
