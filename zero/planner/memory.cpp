#include "zero/planner/memory.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include "zero/comm/shm_collectives.h"
#include "zero/engine/costs.h"
#include "zero/engine/plan_units.h"
#include "zero/engine/reduction_order.h"
#include "zero/engine/work_memory.h"
#include "zero/store/file.h"

namespace zero::plan {
namespace {

// Tells the most memory that one batch of updates in two sweeps takes: engine/two_sweeps.cpp.
struct SweepMemory {
  Category category = Category::activations;
  int64_t bytes = 0;
};

// Returns the memory of the batches, whose turns follow each other. Where second sweeps wait, the
// directions of all batches are there at once.
std::vector<SweepMemory> sweeps_of(const ModelShape& model, const PlannedStep& step) {
  constexpr int64_t kBytes = 4;  // directions and findings are fp32
  const int64_t ranks = step.grid.shards;
  const bool sliced = step.sharded.optimizer && ranks > 1;
  const auto directions = [&](int64_t u) -> int64_t {
    const auto first = step.layout.unit(u).segments.front().parameter;
    if (!optim::keeps_direction(model.parameter(first).optimizer)) return 0;
    return kBytes * step.units[static_cast<size_t>(u)].owned.size();
  };
  std::vector<SweepMemory> all;
  int64_t waiting = 0;
  for (const auto& batch : step.sweep_batches) {
    const auto& plan = step.units[static_cast<size_t>(batch.units.front())];
    auto& sweep = all.emplace_back();
    if (plan.own_memory && plan.updated_at() == Tier::host) sweep.category = Category::host_buffers;
    sweep.bytes = waiting;
    for (const int64_t u : batch.units) {
      sweep.bytes += directions(u);
      if (step.timing.keeps_old_parameters()) waiting += directions(u);
    }
    if (batch.reach != optim::Reach::matrix) continue;
    if (sliced) {
      for (const int64_t u : batch.units) sweep.bytes += kBytes * step.layout.unit(u).numel;
      sweep.bytes += kBytes * (ranks + 1) * batch.sent_by_owner;
    }
    int64_t scratch = 0;
    for (const auto& matrix : batch.matrices) {
      const auto* muon = std::get_if<Muon>(&model.parameter(matrix.parameter).optimizer);
      if (muon == nullptr) continue;
      const auto cost = optim::cost_of_orthogonalising(matrix.rows, matrix.columns, muon->ns_steps);
      scratch = std::max(scratch, kBytes * cost.scratch_numel);
    }
    sweep.bytes += scratch;
  }
  return all;
}

/// A step played back.
class Playback {
 public:
  Playback(const Trace& trace, const PlannedStep& step, const Config& config)
      : trace_(trace),
        step_(step),
        sweeps_(sweeps_of(trace.model, step)),
        units_(static_cast<size_t>(step.layout.unit_count())),
        order_(trained_units(step)) {
    for (size_t i = 0; i < units_.size(); ++i) {
      const auto& unit = step.layout.unit(static_cast<int64_t>(i));
      const auto& plan = step.units[i];
      if (!plan.trainable) continue;
      units_[i].large = unit.bytes() > config.unit_bytes && unit.segments.size() == 1;
      if (units_[i].large) continue;
      bucket_bytes_ = std::max(bucket_bytes_, unit.numel * plan.gradients.bucket_element_bytes());
      slice_bytes_ = std::max(slice_bytes_, step.layout.slice_numel(static_cast<int64_t>(i)) *
                                                plan.gradients.slice_element_bytes());
    }
    slice_bytes_ = std::min(slice_bytes_, bucket_bytes_);
    gathers_ = step.sharded.parameters && !step.in_place;
  }

  /// Adds what a step holds all the time.
  void hold(Category category, int64_t bytes) { add(category, bytes); }

