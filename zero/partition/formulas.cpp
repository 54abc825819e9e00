#include "zero/partition/formulas.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "zero/base/error.h"

namespace zero::partition {

Sharding sharding_of_stage(int stage) {
  if (stage < 0 || stage > 3) {
    throw ConfigError(
        fmt::format("zero_optimization.stage is {}; it must be 0, 1, 2 or 3.", stage));
  }
  return {.parameters = stage >= 3, .gradients = stage >= 2, .optimizer = stage >= 1};
}

Range owned_range(const Layout& layout, int64_t unit, Sharding sharding, int rank) {
  if (sharding.optimizer) return layout.slice(unit, rank);
  return {0, layout.unit(unit).numel};
}

StateMemory state_memory(Sharding sharding, double parameters, double world_size,
                         StateBytes bytes) {
  const auto held = [&](bool sharded, int64_t width) {
    return static_cast<double>(width) * parameters / (sharded ? world_size : 1);
  };
  return {held(sharding.parameters, bytes.parameter), held(sharding.gradients, bytes.gradient),
          held(sharding.optimizer, bytes.optimizer) +
              held(sharding.optimizer, bytes.scales) / kAlignment};
}

LayoutMemory unit_memory(const Layout& layout, int64_t unit, Sharding sharding, StateBytes bytes) {
  const auto& u = layout.unit(unit);
  const auto held = [&](bool sharded, int64_t width) {
    return width * (sharded ? layout.slice_numel(unit) : u.numel);
  };
  LayoutMemory memory{held(sharding.parameters, bytes.parameter),
                      held(sharding.gradients, bytes.gradient),
                      held(sharding.optimizer, bytes.optimizer) +
                          held(sharding.optimizer, bytes.scales) / kAlignment,
                      0};
  // A slice's share of the content is not the same whole number on every rank. So padding is
  // counted against content / N, rounded down.
  const auto content = [&](bool sharded, int64_t width) {
    return width * u.content / (sharded ? layout.world_size() : 1);
  };
  memory.padding =
      memory.total() - content(sharding.parameters, bytes.parameter) -
      content(sharding.gradients, bytes.gradient) -
      content(sharding.optimizer, bytes.optimizer * kAlignment + bytes.scales) / kAlignment;
  return memory;
}

double largest_model(Sharding sharding, double device_bytes, double world_size,
                     double model_parallel, StateBytes bytes) {
  return device_bytes / state_memory(sharding, 1, world_size, bytes).total() * model_parallel;
}

StepTraffic step_traffic(Sharding sharding, double parameters, double world_size,
                         int64_t micro_batches) {
  const double once = parameters * (world_size - 1) / world_size;
  const auto k = static_cast<double>(micro_batches);
  return {.reduce = once * (sharding.gradients ? k : 1),
          .gather = once * (sharding.parameters ? 2 * k : 1)};
}

int64_t share_sent(int64_t bytes, int64_t world_size) {
  return bytes / world_size * (world_size - 1);
}

int64_t Wire::bytes(int64_t numel) const {
  const auto part = [&](int64_t elements) { return (numel + elements - 1) / elements; };
  // A message has a base for each 128 elements, a code of 4 bits for each element, the other bits
  // of each element, and room for every 64th exponent.
  if (packed) return part(128) + part(2) + numel * (bits - 8) / 8 + part(64);
  constexpr int64_t kScaleBytes = 4;
  const int64_t scales = block == 0 ? 0 : (numel + block - 1) / block * kScaleBytes;
  return scales + (numel * bits + 7) / 8;
}

namespace {

/// Returns the bytes of messages of `slice` elements from every rank of a host to each other host.
int64_t slices_to_other_hosts(const Cluster& cluster, int64_t slice, const Wire& wire) {
  return cluster.ranks_a_host * (cluster.hosts - 1) * wire.bytes(slice);
}

}  // namespace

Wire partial_wire(const Cluster& cluster, const Wire& elements) {
  const bool rounded = elements.block == 0 && elements.bits < kWireFp32.bits;
  if (!rounded || cluster.ranks_a_host == 1) return elements;
  return {.bits = kWireFp32.bits, .packed = elements.packed};
}

int64_t all_gather_link_bytes(const Cluster& cluster, int64_t numel, const Wire& wire) {
  return slices_to_other_hosts(cluster, numel / cluster.ranks(), wire);
}

int64_t reduce_scatter_link_bytes(const Cluster& cluster, int64_t numel, const Wire& elements) {
  return all_gather_link_bytes(cluster, numel, partial_wire(cluster, elements));
}

int64_t all_reduce_link_bytes(const Cluster& cluster, int64_t numel, const Wire& elements) {
  return reduce_scatter_link_bytes(cluster, numel, elements) +
         all_gather_link_bytes(cluster, numel, elements);
}

int64_t all_to_all_link_bytes(const Cluster& cluster, int64_t numel, const Wire& wire) {
  return slices_to_other_hosts(cluster, numel / cluster.hosts, wire);
}

int64_t broadcast_link_bytes(const Cluster& cluster, int64_t numel, const Wire& wire) {
  return cluster.hosts > 1 ? wire.bytes(numel) : 0;
}

LinkTraffic link_traffic(const Cluster& cluster, int64_t numel, const LinkPlan& plan) {
  const auto& sharded = plan.sharding;
  const bool every_micro_batch = (sharded.gradients || plan.hybrid) && !plan.deferred;
  const int64_t sums = every_micro_batch ? plan.micro_batches : 1;
  LinkTraffic traffic;
  traffic.reduce = sums * reduce_scatter_link_bytes(cluster, numel, plan.gradients);
  if (plan.hybrid || !sharded.optimizer) {
    traffic.gather = sums * all_gather_link_bytes(cluster, numel, plan.gradients);
  } else {
    const int64_t gathers = sharded.parameters && !plan.kept ? 2 * plan.micro_batches : 1;
    traffic.gather = gathers * all_gather_link_bytes(cluster, numel, plan.parameters);
  }
  return traffic;
}

OffloadTraffic offload_traffic(double parameters, int64_t micro_batches, bool accumulated_on_device,
                               StateBytes bytes) {
  const auto times = static_cast<double>(accumulated_on_device ? 1 : micro_batches);
  return {.down = static_cast<double>(bytes.gradient) * parameters * times,
          .up = static_cast<double>(bytes.parameter) * parameters};
}

double adam_bytes(double parameters, StateBytes bytes) {
  return static_cast<double>(2 * bytes.optimizer + bytes.gradient + bytes.parameter) * parameters;
}

double delayed_update_speedup(double compute, double update) {
  return (compute + update) / std::max(compute, update);
}

double transformer_parameters(const Transformer& model) {
  return 12 * model.layers * model.hidden * model.hidden;
}

double transformer_state_bytes(const Transformer& model) {
  constexpr StateBytes kWithFp32Gradient{.parameter = 2, .gradient = 2 + 4, .optimizer = 12};
  return state_memory({}, transformer_parameters(model), 1, kWithFp32Gradient).total();
}

double activation_checkpoint_bytes(const Transformer& model) {
  return 2 * model.batch * model.sequence * model.hidden * model.layers / model.checkpoint_interval;
}

double activation_working_bytes(const Transformer& model) {
  return model.batch * model.sequence * model.checkpoint_interval *
         (16 * model.hidden + 2 * model.heads * model.sequence);
}

double state_working_bytes(double hidden, double tiles) { return 16 * hidden * hidden / tiles; }

double largest_tensor_bytes(double hidden, double tiles) { return 8 * hidden * hidden / tiles; }

double largest_hidden(double chunk_bytes, double tiles) {
  return std::sqrt(chunk_bytes * tiles / 8);
}

double efficiency(double intensity, double bandwidth, double peak) {
  return intensity * bandwidth / (intensity * bandwidth + peak);
}

double bandwidth_needed(double efficiency, double intensity, double peak) {
  return efficiency / (1 - efficiency) * peak / intensity;
}

double parameter_intensity(const Transformer& model) { return model.sequence * model.batch; }

double optimizer_intensity(const Transformer& model) { return model.sequence * model.batch / 4; }

double checkpoint_intensity(const Transformer& model) {
  return 24 * model.hidden * model.checkpoint_interval;
}

}  // namespace zero::partition
