#include "zero/planner/simulate.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>
#include <vector>

#include "zero/engine/costs.h"
#include "zero/engine/plan_units.h"
#include "zero/planner/stragglers.h"

namespace zero::plan {
namespace {

using paging::StepSchedule;
using paging::UnitCosts;

constexpr double kNanoseconds = 1e9;
// The sums of a step's times stay within 64 bits: no time counts as longer than eleven days.
constexpr double kLongest = 1e6;  // seconds
int64_t ns(double seconds) { return std::llround(std::min(seconds, kLongest) * kNanoseconds); }

/// The work of one micro-batch by operators that use units.
struct MicroBatch {
  paging::Trace trace;
  std::vector<double> seconds;
  std::vector<uint8_t> backward;
  std::vector<StepSchedule::Reduction> reductions;
};

// Units of few bytes (those of norms and biases, which every layer uses) count as present: `small`
// tells which.
MicroBatch micro_batch(const Trace& trace, const partition::Layout& layout, const Device& device,
                       at::ScalarType dtype, const std::vector<uint8_t>& small) {
  MicroBatch work;
  std::vector<int64_t> arrived(static_cast<size_t>(layout.unit_count()), 0);
  std::vector<int64_t> pinned;
  size_t event = 0;
  const auto count = static_cast<int64_t>(trace.operators.size());
  const auto arrivals_until = [&](int64_t op) {
    for (; event < trace.events.size() && trace.events[event].op <= op; ++event) {
      const auto& e = trace.events[event];
      if (e.kind == TraceEvent::Kind::use && e.op == op) {
        const int64_t unit = layout.unit_of(e.value);
        if (small[static_cast<size_t>(unit)] == 0 &&
            std::ranges::find(pinned, unit) == pinned.end())
          pinned.push_back(unit);
      }
      if (e.kind != TraceEvent::Kind::arrival) continue;
      const int64_t unit = layout.unit_of(e.value);
      if (++arrived[static_cast<size_t>(unit)] ==
          static_cast<int64_t>(layout.unit(unit).segments.size()))
        work.reductions.push_back({unit, work.seconds.empty() ? 0 : work.seconds.size() - 1});
    }
  };
  double before = 0;  // of operators before the first that uses a unit
  for (int64_t op = 0; op < count; ++op) {
    pinned.clear();
    arrivals_until(op);
    const auto& traced = trace.operators[static_cast<size_t>(op)];
    const double seconds = operator_seconds(traced, device, dtype);
    if (pinned.empty()) {
      (work.seconds.empty() ? before : work.seconds.back()) += seconds;
      continue;
    }
    // Passes follow each other in the trace; operators of the same units in a pass are one.
    if (!work.seconds.empty() && work.backward.back() == static_cast<uint8_t>(traced.backward) &&
        work.trace.has(work.seconds.size() - 1, pinned)) {
      work.seconds.back() += seconds;
      continue;
    }
    work.trace.record(pinned);
    work.seconds.push_back(seconds + std::exchange(before, 0));
    work.backward.push_back(traced.backward ? 1 : 0);
  }
  arrivals_until(count);
  return work;
}

/// Returns the seconds in which `ranks`, and all others beside them, send their messages.
double seconds_of(const Cluster& cluster, const MessageBytes& message,
                  const partition::Cluster& ranks) {
  if (message.sent == 0) return 0;
  return Collective{cluster}.seconds(static_cast<double>(message.sent),
                                     static_cast<double>(message.leaves), ranks.ranks(),
                                     ranks.hosts);
}

/// Returns the costs of a unit as times.
UnitCosts times_of(const PlannedStep& step, int64_t u, const UnitCosts& bytes,
                   const Cluster& cluster) {
  const auto messages = unit_messages(step, u);
  const auto& grid = step.grid;
  const auto seconds = [&](const MessageBytes& message, const partition::Cluster& ranks) {
    return seconds_of(cluster, message, ranks);
  };
  const auto shard_group = grid.shard_group();
  const auto ranks = static_cast<double>(grid.ranks_a_host);
  const auto of = [&](int64_t count, double bandwidth) {
    return bandwidth > 0 ? ns(static_cast<double>(count) / bandwidth) : 0;
  };
  const double pcie = cluster.device.pcie;
  const double disk = cluster.nvme / ranks;
  UnitCosts times = bytes;
  const int64_t gather = ns(seconds(messages.gather_in_pass(), shard_group));
  times.gather = bytes.gather == 0 ? 0
                 : step.kept_on_hosts
                     ? ns(seconds(messages.gather_in_host, {1, shard_group.ranks_a_host}))
                     : gather;
  times.publish = bytes.publish == 0 ? 0
                  : messages.rows.sent > 0 && messages.rows_replace == 0
                      ? ns(seconds(messages.rows, shard_group))
                      : gather;
  const auto& sharded = step.sharded;
  const double reduce =
      seconds(messages.reduce_in_pass(), sharded.optimizer ? shard_group : grid.all());
  const double over_replicas = seconds(messages.reduce_over_replicas.front(), grid.same_slices()) +
                               seconds(messages.gather_over_replicas.front(), grid.same_slices());
  const bool looks_up = messages.look_ups.sent > 0 && messages.look_ups_replace == 0;
  const bool deferred = bytes.reduce_at_end > 0 && !looks_up;  // it has no replicas
  times.reduce = bytes.reduce == 0 ? 0 : ns(reduce + (deferred ? 0 : over_replicas));
  times.reduce_at_end = looks_up   ? ns(seconds(messages.look_ups, shard_group))
                        : deferred ? ns(over_replicas)
                                   : 0;
  times.gather_up = of(bytes.gather_up, pcie);
  times.reduce_down = of(bytes.reduce_down, pcie);
  times.reduce_down_next = of(bytes.reduce_down_next, pcie);
  times.update_down = of(bytes.update_down, pcie);
  times.update_up = of(bytes.update_up, pcie);
  times.gather_read = of(bytes.gather_read, disk);
  times.reduce_write = of(bytes.reduce_write, disk);
  times.reduce_read = of(bytes.reduce_read, disk);
  times.update_read = of(bytes.update_read, disk);
  times.update_write = of(bytes.update_write, disk);
  const double memory = cluster.device.bandwidth * cluster.device.streams;
  times.update = bytes.updated_on_host ? of(bytes.update, cluster.host_update / ranks)
                                       : of(bytes.update, memory);
  return times;
}

/// Returns the seconds of a batch of updates in two sweeps that the sweeps themselves do not take:
/// the exchanges, and the products of the rank that has most (Muon's and Apollo's matrices).
double sweep_seconds(const PlannedStep& step, const SweepBatch& batch, const ModelShape& model,
                     const Cluster& cluster) {
  double seconds = 0;
  for (const int64_t gathered : batch.gathered_bytes)
    seconds += seconds_of(cluster, sweep_message(step, gathered), step.grid.shard_group());
  // Without slices each rank works on all matrices.
  const bool dealt = step.sharded.optimizer && step.grid.shards > 1;
  std::vector<double> flops(static_cast<size_t>(step.grid.shards), 0.0);
  for (const auto& matrix : batch.matrices) {
    double own = 0;
    if (matrix.projection) {
      own = 2.0 * static_cast<double>(matrix.rows) * static_cast<double>(matrix.columns) *
            static_cast<double>(matrix.projection->rank);
    } else if (const auto* muon = std::get_if<Muon>(&model.parameter(matrix.parameter).optimizer)) {
      own = optim::cost_of_orthogonalising(matrix.rows, matrix.columns, muon->ns_steps).flops;
    }
    flops[dealt ? static_cast<size_t>(matrix.owner) : 0] += own;
  }
  const auto& device = cluster.device;
  return seconds + std::ranges::max(flops) / (device.flops_fp32 * device.products);
}

/// Costs are times already, in nanoseconds.
paging::Speeds speeds_of_times(const Cluster& cluster) {
  const auto& link = cluster.hosts > 1 ? cluster.between : cluster.inside;
  return {.compute = 1,
          .link = kNanoseconds,
          .pcie = kNanoseconds,
          .disk = kNanoseconds,
          .update = kNanoseconds,
          .link_work = link.processors};
}

StepSchedule schedule_of(const MicroBatch& work, int64_t passes) {
  StepSchedule schedule;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const size_t first = schedule.flops.size();
    for (size_t i = 0; i < work.seconds.size(); ++i) schedule.trace.record(work.trace.units(i));
    schedule.flops.insert(schedule.flops.end(), work.seconds.begin(), work.seconds.end());
    schedule.backward.insert(schedule.backward.end(), work.backward.begin(), work.backward.end());
    for (const auto& reduction : work.reductions)
      schedule.reductions.push_back({reduction.unit, first + reduction.after});
  }
  return schedule;
}

paging::UpdatesIn updates_in(const UpdateTiming& timing) {
  return timing.in_backward     ? paging::UpdatesIn::backward
         : timing.delayed_after ? paging::UpdatesIn::next_step
                                : paging::UpdatesIn::step;
}

// On a CPU a thread of its own runs updates beside other work, on the processors that operators
// use: those operators last longer by as much.
void share_processors(StepSchedule& schedule) {
  double update = 0;
  double beside = 0;
  for (const auto& unit : schedule.units) {
    if (!unit.updated_on_host) update += static_cast<double>(unit.update) / kNanoseconds;
  }
  const auto shares = [&](size_t op) {
    return schedule.updates_in == paging::UpdatesIn::next_step || schedule.backward[op] != 0;
  };
  for (size_t op = 0; op < schedule.flops.size(); ++op)
    beside += shares(op) ? schedule.flops[op] : 0;
  for (size_t op = 0; beside > 0 && op < schedule.flops.size(); ++op) {
    if (shares(op)) schedule.flops[op] *= 1 + update / beside;
  }
}

}  // namespace