  /// Plays a step of so many passes. Peaks are those of the last step that was played: the order
  /// of reductions is known from the second one on, and buckets that the first one took stay.
  void step(int64_t passes) {
    result_.peaks = now_;
    result_.device = device_;
    result_.host = host_;
    for (int64_t i = 0; i < passes; ++i) pass(i == 0);
    retire();
    while (!waiting_.empty()) end_update();
    for (const auto& sweep : sweeps_) {
      add(sweep.category, sweep.bytes);
      add(sweep.category, -sweep.bytes);
    }
    for (size_t u = 0; u < units_.size(); ++u) {
      if (step_.timing.stays_in_memory(step_.units[u])) {
        units_[u].left = std::exchange(units_[u].slice, 0);
      } else {
        add(Category::gradients, -std::exchange(units_[u].slice, 0));
      }
    }
    if (!order_.known()) {
      const auto seen = order_.seen();
      order_.adopt(std::vector<int32_t>(seen.begin(), seen.end()));
    }
  }

  RankMemory result() const { return result_; }

 private:
  static std::vector<int64_t> trained_units(const PlannedStep& step) {
    std::vector<int64_t> units;
    for (size_t u = 0; u < step.units.size(); ++u) {
      if (step.units[u].trainable) units.push_back(static_cast<int64_t>(u));
    }
    return units;
  }

  void pass(bool first) {
    first_ = first;
    for (auto& unit : units_) unit.arrived = 0;
    order_.restart();
    for (const auto& event : trace_.events) {
      op_ = event.op;
      switch (event.kind) {
        case TraceEvent::Kind::memory:
          add(Category::activations, event.value);
          break;
        case TraceEvent::Kind::use:
          if (gathers_) gather(step_.layout.unit_of(event.value), event.op);
          break;
        case TraceEvent::Kind::place:
          if (step_.sharded.gradients) take_bucket(step_.layout.unit_of(event.value));
          break;
        case TraceEvent::Kind::arrival:
          if (step_.sharded.gradients) arrive(event.value);
          break;
        case TraceEvent::Kind::loss:
          update_all();
          break;
      }
    }
    update_all();
    if (!step_.sharded.gradients) return;
    while (const auto unit = order_.turn()) {
      order_.advance();
      reduce(*unit);
    }
  }

  struct Unit {
    bool large = false;
    int64_t arrived = 0;
    int64_t bucket = 0;   // bytes of the pool's array
    int64_t adopted = 0;  // bytes of a gradient that is its own bucket
    int64_t slice = 0;    // bytes of its sum
    int64_t left = 0;     // bytes of its sum of the step before, which its pending update reads
  };

  void add(Category category, int64_t bytes) {
    auto& now = now_[static_cast<size_t>(category)];
    now += bytes;
    auto& peak = result_.peaks[static_cast<size_t>(category)];
    peak = std::max(peak, now);
    (on_host(category) ? host_ : device_) += bytes;
    result_.host = std::max(result_.host, host_);
    if (device_ <= result_.device) return;
    result_.device = device_;
    if (trace_.operators.empty()) return;
    result_.peak_operator = trace_.name_of(op_);
    result_.peak_module = trace_.module_of(op_);
  }

  // --- Buckets ---

  int64_t take(int64_t bytes) {
    const int64_t whole = std::max(bytes, bytes <= slice_bytes_ ? slice_bytes_ : bucket_bytes_);
    if (const auto found = free_.find(whole); found != free_.end()) {
      free_.erase(found);
    } else {
      add(Category::gradient_buckets, whole);
    }
    return whole;
  }

  void take_bucket(int64_t u) {
    auto& unit = units_[static_cast<size_t>(u)];
    if (unit.bucket > 0 || unit.adopted > 0) return;
    const auto& form = step_.units[static_cast<size_t>(u)].gradients;
    unit.bucket =
        take(step_.layout.unit(u).numel * static_cast<int64_t>(c10::elementSize(form.collected)));
  }

