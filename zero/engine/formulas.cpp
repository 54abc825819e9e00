// The costs of this engine by formula: it calls the functions of costs.h with its own numbers.
#include "zero/engine/engine_impl.h"

namespace zero {

PlannedStep Engine::Impl::planned() const {
  auto step = planned_step(layout, plans, model.shape(), config, placement.planned().grid);
  step.in_place = gather && gather->in_place();
  return step;
}

partition::LayoutMemory Engine::memory_formula() const {
  return state_memory(impl_->planned(), Tier::device);
}

partition::LayoutMemory Engine::host_memory_formula() const {
  return state_memory(impl_->planned(), Tier::host);
}

HostTraffic Engine::host_traffic() const { return impl_->link.counts(); }

DiskUse Engine::disk() const {
  const auto* disk = impl_->table->disk();
  if (disk == nullptr) return {};
  const auto counts = disk->file().counts();
  return {disk->bytes(), counts.read, counts.written, disk->wait_ms()};
}

TrafficFormula Engine::traffic_formula(bool updated) const {
  return step_traffic(impl_->planned(), updated);
}

}  // namespace zero
