// The tiers that arrays of states lie on: there is one class for each tier, which knows nothing of
// ZeRO.
//
// Arrays come in units and are numbered within their unit. Code that finds an array in memory uses
// it in place. An array on a disk is read into copies, or streams through buffers in blocks
// (DiskTier).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "zero/partition/layout.h"
#include "zero/store/tier.h"

namespace zero::store {

class StateTier {
 public:
  virtual ~StateTier() = default;
  virtual Tier tier() const = 0;
  /// Returns entries [begin, end) of an array as a 1-D tensor of its dtype: a view of its memory
  /// where it has memory, else a copy on the CPU.
  virtual at::Tensor read(int64_t unit, int64_t array, partition::Range entries) = 0;
  /// Writes `values` to entries [begin, end) of an array. `values` is 1-D, has any dtype and one
  /// value for each entry, and lies in memory of tier `from`.
  virtual void write(int64_t unit, int64_t array, partition::Range entries,
                     const at::Tensor& values, Tier from) = 0;
};

/// Holds arrays in the memory of the device or of the host. The user of an array makes its memory.
class MemoryTier final : public StateTier {
 public:
  /// `tier` is device or host. `copier` carries bytes between the two, and must outlive this.
  MemoryTier(Tier tier, DeviceCopier& copier, int64_t units, int64_t arrays);

  Tier tier() const override { return tier_; }
  at::Tensor read(int64_t unit, int64_t array, partition::Range entries) override {
    return memory(unit, array).narrow(0, entries.begin, entries.size());
  }
  void write(int64_t unit, int64_t array, partition::Range entries, const at::Tensor& values,
             Tier from) override;

  /// Returns the memory of an array. It is undefined until somebody sets it, and while nobody holds
  /// it.
  at::Tensor& memory(int64_t unit, int64_t array) {
    return arrays_[static_cast<size_t>(unit)][static_cast<size_t>(array)];
  }

 private:
  Tier tier_;
  DeviceCopier& copier_;
  std::vector<c10::SmallVector<at::Tensor, 5>> arrays_;
};

}  // namespace zero::store