  void arrive(int64_t parameter) {
    const int64_t u = step_.layout.unit_of(parameter);
    auto& unit = units_[static_cast<size_t>(u)];
    const auto& plan = step_.units[static_cast<size_t>(u)];
    const auto& layout = step_.layout.unit(u);
    if (unit.large && unit.bucket == 0 && unit.adopted == 0 &&
        plan.gradients.collected == plan.dtype && layout.content == layout.numel) {
      unit.adopted = layout.bytes();  // autograd's own memory, which the trace has freed
      add(Category::activations, unit.adopted);
    } else {
      take_bucket(u);
    }
    ++unit.arrived;
    if (complete(u)) order_.became_ready(u);
    while (const auto next = order_.turn()) {
      if (!complete(*next)) return;
      order_.advance();
      reduce(*next);
    }
  }
  bool complete(int64_t u) const {
    return units_[static_cast<size_t>(u)].arrived ==
           static_cast<int64_t>(step_.layout.unit(u).segments.size());
  }

  void reduce(int64_t u) {
    auto& unit = units_[static_cast<size_t>(u)];
    if (unit.adopted == 0) take_bucket(u);
    const auto& form = step_.units[static_cast<size_t>(u)].gradients;
    const int64_t slice = step_.layout.slice_numel(u);
    const bool below = step_.units[static_cast<size_t>(u)].gradients_at != Tier::device;
    if (form.converts() && unit.bucket > 0) {
      const int64_t converted =
          take(step_.layout.unit(u).numel * static_cast<int64_t>(c10::elementSize(form.reduced)));
      free_.insert(unit.bucket);
      unit.bucket = converted;
    }
    int64_t output = 0;
    if (!first_ || below) output = take(slice * form.slice_element_bytes());
    // A sum of the gradient's own dtype stays in its memory; another one has memory of its own. The
    // sums of delayed updates are there at all times.
    int64_t stays = 0;
    if (first_ && !below && !step_.timing.delayed_after) {
      const auto& plan = step_.units[static_cast<size_t>(u)];
      const int64_t of_slice = slice * static_cast<int64_t>(c10::elementSize(plan.gradient_dtype));
      if (unit.adopted > 0 && plan.gradient_dtype == plan.dtype) {
        stays = of_slice;
      } else {
        add(sums_as(), of_slice);
      }
      if (!step_.timing.in_backward) unit.slice = of_slice;
    }
    retire();
    // The unit collects in another bucket, if it has gradients before this reduction has ended.
    under_way_ = {.bucket = std::exchange(unit.bucket, 0),
                  .adopted = std::exchange(unit.adopted, 0),
                  .output = output,
                  .stays = stays};
    if (first_ && !below && step_.timing.in_backward) {
      const auto& plan = step_.units[static_cast<size_t>(u)];
      under_way_.handed = slice * static_cast<int64_t>(c10::elementSize(plan.gradient_dtype));
      under_way_.may_wait = step_.timing.may_stay_pending(plan);
    }
  }
  // The category of sums on the device: those of updates in backward are on their way to them.
  Category sums_as() const {
    return step_.timing.in_backward ? Category::gradient_buckets : Category::gradients;
  }

  // The reduction under way ends.
  void retire() {
    const auto over = std::exchange(under_way_, {});
    if (over.bucket > 0) free_.insert(over.bucket);
    if (over.output > 0) free_.insert(over.output);
    if (over.adopted > 0) add(Category::activations, -over.adopted);
    if (over.stays > 0) add(sums_as(), over.stays);
    if (over.handed > 0) hand_over(over.handed, over.may_wait);
  }

  // --- Updates in backward: Note [Update in backward] in engine/update_schedule.h ---

  // Predicts the most: that each update waits as long as it may.
  void hand_over(int64_t bytes, bool may_wait) {
    if (held_before_updates_ == 0) held_before_updates_ = result_.device;
    waiting_.push_back(bytes);
    if (may_wait && held_before_updates_ - device_ > bytes) return;
    while (waiting_.size() >= kUpdatesUnderWay) end_update();
  }
  void end_update() {
    add(Category::gradient_buckets, -waiting_.front());
    waiting_.pop_front();
  }

  // --- Updates in forward: Note [Update in forward] there ---

  // A unit in memory is updated before it is gathered; backward completes the other updates.
  void update(Unit& unit) { add(Category::gradients, -std::exchange(unit.left, 0)); }
  void update_all() {
    for (auto& unit : units_) update(unit);
  }

