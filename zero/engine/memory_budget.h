// A budget: one number, the bytes that a rank may hold, decides how many units stay gathered.
//
// Note [Memory budget]
// States are known before anything is allocated: a budget that they exceed is refused at once, and
// the error has the bytes that other stages would take. The bytes of activations, buckets and
// staging are known after the first step, so that step keeps as few units gathered as it can.
// Gathered units get the memory that the budget leaves then, and the pager plans the further steps
// with it. Ranks gather together, so all of them use the least that any rank has left. Where units
// are read in place (ranks of one host) there is nothing to gather, and the budget is only checked.
// A device with memory of its own has that memory as its budget, or as much of it as the
// configuration's budget says: what LibTorch's allocator there has given out then counts, and the
// host's memory does not.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/engine/engine_plan.h"

namespace zero {

class Flows;

class MemoryBudget {
 public:
  /// The cap of the device is in force from here on; the cap of a device with memory of its own is
  /// that memory. Throws OutOfMemory, on all ranks together, if the states alone exceed the budget,
  /// the cap, or the host's free memory for a rank plus the memory that the model holds now. `plan`
  /// outlives this.
  explicit MemoryBudget(const EnginePlan& plan);

  /// Returns the bytes of as many parameters; saturates.
  int64_t bytes_of(int64_t elements) const;
  /// Returns the bytes of units that may stay gathered until `spend`.
  int64_t live_bytes() const { return spends() ? 0 : bytes_of(plan_.config().max_live_parameters); }
  /// The cap of a device that the CPU plays counts LibTorch's tensors from here on. Collective.
  void include_tensors();
  /// Gives the memory that is left after the first update to gathered units. Further calls do
  /// nothing. Collective.
  void spend(const Flows& flows);
  OutOfMemory explained(const c10::OutOfMemoryError& error) const;

 private:
  partition::StateMemory states_in_memory(partition::Sharding sharded) const;
  bool spends() const;
  void check_host(const partition::StateMemory& states) const;
  void limit_device();
  void spend_device(const Flows& flows) const;
  partition::StateMemory states_in_budget(partition::Sharding sharded) const;
  void leave_for_gathers(const Flows& flows, int64_t bytes) const;

  const EnginePlan& plan_;
  std::unique_ptr<DeviceLimit> limit_;  // null if nothing is known of a device
  bool spent_ = false;
};

}  // namespace zero
