// Construction of an Engine: the checks, then the table and the flows, in the order in which each
// needs the one before.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <exception>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/agreement.h"
#include "zero/device/memory.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"
#include "zero/optim/passes.h"
#include "zero/paging/pager.h"

namespace zero {

namespace {

Config validated(Config config) {
  config.validate();
  return config;
}

Config with_tiers(Config config, const Model& model, int ranks, int64_t available) {
  // Units are gathered in the device's own memory there, not in the host's.
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

// Everything that may be refused is refused before anything of the model changes.
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
  make_pass();
  model.settle(gather->pager() != nullptr, *pass);
  // A step does not hold what the construction held. The memory of the tensors as they were goes
  // back to the system, and the peaks begin anew.
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
  // Units that are read in place are not gathered ahead.
  chooses_prefetch =
      config.prefetch_speeds.compute > 0 && gather->pager() != nullptr && !gather->in_place();
  if (chooses_prefetch) record_with(std::make_unique<StepRecorder>(*gather->pager()));
}

}  // namespace zero