  // --- Gathered units ---

  // The units of one operator are there together, and the one that was gathered last.
  void gather(int64_t u, int64_t op) {
    if (op != gather_op_) {
      if (live_.size() > 1) {  // the newest one stays, as the next one on its way would
        for (size_t i = 0; i + 1 < live_.size(); ++i) release(live_[i]);
        live_.erase(live_.begin(), live_.end() - 1);
      }
      gather_op_ = op;
    }
    if (std::ranges::find(live_, u) != live_.end()) return;
    live_.push_back(u);
    update(units_[static_cast<size_t>(u)]);
    add(Category::gathered_units, step_.layout.unit(u).bytes());
  }
  void release(int64_t u) { add(Category::gathered_units, -step_.layout.unit(u).bytes()); }

  struct UnderWay {  // bytes
    int64_t bucket = 0;
    int64_t adopted = 0;
    int64_t output = 0;
    int64_t stays = 0;   // of the sum, which stays in the adopted gradient's memory
    int64_t handed = 0;  // of the sum, which goes to an update in backward
    bool may_wait = false;
  };

  const Trace& trace_;
  const PlannedStep& step_;
  std::vector<SweepMemory> sweeps_;
  std::vector<Unit> units_;
  ReductionOrder order_;
  int64_t bucket_bytes_ = 0;
  int64_t slice_bytes_ = 0;
  bool gathers_ = false;
  bool first_ = true;
  int64_t op_ = 0;
  int64_t gather_op_ = -1;
  std::vector<int64_t> live_;
  std::multiset<int64_t> free_;  // the pool's arrays that nobody uses, by bytes
  UnderWay under_way_;
  std::deque<int64_t> waiting_;  // the bytes of sums whose updates have not run
  int64_t held_before_updates_ = 0;
  std::array<int64_t, kCategories> now_{};
  int64_t device_ = 0;
  int64_t host_ = 0;
  RankMemory result_;
};

// Slices of parameters on their way from the disk to a gather: BufferedSlices in
// engine/disk_slices.cpp. A rank that is alone reads units to their place.
int64_t read_buffers(const PlannedStep& step, const Config& config) {
  const int64_t usual = config.unit_bytes / step.grid.shard_group().ranks();
  int64_t slices = 0;
  int64_t most = 0;
  for (int64_t u = 0; u < step.layout.unit_count(); ++u) {
    const auto& plan = step.units[static_cast<size_t>(u)];
    if (plan.parameters_at != Tier::disk) continue;
    ++slices;
    most = std::max(
        most, step.layout.slice_numel(u) * static_cast<int64_t>(c10::elementSize(plan.dtype)));
  }
  return std::min(slices, config.offload_param.buffer_count + 1) *
         at::round_up(std::max(most, usual), store::kAlignment);
}

// Returns whether master weights that stay in memory are the new parameters.
bool masters_serve(const UnitPlan& plan) {
  return plan.copies_master() && !plan.copies_from_disk();
}

// Returns the bytes on a tier of the second copies of parameters and gradients that updates beside
// other work have: StateTable::new_parameters, GradientSums::make_cells, replicated_gradients.cpp.
int64_t second_copies(const PlannedStep& step, Tier tier) {
  int64_t sum = 0;
  if (!step.timing.keeps_old_parameters()) return sum;
  for (int64_t u = 0; u < step.layout.unit_count(); ++u) {
    const auto& plan = step.units[static_cast<size_t>(u)];
    if (!plan.trainable) continue;
    const auto bytes = [](int64_t numel, at::ScalarType dtype) {
      return numel * static_cast<int64_t>(c10::elementSize(dtype));
    };
    const bool apart = plan.parameters_at != Tier::disk && !masters_serve(plan);
    if (apart && plan.updated_at() == tier) sum += bytes(plan.owned.size(), plan.dtype);
    if (!step.timing.delayed_after || plan.gradients_at != tier) continue;
    const int64_t numel = step.sharded.gradients ? step.layout.slice_numel(u)
                          : tier == Tier::host   ? plan.owned.size()
                                                 : step.layout.unit(u).numel;
    sum += bytes(numel, plan.gradient_dtype);
  }
  return sum;
}

// Returns the bytes on a tier of the pieces of parameters and sums between device and host.
int64_t pieces(const PlannedStep& step, Tier tier) {
  int64_t parameters = 0;
  int64_t sums = 0;
  bool own_memory = false;
  for (int64_t u = 0; u < step.layout.unit_count(); ++u) {
    const auto& plan = step.units[static_cast<size_t>(u)];
    if (!plan.trainable) continue;
    own_memory = plan.own_memory;
    if (plan.crosses() && !step.timing.keeps_old_parameters() && !masters_serve(plan) &&
        plan.updated_at() == tier)
      parameters = std::max(parameters, std::min(plan.owned.size(), kPieceNumel) *
                                            static_cast<int64_t>(c10::elementSize(plan.dtype)));
    if (step.sharded.gradients && plan.gradients_at == Tier::host && tier == Tier::host)
      sums = std::max(sums, std::min(step.layout.slice_numel(u), kPieceNumel) *
                                static_cast<int64_t>(c10::elementSize(at::kFloat)));
  }
  const size_t pieces_up = own_memory && tier == Tier::host ? kParameterPieces : 1;
  const size_t pieces_down = own_memory ? kSumPieces : 1;
  return parameters * static_cast<int64_t>(pieces_up) + sums * static_cast<int64_t>(pieces_down);
}

}  // namespace

TraceOptions trace_options(const Config& config, bool host) {
  const bool sharded = partition::sharding_of_stage(config.stage).gradients;
  const auto form = form_of(config, {}, config.parameter_dtype(), true, Tier::device);
  return {.dtype = form.dtype,
          .host = host,
          .gradients_apart = !sharded && form.gradient_dtype != form.dtype,
          .optimizer = config.optimizer.value_or(Optimizer(AdamW{})),
          .autocast = config.autocast_dtype(),
          .casts_dropped = config.stage == 3};
}

RankMemory predict_memory(const Trace& trace, const Config& config,
                          const partition::RankGrid& grid) {
  const auto& model = trace.model;
  const auto layout = lay_out(model, config, grid);
  const auto units = plan_units(layout, model, config, {.grid = grid});
  auto step = planned_step(layout, units, model, config, {.grid = grid});
  const bool alone = grid.ranks() == 1;
  step.in_place =
      !model.own_memory && grid.hosts == 1 && config.offload_param.device == OffloadDevice::none;
  Playback playback(trace, step, config);
  const auto device = planned_memory(step, Tier::device);
  const auto host = planned_memory(step, Tier::host);
  playback.hold(Category::parameters, device.parameters);
  playback.hold(Category::optimizer, device.optimizer);
  if (!step.sharded.gradients || step.timing.delayed_after)
    playback.hold(Category::gradients, device.gradients);
  playback.hold(Category::host_parameters, host.parameters);
  playback.hold(Category::host_gradients, host.gradients);
  playback.hold(Category::host_optimizer, host.optimizer);
  playback.hold(Category::offload_buffers,
                second_copies(step, Tier::device) + pieces(step, Tier::device));
  playback.hold(Category::host_buffers, second_copies(step, Tier::host) + pieces(step, Tier::host));
  if (!alone) playback.hold(Category::communication, comm::kStagingBytes);
  const int64_t disk = disk_bytes(step);
  if (disk > 0) {
    // The ledger has them all in one category; a device's are in the host's memory.
    playback.hold(model.own_memory ? Category::host_buffers : Category::offload_buffers,
                  disk_update_memory(step, config.offload_optimizer.buffer_count) +
                      (alone ? 0 : read_buffers(step, config)));
  }
  // Passes after the third one are like it.
  for (int i = 0; i < 2; ++i) playback.step(std::min<int64_t>(3, step.passes));
  auto memory = playback.result();
  memory.disk = disk;
  return memory;
}

}  // namespace zero::plan
