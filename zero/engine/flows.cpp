// Makes the table and the flows, in the order in which each needs the one before.
#include "zero/engine/flows.h"

#include <c10/core/GradMode.h>

#include <exception>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/agreement.h"
#include "zero/device/memory.h"
#include "zero/engine/flat.h"
#include "zero/paging/pager.h"

namespace zero {

namespace {

// Makes the disk tier. Collective if states live on disk: a rank whose disk cannot hold them fails
// all.
std::unique_ptr<store::DiskTier> make_disk(const EnginePlan& plan) {
  const auto& config = plan.config();
  const auto& section = config.offload_optimizer;
  if (section.device != OffloadDevice::nvme && config.offload_param.device != OffloadDevice::nvme)
    return nullptr;
  const store::DiskTier::Options options{
      .folders = config.nvme_folders(),
      .buffer_count = section.buffer_count,
      .read_ahead = section.pipeline_read,
      .write_behind = section.pipeline_write,
      .file = store::FileOptions{.block_bytes = config.aio.block_size,
                                 .queue_depth = static_cast<int>(config.aio.queue_depth),
                                 .uring = config.aio.use_io_uring,
                                 .checksums = config.aio.checksums,
                                 .timeline = plan.group().accounts().timeline}};
  return comm::agree<StoreError>(plan.group(), "Making files for states", [&] {
    return std::make_unique<store::DiskTier>(
        StateTable::units_on_disk(plan.units(), plan.timing().keeps_old_parameters(),
                                  plan.timing().keeps_old_states),
        options, plan.group().ledger());
  });
}

}  // namespace

// All refusals have come before this; from here on the model changes.
Flows::Flows(EnginePlan& plan, StepProgress& progress, const HyperParameters& hyper_parameters,
             MemoryBudget& memory, StepRecording& recording)
    : copier_(plan.model().device()) {
  const c10::NoGradGuard no_grad;
  auto& model = plan.model();
  model.take_over();
  model.make_dense();
  const auto& dtype = plan.config().buffer_dtype;
  model.move_buffers(dtype ? std::optional(dtype_of(*dtype)) : std::nullopt);
  if (plan.group().size() > 1) model.synchronize_buffers(BufferPolicy::rank_0, plan.group());
  try {
    make_table(plan);
    factored_ = std::make_unique<FactoredStates>(plan);
    make_gather(plan, memory, recording);
    // At stage 3 the arrays of gradients are slices, and most are made later. So they are made
    // first: once parameters move, nothing may be refused any more.
    const auto make_reduce = [&] { reduce_ = std::make_unique<ReduceFlow>(plan, *table_); };
    if (plan.placement().sharded.parameters) make_reduce();
    move_in(plan);
    if (!plan.placement().sharded.parameters) make_reduce();
    update_ = std::make_unique<UpdateFlow>(plan, *table_, *factored_, hyper_parameters);
    writes_ = std::make_unique<ParameterWrites>(plan, *table_, *gather_);
    schedule_ =
        std::make_unique<UpdateSchedule>(plan, progress, *table_, *update_, *reduce_, *writes_);
    reduce_->hand_over_to(*schedule_);
    pass_ =
        std::make_unique<BackwardPass>(plan, progress, *gather_, *reduce_, *update_, *schedule_);
    start(plan, memory);
  } catch (...) {
    model.disown();
    throw;
  }
}

void Flows::make_table(const EnginePlan& plan) {
  const auto& shards = *plan.placement().shards;
  // A device has memory of its own on every rank, so units are copied to it.
  const bool shares =
      plan.model().device().is_cpu() && (plan.config().device_memory == 0 || shards.size() == 1);
  const bool one_host = shards.topology().hosts == 1;
  table_ = std::make_unique<StateTable>(
      plan.layout(), plan.units(), plan.placement(), copier_, make_disk(plan),
      StateTable::Options{.keeps_old_parameters = plan.timing().keeps_old_parameters(),
                          .keeps_old_states = plan.timing().keeps_old_states,
                          .in_place = plan.kept_on_hosts() ||
                                      (plan.config().one_sided_gather && shares && one_host)});
}

void Flows::make_gather(const EnginePlan& plan, const MemoryBudget& memory,
                        StepRecording& recording) {
  const auto& config = plan.config();
  const int64_t slice_bytes = config.unit_bytes / plan.placement().shards->size();
  gather_ = std::make_unique<GatherFlow>(
      *table_, plan.placement(),
      GatherFlow::Options{.live_bytes = memory.live_bytes(),
                          .prefetch_bytes = memory.bytes_of(config.prefetch_bucket_size),
                          .disk = {.ahead_bytes = config.offload_param.buffer_count * slice_bytes,
                                   .slice_bytes = slice_bytes},
                          .rethrow = plan.model().rethrow(),
                          .touched = [&plan, &recording] {
                            plan.model().check_values("An operator on a parameter");
                            recording.touched();
                          }});
}

void Flows::move_in(const EnginePlan& plan) {
  if (table_->wait_clock() == nullptr) {
    move_parameters(plan);
  } else {  // a disk may fail on one rank alone
    comm::agree<StoreError>(plan.group(), "Writing parameters to the disk",
                            [&] { move_parameters(plan); });
  }
}

void Flows::move_parameters(const EnginePlan& plan) {
  const auto& model = plan.model();
  const auto take = [&](int64_t i, bool has_values) {
    const auto& parameter = model.parameter(i);
    const int64_t u = plan.layout().unit_of(i);
    const auto& unit = table_->plan(u);
    if (!has_values) return gather_->take(i, parameter, false);
    const auto original = flat_view(parameter);
    // The master weights come from the original values, not from the rounded ones.
    if (unit.own_master()) table_->write_owned(i, State::master, original);
    if (parameter.scalar_type() != unit.dtype) parameter.set_data(table_->narrowed(u, parameter));
    gather_->take(i, parameter, true);
  };
  std::exception_ptr failed;  // on this rank only; it still takes part in the others' broadcasts
  for (int64_t i = 0; i < model.size(); ++i) {
    const bool has_values = !model.is_absent(i);
    model.give_storage(i, table_->plan(plan.layout().unit_of(i)).dtype, plan.group());
    if (failed) continue;
    try {
      take(i, has_values);
    } catch (const StoreError&) {
      failed = std::current_exception();
    }
  }
  if (failed) std::rethrow_exception(failed);
  model.tie();
  for (int64_t u = 0; u < plan.layout().unit_count(); ++u) table_->reset_new_parameters(u);
}

void Flows::start(EnginePlan& plan, MemoryBudget& memory) {
  auto& model = plan.model();
  gather_->start(model.parameters(), *schedule_);
  model.begin_use(gather_->pager() != nullptr, *pass_);
  // A step does not need the memory that the construction needed. The memory of the old tensors
  // goes back to the system, and the peaks begin anew.
  HostAllocator::instance().trim();
  HostAllocator::instance().reset_peaks();
  reset_peak_memory(model.device());
  plan.group().ledger()->reset_peaks();
  memory.include_tensors();
}

}  // namespace zero