double operator_seconds(const TracedOperator& op, const Device& device, at::ScalarType dtype) {
  const double part = op.attention && device.attention > 0 ? device.attention : device.products;
  if (op.dtype != at::ScalarType::Undefined) dtype = op.dtype;
  const double peak = (dtype == at::kFloat ? device.flops_fp32 : device.flops) * part;
  const double memory = device.bandwidth * device.streams;
  const double modelled = std::max(op.flops / peak, op.bytes / memory);
  if (op.seconds == 0) return modelled;
  // A device that is to be faster than the measured one is so in the same proportion.
  return op.modelled > 0 ? op.seconds * modelled / op.modelled : op.seconds;
}

StepTime simulate(const Trace& trace, const Config& config, const Cluster& cluster, bool split) {
  const auto grid = grid_of(config, cluster.hosts, cluster.per_host);
  const auto layout = lay_out(trace.model, config, grid);
  const auto units = plan_units(layout, trace.model, config, {.grid = grid});
  auto step = planned_step(layout, units, trace.model, config, {.grid = grid});
  plan_look_up(step, trace.look_up);
  const auto bytes = unit_costs(step);

  std::vector<UnitCosts> costs;
  costs.reserve(bytes.size());
  int64_t largest = 0;
  for (size_t u = 0; u < bytes.size(); ++u) {
    costs.push_back(times_of(step, static_cast<int64_t>(u), bytes[u], cluster));
    largest = std::max(largest, bytes[u].bytes);
  }
  // The exchange of a batch comes before its second sweeps.
  for (const auto& batch : step.sweep_batches)
    costs[static_cast<size_t>(batch.units.front())].update +=
        ns(sweep_seconds(step, batch, trace.model, cluster));
  std::vector<uint8_t> small(bytes.size(), 0);
  constexpr int64_t kSmall = 16;  // of the largest unit's bytes
  for (size_t u = 0; u < bytes.size(); ++u) small[u] = bytes[u].bytes * kSmall < largest ? 1 : 0;
  auto work = micro_batch(trace, layout, cluster.device, config.parameter_dtype(), small);
  const double slowest = slowest_rank(cluster.speeds_differ, cluster.ranks());
  for (auto& seconds : work.seconds) seconds *= slowest;
  // Their gathers are the first large unit's.
  const auto first = std::ranges::find(small, uint8_t{0}) - small.begin();
  for (size_t u = 0; u < bytes.size(); ++u) {
    if (small[u] != 0) costs[static_cast<size_t>(first)].gather += costs[u].gather;
  }
  const auto speeds = speeds_of_times(cluster);
  const auto run = [&](int64_t passes, const std::vector<UnitCosts>& with) {
    auto schedule = schedule_of(work, passes);
    for (const auto& rows : step.rows) {
      if (rows.replaces == 0) paging::leave_out_first_use(schedule, rows.unit);
    }
    schedule.units = with;
    schedule.gathers = step.sharded.parameters;
    schedule.reduces_in =
        step.sharded.gradients ? paging::ReducesIn::every_pass : paging::ReducesIn::last_pass;
    // Two units ahead, and those in use: what memory.h counts as gathered, and a little more.
    // Without gathers all units are there, and there is nothing to choose.
    schedule.prefetch_bytes = schedule.gathers ? 2 * largest : 0;
    schedule.budget_bytes = schedule.gathers ? 4 * largest : int64_t{1} << 60;
    schedule.read_ahead_bytes = schedule.prefetch_bytes;
    schedule.updates_in = updates_in(step.timing);
    if (schedule.updates_in != paging::UpdatesIn::step && cluster.device.cpu)
      share_processors(schedule);
    return paging::simulate(schedule, speeds).seconds;
  };
  const int64_t k = step.passes;
  // All passes behind the second one take as long as the third.
  const auto passes = [&](const std::vector<UnitCosts>& with) {
    const double two = run(2, with);
    return two + static_cast<double>(k - 2) * (run(3, with) - two);
  };
  const auto total = [&](const std::vector<UnitCosts>& with) {
    if (k <= 3) return run(k, with);
    if (!step.timing.delayed_after) return passes(with);
    // A delayed update runs beside all passes, so a third one may take no time of its own.
    auto without_updates = with;
    for (auto& unit : without_updates) {
      unit.update = unit.update_read = unit.update_write = 0;
    }
    return std::max(run(3, with), passes(without_updates));
  };
  StepTime time;
  double now = time.seconds = total(costs);
  if (!split) return time;
  // A part costs what the step would gain without it. Parts go in this order.
  const auto without = [&](double& part, std::initializer_list<int64_t UnitCosts::*> fields) {
    bool any = false;
    for (auto& unit : costs) {
      for (const auto field : fields) any |= std::exchange(unit.*field, 0) != 0;
    }
    if (!any) return;  // the part stays 0
    const double less = total(costs);
    part = std::max(0.0, now - less);
    now = less;
  };
  using U = UnitCosts;
  without(time.gather, {&U::gather, &U::publish});
  without(time.reduce, {&U::reduce, &U::reduce_at_end});
  without(time.disk,
          {&U::gather_read, &U::reduce_write, &U::reduce_read, &U::update_read, &U::update_write});
  without(time.offload,
          {&U::gather_up, &U::reduce_down, &U::reduce_down_next, &U::update_down, &U::update_up});
  without(time.update, {&U::update});
  time.compute = now;
  return time;
}

}  // namespace zero::plan
