#include "zero/partition/formulas.h"

#include <fmt/format.h>

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
    return width * u.content / (sharded ? layout.shards() : 1);
  };
  memory.padding =
      memory.total() - content(sharding.parameters, bytes.parameter) -
      content(sharding.gradients, bytes.gradient) -
      content(sharding.optimizer, bytes.optimizer * kAlignment + bytes.scales) / kAlignment;
  return memory;
}

double largest_model(Sharding sharding, double device_bytes, double world_size,
                     double model_parallel) {
  return device_bytes / state_memory(sharding, 1, world_size).total() * model_parallel;
}

int64_t share_sent(int64_t bytes, int64_t world_size) {
  return bytes / world_size * (world_size - 1);
}

}  // namespace zero::partition
