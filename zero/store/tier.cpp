#include "zero/store/tier.h"

#include <cstddef>
#include <cstring>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/device/memory.h"
#include "zero/device/stream.h"

namespace zero {

void DeviceCopier::copy(void* to, Tier to_tier, const void* from, Tier from_tier, int64_t bytes,
                        StreamMark* done) {
  if (is_asynchronous(device_) && (to_tier == Tier::device || from_tier == Tier::device)) {
    enqueue(to, to_tier, from, from_tier, bytes, done);
  } else {
    // Copies of this many bytes and more are worth a second thread.
    constexpr int64_t kGrain = 1 << 20;
    parallel_for(0, bytes, kGrain, [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                  static_cast<size_t>(end - begin));
    });
  }
  count(to_tier, from_tier, bytes);
}

void DeviceCopier::copy(const at::Tensor& to, Tier to_tier, const at::Tensor& from,
                        Tier from_tier) {
  const auto bytes = static_cast<int64_t>(to.nbytes());
  if (!is_asynchronous(device_)) {
    copy(to.data_ptr(), to_tier, from.const_data_ptr(), from_tier, bytes);
    return;
  }
  to.copy_(from);
  count(to_tier, from_tier, bytes);
}

void DeviceCopier::count(Tier to_tier, Tier from_tier, int64_t bytes) {
  ensure(to_tier != Tier::disk && from_tier != Tier::disk, "a disk has transfers, and no copies");
  if (to_tier != from_tier) (to_tier == Tier::device ? up_ : down_) += bytes;
}

void DeviceCopier::enqueue(void* to, Tier to_tier, const void* from, Tier from_tier, int64_t bytes,
                           StreamMark* done) const {
  const auto bytes_at = [&](void* data, Tier tier) {
    return tensor_at(data, bytes, at::kByte, device_of(tier));
  };
  bytes_at(to, to_tier)
      .copy_(bytes_at(const_cast<void*>(from), from_tier),
             /*non_blocking=*/to_tier == from_tier || done != nullptr);
  if (done != nullptr) done->record(device_);
}

}  // namespace zero
