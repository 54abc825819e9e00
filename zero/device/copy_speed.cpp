#include "zero/device/copy_speed.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "zero/device/memory.h"
#include "zero/device/stream.h"

namespace zero {

CopySpeed best_copy_speed(c10::Device device) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kBytes = int64_t{64} << 20;
  constexpr int kRounds = 4;  // the first touches the memory
  const int at_once = is_asynchronous(device) ? 4 : 1;
  const auto ledger = std::make_shared<Ledger>();
  const auto host = pinned_zeros(kBytes, at::kByte, device, ledger, Category::host_buffers);
  const auto there = device_zeros(kBytes, at::kByte, device, ledger, Category::offload_buffers);
  const auto best = [&](const at::Tensor& to, const at::Tensor& from) {
    double most = 0;
    for (int round = 0; round < kRounds; ++round) {
      wait_for_device(device);
      const auto begin = Clock::now();
      for (int i = 0; i < at_once; ++i) to.copy_(from, /*non_blocking=*/true);
      wait_for_device(device);
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      most = std::max(most, at_once * static_cast<double>(kBytes) / seconds);
    }
    return most;
  };
  CopySpeed speed;
  speed.down = best(host, there);
  speed.up = best(there, host);
  return speed;
}

}  // namespace zero
