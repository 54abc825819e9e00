#include "zero/engine/costs.h"

#include <ATen/ceil_div.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/comm/quantise_kernels.h"
#include "zero/engine/plan_units.h"
#include "zero/engine/state_table.h"
#include "zero/optim/sweeps.h"
#include "zero/store/checksums.h"
#include "zero/store/disk_tier.h"

namespace zero {

namespace {

using store::DiskTier;

int64_t bytes(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

const UnitPlan& plan_of(const PlannedStep& step, int64_t unit) {
  return step.units[static_cast<size_t>(unit)];
}

// A slice that has only padding is not updated.
bool owns_some(const partition::Unit& unit, const UnitPlan& plan) {
  return std::any_of(unit.segments.begin(), unit.segments.end(), [&](const auto& segment) {
    return !partition::intersect(segment.range(), plan.owned).empty();
  });
}

// An array on disk begins on a page and takes whole pages.
int64_t bytes_on_disk(const UnitPlan& plan, State state) {
  return at::round_up(plan.bytes_of(state, plan.owned.size()), store::kAlignment);
}

std::vector<DiskTier::Unit> arrays_on_disk(const PlannedStep& step) {
  return StateTable::units_on_disk(step.units, step.timing.keeps_old_parameters(),
                                   step.timing.keeps_old_states);
}

int64_t sweeps_of_update(const UnitPlan& plan) {
  return plan.reach == optim::Reach::element ? 1 : 2;
}

// Returns whether ranks send new parameters to each other when they publish them.
bool publishes(const PlannedStep& step) {
  return step.sharded.optimizer && (!step.sharded.parameters || step.kept_on_hosts);
}

MessageBytes all_gather(const partition::Cluster& cluster, int64_t numel,
                        const partition::Wire& inside, const partition::Wire& across) {
  return {partition::share_sent(inside.bytes(numel), cluster.ranks()),
          all_gather_link_bytes(cluster, numel, across) / cluster.ranks_a_host};
}

MessageBytes reduce_scatter(const partition::Cluster& cluster, int64_t numel,
                            const partition::Wire& inside, const partition::Wire& across) {
  return {partition::share_sent(inside.bytes(numel), cluster.ranks()),
          reduce_scatter_link_bytes(cluster, numel, across) / cluster.ranks_a_host};
}

partition::Wire raw(at::ScalarType dtype) { return {.bits = 8 * bytes(dtype)}; }

// Returns one of `count` messages of the same size.
MessageBytes one_of(const MessageBytes& all, int64_t count) {
  return {.sent = all.sent / count, .leaves = all.leaves / count};
}

// Sets the messages of a step's look-ups in a unit.
void set_look_ups(const PlannedStep& step, int64_t unit, UnitMessages& messages) {
  const auto& plan = plan_of(step, unit);
  const auto sums = messages_of(step.look_ups, unit);
  const auto rows = messages_of(step.rows, unit);
  const auto sum_wire = raw(plan.gradients.sent_dtype(true));
  const auto row_wire = raw(plan.dtype);
  const auto ranks = step.grid.shard_group();
  messages.look_ups = reduce_scatter(ranks, sums.numel, sum_wire, sum_wire);
  messages.look_ups_replace = sums.replaces;
  messages.rows = all_gather(ranks, rows.numel, row_wire, row_wire);
  messages.rows_replace = rows.replaces;
}

// Adds the bytes that an update of a unit moves between device and host. An update on the device
// fetches fp32 parameters from the host, unless new parameters lie apart: then it has those of the
// update before.
void add_crossing(const PlannedStep& step, const UnitPlan& plan, paging::UnitCosts& costs) {
  if (!plan.crosses()) return;
  const int64_t slice = plan.owned.size() * bytes(plan.dtype);
  if (plan.updated_at() == Tier::host) {
    costs.update_up = slice;
    return;
  }
  costs.update_down = slice;
  if (!plan.own_master() && !step.timing.keeps_old_parameters())
    costs.update_up = sweeps_of_update(plan) * slice;
}

// Adds the bytes of gradients on their way to the place where the update reads them.
void add_gradients(const PlannedStep& step, const UnitPlan& plan, paging::UnitCosts& costs) {
  const int64_t owned = plan.owned.size();
  if (plan.gradients_at == Tier::disk) {
    costs.reduce_write = costs.reduce_read = bytes_on_disk(plan, State::gradients);
    if (plan.own_memory) {  // on their way to the disk
      costs.reduce_down = owned * bytes(plan.gradients.sum_dtype(true));
      costs.reduce_down_next = owned * bytes(plan.gradients.sum_dtype(false));
    }
  } else if (plan.gradients_at == Tier::host && step.sharded.gradients) {
    costs.reduce_down = owned * bytes(plan.gradients.sum_dtype(true));
    costs.reduce_down_next = owned * bytes(plan.gradients.sum_dtype(false));
  } else if (plan.gradients_at == Tier::host) {
    costs.reduce_down = owned * bytes(plan.gradient_dtype);
  }
}

void add_update(const PlannedStep& step, const UnitPlan& plan, const DiskTier::Unit& on_disk,
                paging::UnitCosts& costs) {
  const int64_t sweeps = sweeps_of_update(plan);
  const int64_t owned = plan.owned.size();
  const auto columns = plan.columns_on_disk();
  for (size_t i = 0; i < columns.size(); ++i) {
    const int64_t moved = sweeps * bytes_on_disk(plan, columns[i]);
    if (on_disk.arrays[i].read) costs.update_read += moved;
    if (on_disk.arrays[i].write) costs.update_write += moved;
  }
  add_crossing(step, plan, costs);
  costs.update = sweeps * (owned * (bytes(plan.gradient_dtype) + bytes(plan.dtype)) +
                           2 * plan.optimizer_bytes(owned));
  costs.updated_on_host = plan.optimizer_at != Tier::device;
  costs.updated_in_gather = step.timing.stays_in_memory(plan);
}

paging::UnitCosts costs_of(const PlannedStep& step, int64_t unit, const DiskTier::Unit& on_disk) {
  const auto& plan = plan_of(step, unit);
  const auto messages = unit_messages(step, unit);
  const auto link = [&](const MessageBytes& message) {
    return step.grid.hosts > 1 ? message.leaves * step.grid.ranks_a_host : message.sent;
  };
  paging::UnitCosts costs{.bytes = step.layout.unit(unit).bytes(), .trainable = plan.trainable};
  if (step.sharded.parameters) {
    if (step.kept_on_hosts && !step.in_place) {
      costs.gather = messages.gather_in_host.sent;
    } else if (!step.in_place) {
      costs.gather = link(messages.gather_in_pass());
    }
    if (plan.comes_up()) costs.gather_up = plan.owned.size() * bytes(plan.dtype);
    if (plan.parameters_at == Tier::disk)
      costs.gather_read = bytes_on_disk(plan, State::parameters);
  }
  if (!plan.trainable) return costs;
  if (publishes(step)) costs.publish = link(messages.gather);
  costs.reduce = link(messages.reduce_in_pass());
  if (messages.look_ups_replace == 0) costs.reduce_at_end = link(messages.look_ups);
  (plan.gradients.defers ? costs.reduce_at_end : costs.reduce) +=
      link(messages.reduce_over_replicas.front()) + link(messages.gather_over_replicas.front());
  if (messages.rows_replace == 0) costs.publish += link(messages.rows);
  add_gradients(step, plan, costs);
  if (owns_some(step.layout.unit(unit), plan)) add_update(step, plan, on_disk, costs);
  return costs;
}

void add(const MessageBytes& message, int64_t times, int64_t& sent, int64_t& leaves) {
  sent += times * message.sent;
  leaves += times * message.leaves;
}

// Adds the bytes of a unit's parameters to the other ranks. With `published` the step ends by
// publishing the units that it has trained.
void add_gathers(const PlannedStep& step, const UnitPlan& plan, const UnitMessages& messages,
                 bool published, TrafficFormula& sum) {
  if (!step.sharded.optimizer) return;
  const int64_t times_published = plan.trainable && published ? 1 : 0;
  const int64_t passes = step.passes - std::min(messages.rows_replace, step.passes);
  const int64_t gathers = step.sharded.parameters ? 2 * passes : times_published;
  auto& sent = sum.all_gather;
  auto& leaves = sum.all_gather_link;
  if (step.kept_on_hosts) {  // once to each host, where they are read
    add(messages.gather_in_host, gathers - times_published, sent, leaves);
    add(messages.gather, times_published, sent, leaves);
  } else {
    add(messages.gather, gathers, sent, leaves);
  }
}

// Adds the bytes of a unit's gradients.
void add_reductions(const PlannedStep& step, const UnitPlan& plan, const UnitMessages& messages,
                    TrafficFormula& sum) {
  if (!step.sharded.optimizer) {
    add(messages.reduce.front(), 1, sum.all_reduce, sum.all_reduce_link);
    return;
  }
  const int64_t sums =
      step.sharded.gradients ? step.passes - std::min(messages.look_ups_replace, step.passes) : 1;
  const int64_t sums_of_replicas = plan.gradients.defers ? 1 : sums;
  for (const size_t pass : {0, 1}) {
    const auto times = [&](int64_t all) {
      return pass == 0 ? std::min<int64_t>(all, 1) : std::max<int64_t>(all - 1, 0);
    };
    add(messages.reduce[pass], times(sums), sum.reduce_scatter, sum.reduce_scatter_link);
    add(messages.reduce_over_replicas[pass], times(sums_of_replicas), sum.reduce_scatter,
        sum.reduce_scatter_link);
    add(messages.gather_over_replicas[pass], times(sums_of_replicas), sum.all_gather,
        sum.all_gather_link);
  }
}

}  // namespace

PlannedStep planned_step(const partition::Layout& layout, const std::vector<UnitPlan>& units,
                         const ModelShape& model, const Config& config, const PlannedRanks& ranks) {
  const auto& grid = ranks.grid;
  const auto sharded = sharded_states(config, grid.shards);
  const bool sliced = sharded.optimizer && grid.shards > 1;
  PlannedStep step{
      .layout = layout,
      .units = units,
      .grid = grid,
      .sharded = sharded,
      .timing = UpdateTiming::of(config, sharded, grid),
      .passes = config.layer_major_accumulation ? 1 : config.gradient_accumulation_steps,
      .kept_on_hosts = config.hpz_partition_size > 1 && grid.shard_group().hosts > 1,
      .feedback = config.quantised.feedback.has_value(),
      .sweep_batches = batch_sweeps(layout, units, model, grid.shards, sliced)};
  step.factored_owners = factored_owners(step.sweep_batches, model.parameters.size(), sliced);
  const auto shard = static_cast<int>(grid.place(ranks.rank).shard);
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    auto& bytes = step.factored_bytes.emplace_back(0);
    for (const auto& segment : layout.unit(u).segments) {
      const int owner = step.factored_owners[static_cast<size_t>(segment.parameter)];
      if (owner < 0 || owner == shard)
        bytes += 4 * factored_numel(model.parameter(segment.parameter));
    }
  }
  return step;
}

partition::LayoutMemory planned_memory(const PlannedStep& step, Tier tier) {
  ensure(tier != Tier::disk, "disk_bytes counts what is on a disk");
  partition::LayoutMemory sum;
  // The host has the elements that a rank updates; replicated gradients add up on the device before
  // that.
  const bool host = tier == Tier::host;
  const auto& at = step.sharded;
  const auto counted = partition::Sharding{.parameters = at.parameters,
                                           .gradients = host ? at.optimizer : at.gradients,
                                           .optimizer = at.optimizer};
  for (int64_t u = 0; u < step.layout.unit_count(); ++u) {
    const auto& plan = plan_of(step, u);
    partition::StateBytes of{.parameter = plan.parameters_at == tier ? bytes(plan.dtype) : 0,
                             .gradient = 0,
                             .optimizer = 0};
    if (plan.trainable) {
      const auto gradients_at = !host && !at.gradients && plan.gradients_at == Tier::host
                                    ? Tier::device
                                    : plan.gradients_at;
      const bool kept = host || !step.timing.in_backward;
      if (gradients_at == tier && kept) of.gradient = bytes(plan.gradient_dtype);
      if (plan.optimizer_at == tier) {
        const int64_t bytes = plan.optimizer_bytes(partition::kAlignment);
        of.optimizer = bytes / partition::kAlignment;
        of.scales = bytes % partition::kAlignment;
      }
    }
    const auto unit = partition::unit_memory(step.layout, u, counted, of);
    sum.parameters += unit.parameters;
    sum.gradients += unit.gradients;
    sum.optimizer += unit.optimizer;
    if (plan.factored_at() == tier) sum.optimizer += step.factored_bytes[static_cast<size_t>(u)];
    sum.padding += unit.padding;
    if (step.kept_on_hosts && tier == Tier::device) {
      // Each rank has an equal share of the host's array. That includes the slices, except those
      // that lie apart.
      const auto& whole = step.layout.unit(u);
      const int64_t share = whole.bytes() / step.grid.ranks_a_host;
      const int64_t content = whole.content * whole.element_bytes;
      sum.parameters += share;
      sum.padding += share - content / step.grid.ranks_a_host;
      if (!plan.parameter_link.quantised()) {
        sum.parameters -= unit.parameters;
        sum.padding -= unit.parameters - content / step.layout.shards();
      }
    }
    // The rounding errors of quantised sums are stored for the next ones, where messages are made.
    const auto& link = plan.gradients.link;
    const auto errors_at = plan.own_memory ? Tier::host : Tier::device;
    if (plan.trainable && link.quantised() && step.feedback && at.gradients && tier == errors_at)
      sum.gradients +=
          (step.grid.hosts - 1) * comm::wire_bytes(comm::feedback_quantisation(link.quantisation),
                                                   step.layout.slice_numel(u));
  }
  return sum;
}

int64_t disk_bytes(const PlannedStep& step) {
  int64_t sum = 0;
  const auto on_disk = arrays_on_disk(step);
  for (size_t u = 0; u < on_disk.size(); ++u) {
    const auto columns = step.units[u].columns_on_disk();
    for (size_t i = 0; i < columns.size(); ++i)
      sum += bytes_on_disk(step.units[u], columns[i]) * (on_disk[u].arrays[i].doubled ? 2 : 1);
  }
  return sum;
}

void plan_look_up(PlannedStep& step, const PlannedLookUp& look_up) {
  const bool tied = look_up.use == LookUpUse::tied;
  if (look_up.parameter < 0 || look_up.use == LookUpUse::none ||
      (tied && look_up.rows > look_up.columns) || step.grid.hosts == 1 ||
      step.grid.replicas() > 1 || !step.sharded.gradients || step.timing.keeps_old_parameters())
    return;
  const int64_t unit = step.layout.unit_of(look_up.parameter);
  const auto& whole = step.layout.unit(unit);
  const auto& plan = plan_of(step, unit);
  const int64_t ranks = step.grid.ranks();
  const int64_t message = at::round_up(look_up.rows * look_up.columns, partition::kAlignment);
  const int64_t passes = tied ? 1 : step.passes;
  const RowMessages messages{
      .unit = unit, .numel = passes * ranks * message, .replaces = tied ? 0 : passes};
  const bool suits = plan.trainable && plan.gradients_at == Tier::device &&
                     plan.gradients.sends_as_made(plan.dtype) && whole.segments.size() == 1 &&
                     are_few(ranks * message, whole.numel);
  if (!suits) return;
  step.look_ups = {messages};
  if (step.sharded.parameters && !step.kept_on_hosts && plan.parameters_at == Tier::device &&
      !plan.parameter_link.quantised() && are_few(messages.numel, whole.numel))
    step.rows = {messages};
}

int64_t disk_update_memory(const PlannedStep& step, int64_t buffer_count) {
  return DiskTier::update_memory(arrays_on_disk(step), buffer_count);
}

MessageBytes UnitMessages::gather_in_pass() const {
  return rows_replace > 0 ? one_of(rows, rows_replace) : gather;
}

MessageBytes UnitMessages::reduce_in_pass() const {
  return look_ups_replace > 0 ? one_of(look_ups, look_ups_replace) : reduce.front();
}

UnitMessages unit_messages(const PlannedStep& step, int64_t u) {
  const auto& unit = step.layout.unit(u);
  const auto& plan = plan_of(step, u);
  const auto shard_group = step.grid.shard_group();
  UnitMessages messages;
  messages.gather =
      all_gather(shard_group, unit.numel, raw(plan.dtype), plan.parameter_link.counted(plan.dtype));
  messages.gather_in_host.sent = partition::share_sent(unit.bytes(), shard_group.ranks_a_host);
  set_look_ups(step, u, messages);
  if (!plan.trainable) return messages;
  const auto& form = plan.gradients;
  for (const size_t pass : {0, 1}) {
    const bool first = pass == 0;
    const auto sent = form.sent_dtype(first);
    const auto across = form.link.counted(sent);
    if (!step.sharded.optimizer) {
      const auto all = step.grid.all();
      messages.reduce[pass] = {2 * partition::share_sent(unit.numel * bytes(sent), all.ranks()),
                               all_reduce_link_bytes(all, unit.numel, across) / all.ranks_a_host};
      continue;
    }
    messages.reduce[pass] = reduce_scatter(shard_group, unit.numel, raw(sent), across);
    if (step.grid.replicas() == 1) continue;
    const auto same = step.grid.same_slices();
    const int64_t numel = step.layout.slice_numel(u);
    const auto partial = raw(form.sent_on_dtype(first));
    const auto whole = raw(form.sum_dtype(first));
    messages.reduce_over_replicas[pass] = reduce_scatter(same, numel, partial, partial);
    messages.gather_over_replicas[pass] = all_gather(same, numel, whole, whole);
  }
  return messages;
}

MessageBytes sweep_message(const PlannedStep& step, int64_t gathered) {
  const partition::Wire byte{.bits = 8};
  return all_gather(step.grid.shard_group(), gathered, byte, byte);
}

std::vector<paging::UnitCosts> unit_costs(const PlannedStep& step) {
  const auto on_disk = arrays_on_disk(step);
  std::vector<paging::UnitCosts> costs;
  for (int64_t u = 0; u < step.layout.unit_count(); ++u)
    costs.push_back(costs_of(step, u, on_disk[static_cast<size_t>(u)]));
  return costs;
}

int64_t host_update_bytes(const PlannedStep& step) {
  int64_t sum = 0;
  for (const auto& costs : unit_costs(step)) sum += costs.updated_on_host ? costs.update : 0;
  return sum;
}

TrafficFormula planned_traffic(const PlannedStep& step, bool updated) {
  const int64_t k = step.passes;
  const auto costs = unit_costs(step);
  const bool updates = updated || step.timing.keeps_old_states;
  // If updates run beside other work, the code that ends them publishes the units.
  const bool published = updated || step.timing.any_beside(step.units) || step.sharded.parameters;
  TrafficFormula sum;
  for (int64_t u = 0; u < step.layout.unit_count(); ++u) {
    const auto& plan = plan_of(step, u);
    const auto& unit = costs[static_cast<size_t>(u)];
    sum.disk_read += 2 * k * unit.gather_read + (k - 1) * unit.reduce_read;
    sum.disk_written += k * unit.reduce_write;
    sum.host_up += 2 * k * unit.gather_up;
    sum.host_down += unit.reduce_down + (k - 1) * unit.reduce_down_next;
    if (updates) {
      sum.disk_read += unit.update_read;
      sum.disk_written += unit.update_write;
      sum.host_up += unit.update_up;
      sum.host_down += unit.update_down;
    }
    const auto messages = unit_messages(step, u);
    add_gathers(step, plan, messages, published, sum);
    if (plan.trainable) add_reductions(step, plan, messages, sum);
    add(messages.look_ups, 1, sum.reduce_scatter, sum.reduce_scatter_link);
    add(messages.rows, 1, sum.all_gather, sum.all_gather_link);
  }
  if (!updated) return sum;
  for (const auto& batch : step.sweep_batches) {
    for (const int64_t gathered : batch.gathered_bytes)
      add(sweep_message(step, gathered), 1, sum.all_gather, sum.all_gather_link);
  }
  return sum;
}

}  // namespace zero
