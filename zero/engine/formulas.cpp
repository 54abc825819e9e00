// What this engine's states, steps and disk must take, by the formulas of `partition` over its
// table.
#include <algorithm>

#include "zero/device/stream.h"
#include "zero/engine/engine_impl.h"

namespace zero {

namespace {

int64_t bytes(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

partition::Cluster cluster_of(const comm::Group& group) {
  return {group.topology().hosts, group.local_size()};
}

// A slice of padding alone is not updated.
bool owns_some(const partition::Unit& unit, const UnitPlan& plan) {
  return std::any_of(unit.segments.begin(), unit.segments.end(), [&](const auto& segment) {
    return !partition::intersect(segment.range(), plan.owned).empty();
  });
}

// What goes down to the host of a unit in a step of so many passes.
int64_t bytes_down(const UnitPlan& plan, bool sharded, int64_t passes) {
  if (plan.gradients_at != Tier::host) return 0;
  const int64_t numel = plan.owned.size();
  if (!sharded) return numel * bytes(plan.gradient_dtype);
  const auto& form = plan.gradients;
  return numel * (bytes(form.sum(true)) + (passes - 1) * bytes(form.sum(false)));
}

}  // namespace

partition::LayoutMemory Engine::Impl::states(partition::Placement at, Tier tier) const {
  partition::LayoutMemory sum;
  // The host gets what a rank updates; replicated gradients add up on the device before that.
  const bool host = tier == Tier::host;
  const auto counted = partition::Placement{.parameters = at.parameters,
                                            .gradients = host ? at.optimizer : at.gradients,
                                            .optimizer = at.optimizer};
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    const auto& plan = plans[static_cast<size_t>(u)];
    partition::StateBytes of{.parameter = plan.parameters_at == tier ? bytes(plan.dtype) : 0,
                             .gradient = 0,
                             .optimizer = 0};
    if (plan.trainable) {
      const auto gradients_at = !host && !at.gradients && plan.gradients_at == Tier::host
                                    ? Tier::device
                                    : plan.gradients_at;
      const bool kept = host || !timing.in_backward;
      if (gradients_at == tier && kept) of.gradient = bytes(plan.gradient_dtype);
      if (plan.states_at == tier) {
        const int64_t bytes = plan.optimizer_bytes(partition::kAlignment);
        of.optimizer = bytes / partition::kAlignment;
        of.scales = bytes % partition::kAlignment;
      }
    }
    const auto unit = partition::unit_memory(layout, u, counted, of);
    sum.parameters += unit.parameters;
    sum.gradients += unit.gradients;
    sum.optimizer += unit.optimizer;
    if (plan.factored_at() == tier) sum.optimizer += plan.factored_bytes;
    sum.padding += unit.padding;
    if (kept_on_hosts() && tier == Tier::device) {
      // The host's array lies in equal shares on its ranks; it has the slices too, but those that
      // are kept apart.
      const auto& whole = layout.unit(u);
      const int64_t share = whole.bytes() / group().local_size();
      const int64_t content = whole.content * whole.element_bytes;
      sum.parameters += share;
      sum.padding += share - content / group().local_size();
      if (!plan.parameter_link.quantised()) {
        sum.parameters -= unit.parameters;
        sum.padding -= unit.parameters - content / layout.world_size();
      }
    }
    // What quantised sums have lost, for the next ones.
    const auto& link = plan.gradients.link;
    if (plan.trainable && link.quantised() && config.quantised.feedback && at.gradients && !host &&
        tier == Tier::device)
      sum.gradients += group().feedback_bytes(link.quantisation, layout.slice_numel(u));
  }
  return sum;
}

partition::StateMemory Engine::Impl::states_in_memory(partition::Placement at) const {
  const bool apart = is_asynchronous(model.device());
  const auto device = apart ? partition::LayoutMemory{} : states(at, Tier::device);
  const auto host = states(at, Tier::host);
  const auto both = [](int64_t a, int64_t b) { return static_cast<double>(a + b); };
  return {.parameters = both(device.parameters, host.parameters),
          .gradients = both(device.gradients, host.gradients),
          .optimizer = both(device.optimizer, host.optimizer)};
}

partition::LayoutMemory Engine::memory_formula() const {
  return impl_->states(impl_->placement.sharded, Tier::device);
}

partition::LayoutMemory Engine::host_memory_formula() const {
  return impl_->states(impl_->placement.sharded, Tier::host);
}

HostTraffic Engine::host_traffic() const { return impl_->link.counts(); }

DiskUse Engine::disk() const {
  const auto* disk = impl_->table->disk();
  if (disk == nullptr) return {};
  const auto counts = disk->file().counts();
  return {disk->bytes(), counts.read, counts.written, disk->wait_ms()};
}

paging::UnitCosts Engine::Impl::unit_costs(int64_t u) const {
  const auto& unit = layout.unit(u);
  const auto& plan = table->plan(u);
  const auto& sharded = placement.sharded;
  const auto& shards = *placement.shards;
  const int ranks = shards.size();
  // Between hosts the link is a host's. Inside one ranks that are on the CPU share its memory.
  const bool hosts = group().topology().hosts > 1;
  const auto link = [&](int64_t sent, const partition::Cluster& cluster, int64_t leaves) {
    return hosts ? leaves / cluster.ranks_a_host * group().local_size() : sent;
  };
  const auto cluster = cluster_of(shards);
  paging::UnitCosts costs{.bytes = unit.bytes(), .trainable = plan.trainable};

  const auto parameter = plan.parameter_link.counted(plan.dtype);
  const int64_t gather_sent = link(partition::share_sent(unit.bytes(), ranks), cluster,
                                   all_gather_link_bytes(cluster, unit.numel, parameter));
  if (sharded.parameters) {
    if (!gather->in_place()) costs.gather = gather_sent;
    if (plan.comes_up()) costs.gather_up = plan.owned.size() * unit.element_bytes;
    if (plan.parameters_at == Tier::disk)
      costs.gather_read =
          table->disk()->whole_bytes(u, *table->place_on_disk(u, State::parameters));
  }
  if (!plan.trainable) return costs;
  if (sharded.optimizer && (!sharded.parameters || kept_on_hosts())) costs.publish = gather_sent;

  const auto& form = plan.gradients;
  const int64_t gradient_bytes = bytes(form.sent(true));
  const auto gradient = form.link.counted(form.sent(true));
  if (sharded.optimizer) {
    costs.reduce = link(partition::share_sent(unit.numel * gradient_bytes, ranks), cluster,
                        reduce_scatter_link_bytes(cluster, unit.numel, gradient));
  } else {
    const auto all = cluster_of(group());
    costs.reduce = link(2 * partition::share_sent(unit.numel * gradient_bytes, group().size()), all,
                        all_reduce_link_bytes(all, unit.numel, gradient));
  }
  const auto& replicas = *placement.replicas;
  if (sharded.optimizer && replicas.size() > 1) {
    const auto across = cluster_of(replicas);
    const int64_t numel = layout.slice_numel(u);
    const partition::Wire partial{.bits = 8 * bytes(form.sent_on(true))};
    const partition::Wire whole{.bits = 8 * bytes(form.sum(true))};
    const int64_t sum = link(partition::share_sent(partial.bytes(numel), replicas.size()) +
                                 partition::share_sent(whole.bytes(numel), replicas.size()),
                             across,
                             reduce_scatter_link_bytes(across, numel, partial) +
                                 all_gather_link_bytes(across, numel, whole));
    (form.defers ? costs.reduce_at_end : costs.reduce) += sum;
  }
  costs.reduce_down = bytes_down(plan, sharded.gradients, 1);
  costs.reduce_down_next = bytes_down(plan, sharded.gradients, 2) - costs.reduce_down;
  if (plan.gradients_at == Tier::disk) {
    costs.reduce_write = costs.reduce_read =
        table->disk()->whole_bytes(u, *table->place_on_disk(u, State::gradients));
  }

  const int64_t owned = plan.owned.size();
  if (!owns_some(unit, plan)) return costs;
  const int64_t passes = update->two_passes(u) ? 2 : 1;
  if (table->disk() != nullptr) {
    const auto moved = table->disk()->update_bytes(u);
    costs.update_read = passes * moved.read;
    costs.update_write = passes * moved.written;
  }
  const auto crossing = table->host_bytes(u, passes);
  costs.update_down = crossing.down;
  costs.update_up = crossing.up;
  costs.update = passes * (owned * (bytes(plan.gradient_dtype) + unit.element_bytes) +
                           2 * plan.optimizer_bytes(owned));
  costs.updated_on_host = plan.states_at != Tier::device;
  return costs;
}

TrafficFormula Engine::traffic_formula(bool updated) const {
  const auto& impl = *impl_;
  const auto& table = *impl.table;
  const auto& sharded = impl.placement.sharded;
  const int ranks = impl.placement.shards->size();
  const auto cluster = cluster_of(*impl.placement.shards);
  const auto& replicas = *impl.placement.replicas;
  // Passes of a step, each of which gathers and reduces.
  const int64_t k =
      impl.config.layer_major_accumulation ? 1 : impl.config.gradient_accumulation_steps;
  TrafficFormula sum;
  for (int64_t u = 0; u < impl.layout.unit_count(); ++u) {
    const auto& unit = impl.layout.unit(u);
    const auto& plan = table.plan(u);
    const bool updates = plan.trainable && owns_some(unit, plan) && (updated || impl.timing.undoes);
    const int64_t passes = impl.update->two_passes(u) ? 2 : 1;

    // Disk.
    if (plan.parameters_at == Tier::disk)
      sum.disk_read +=
          2 * k * table.disk()->whole_bytes(u, *table.place_on_disk(u, State::parameters));
    if (plan.trainable && plan.gradients_at == Tier::disk) {
      const int64_t bytes = table.disk()->whole_bytes(u, *table.place_on_disk(u, State::gradients));
      sum.disk_written += k * bytes;
      sum.disk_read += (k - 1) * bytes;
    }
    if (table.disk() != nullptr && updates) {
      const auto bytes = table.disk()->update_bytes(u);
      sum.disk_read += passes * bytes.read;
      sum.disk_written += passes * bytes.written;
    }

    // Host.
    if (plan.comes_up()) sum.host_up += 2 * k * plan.owned.size() * unit.element_bytes;
    if (plan.trainable) sum.host_down += bytes_down(plan, sharded.gradients, k);
    if (updates) {
      const auto bytes = table.host_bytes(u, passes);
      sum.host_down += bytes.down;
      sum.host_up += bytes.up;
    }

    // Ranks, and those of them on other hosts.
    const auto parameter = plan.parameter_link.counted(plan.dtype);
    const int64_t gathered = partition::share_sent(unit.bytes(), ranks);
    const int64_t gathered_across =
        all_gather_link_bytes(cluster, unit.numel, parameter) / cluster.ranks_a_host;
    const bool shows = updated || impl.schedule->beside() || sharded.parameters;
    const int64_t updates_shown = plan.trainable && shows ? 1 : 0;
    const int64_t gathers = sharded.parameters ? 2 * k : updates_shown;
    if (impl.kept_on_hosts()) {  // once to each host, and then read there
      const int64_t inside = partition::share_sent(unit.bytes(), cluster.ranks_a_host);
      sum.all_gather += gathers * inside + updates_shown * (gathered - inside);
      sum.all_gather_link += updates_shown * gathered_across;
    } else if (sharded.optimizer) {
      sum.all_gather += gathers * gathered;
      sum.all_gather_link += gathers * gathered_across;
    }
    if (!plan.trainable) continue;
    const auto& form = plan.gradients;
    if (sharded.optimizer) {
      const int64_t sums = sharded.gradients ? k : 1;
      for (int64_t pass = 0; pass < sums; ++pass) {
        const auto sent = form.sent(pass == 0);
        sum.reduce_scatter += partition::share_sent(unit.numel * bytes(sent), ranks);
        sum.reduce_scatter_link +=
            reduce_scatter_link_bytes(cluster, unit.numel, form.link.counted(sent)) /
            cluster.ranks_a_host;
      }
      if (replicas.size() == 1) continue;
      // A slice's sum over replicas, in two halves.
      const auto across = cluster_of(replicas);
      const int64_t numel = impl.layout.slice_numel(u);
      for (int64_t pass = 0; pass < (form.defers ? 1 : sums); ++pass) {
        const partition::Wire partial{.bits = 8 * bytes(form.sent_on(pass == 0))};
        const partition::Wire whole{.bits = 8 * bytes(form.sum(pass == 0))};
        sum.reduce_scatter += partition::share_sent(partial.bytes(numel), replicas.size());
        sum.all_gather += partition::share_sent(whole.bytes(numel), replicas.size());
        sum.reduce_scatter_link +=
            reduce_scatter_link_bytes(across, numel, partial) / across.ranks_a_host;
        sum.all_gather_link += all_gather_link_bytes(across, numel, whole) / across.ranks_a_host;
      }
    } else {
      const auto all = cluster_of(impl.group());
      const auto sent = form.reduced;
      sum.all_reduce += 2 * partition::share_sent(unit.numel * bytes(sent), impl.group().size());
      sum.all_reduce_link +=
          all_reduce_link_bytes(all, unit.numel, form.link.counted(sent)) / all.ranks_a_host;
    }
  }
  if (!updated) return sum;
  // Between the two passes of an update.
  for (const int64_t bytes : impl.update->passes().gathered_bytes()) {
    sum.all_gather += partition::share_sent(bytes, ranks);
    sum.all_gather_link +=
        all_gather_link_bytes(cluster, bytes, {.bits = 8}) / cluster.ranks_a_host;
  }
  return sum;
}

}  // namespace zero
