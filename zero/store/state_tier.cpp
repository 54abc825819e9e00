#include "zero/store/state_tier.h"

namespace zero::store {

MemoryTier::MemoryTier(Tier tier, DeviceCopier& copier, int64_t units, int64_t arrays)
    : tier_(tier),
      copier_(copier),
      arrays_(static_cast<size_t>(units),
              c10::SmallVector<at::Tensor, 5>(static_cast<size_t>(arrays))) {}

void MemoryTier::write(int64_t unit, int64_t array, partition::Range entries,
                       const at::Tensor& values, Tier from) {
  auto place = read(unit, array, entries);
  if (from == tier_) {
    place.copy_(values);
    return;
  }
  const auto converted = values.to(place.scalar_type()).contiguous();
  copier_.copy(place, tier_, converted, from);
}

}  // namespace zero::store
