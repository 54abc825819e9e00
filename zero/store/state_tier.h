// Where arrays of states lie: one class a tier, which knows nothing of ZeRO.
//
// Arrays come in units: those of a unit have one length, and are numbered. What is memory is used
// where it is; what is not is read into copies, or streams through buffers in blocks (DiskTier).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "zero/store/tier.h"

namespace zero::store {

class StateTier {
 public:
  virtual ~StateTier() = default;
  virtual Tier tier() const = 0;
  /// All elements of an array, (numel) in its dtype: its memory where it has some, else a copy.
  virtual at::Tensor read(int64_t unit, int64_t array) = 0;
  /// Writes `values` (1-D, of any dtype, in memory of tier `from`) from element `begin` on.
  virtual void write(int64_t unit, int64_t array, int64_t begin, const at::Tensor& values,
                     Tier from) = 0;
};

/// Arrays in memory: the device's, or the host's. Their memory is made by who uses them.
class MemoryTier final : public StateTier {
 public:
  /// `tier` is device or host. `link`, which outlives this, carries what crosses between the two.
  MemoryTier(Tier tier, HostLink& link, int64_t units, int64_t arrays);

  Tier tier() const override { return tier_; }
  at::Tensor read(int64_t unit, int64_t array) override { return memory(unit, array); }
  void write(int64_t unit, int64_t array, int64_t begin, const at::Tensor& values,
             Tier from) override;

  /// The memory of an array: undefined until somebody sets it, and while it is not held.
  at::Tensor& memory(int64_t unit, int64_t array) {
    return arrays_[static_cast<size_t>(unit)][static_cast<size_t>(array)];
  }

 private:
  Tier tier_;
  HostLink& link_;
  std::vector<c10::SmallVector<at::Tensor, 5>> arrays_;
};

}  // namespace zero::store
