#include "zero/comm/copy_kernels.h"
#include "zero/base/streaming.h"

#include <cstdint>
#include <cstring>

#include <hwy/cache_control.h>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/comm/copy_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace zero::comm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// `to` is aligned for vectors. Returns how many bytes were copied.
int64_t StreamBytes(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + 4 * lanes <= bytes; i += 4 * lanes) {
    const auto a = hn::LoadU(d, from + i);
    const auto b = hn::LoadU(d, from + i + lanes);
    const auto c = hn::LoadU(d, from + i + 2 * lanes);
    const auto e = hn::LoadU(d, from + i + 3 * lanes);
    hn::Stream(a, d, to + i);
    hn::Stream(b, d, to + i + lanes);
    hn::Stream(c, d, to + i + 2 * lanes);
    hn::Stream(e, d, to + i + 3 * lanes);
  }
  hwy::FlushStream();
  return i;
}

}  // namespace zero::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::comm {
namespace {
HWY_EXPORT(StreamBytes);
}  // namespace

void copy_bytes(void* to, const void* from, int64_t bytes) {
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  int64_t done = 0;
  if (bytes >= kStreamedBytes) {
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % 64);
    done = misaligned == 0 ? 0 : 64 - misaligned;
    std::memcpy(out, in, static_cast<size_t>(done));
    done += HWY_DYNAMIC_DISPATCH(StreamBytes)(out + done, in + done, bytes - done);
  }
  if (done < bytes) std::memcpy(out + done, in + done, static_cast<size_t>(bytes - done));
}

}  // namespace zero::comm
#endif  // HWY_ONCE
