#include "zero/store/tier.h"

#include <cstddef>
#include <cstring>

#include "zero/base/parallel.h"

namespace zero {

void HostLink::copy(void* to, Tier to_tier, const void* from, Tier from_tier, int64_t bytes) {
  // From here on a second thread is worth its start.
  constexpr int64_t kGrain = 1 << 20;
  parallel_for(0, bytes, kGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                static_cast<size_t>(end - begin));
  });
  if (to_tier == from_tier) return;
  (to_tier == Tier::host ? down_ : up_) += bytes;
}

}  // namespace zero
