// The memory of a device: what a rank holds of it, and what would hold less. Where there is no
// device a cap stands for one.
//
// Note [Device memory]
// A build for CPUs has one memory. With a cap a part of it stands for a device's: everything that
// a rank's ledger counts but for the host tier, and LibTorch's tensors. What would exceed the cap
// is refused where it is asked for, with the ledger and the cheapest change of the configuration
// that frees enough; nothing else is changed by the refusal. What the host tier holds lies outside,
// and comes and goes by counted copies (store/tier.h). So a model can be fitted to a device, and
// the traffic of that known, on a machine that has none.
//
// A device with memory of its own refuses what it has no room for itself, by the error of its
// allocator. Then this says the same: what is held, and the cheapest change.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/ledger.h"

namespace zero {

/// A change of configuration that takes bytes off a device.
struct CheaperChoice {
  std::string what;   ///< as "stage 2 with offload_optimizer.device \"cpu\""
  int64_t bytes = 0;  ///< that it frees, about
};

/// In force from construction to destruction, for one ledger; of several, what the ledger counts is
/// put to the last that lives, and tensors to all that include them. Thread-safe.
class DeviceLimit {
 public:
  /// `choices`: the cheapest first; each frees more than the one before.
  /// `allocated`: of a device with memory of its own, the bytes that its allocator has given to
  /// this process. It refuses by itself; nothing is refused here. Empty: `bytes` are a cap.
  DeviceLimit(std::shared_ptr<Ledger> ledger, int64_t bytes, std::vector<CheaperChoice> choices,
              std::function<Usage()> allocated = {});
  ~DeviceLimit();
  DeviceLimit(const DeviceLimit&) = delete;
  DeviceLimit& operator=(const DeviceLimit&) = delete;

  /// From here on LibTorch's tensors count too, of the whole process: all that HostAllocator holds.
  void include_tensors();

  /// Throws OutOfMemory where `request` bytes for `what` do not fit beside what is held. What is
  /// returned is held until the request has been counted.
  [[nodiscard]] std::unique_lock<std::mutex> admit(int64_t request, std::string_view what);

  int64_t bytes() const { return bytes_; }
  /// What counts against the cap now.
  int64_t held() const;
  /// The sentence that names what frees `excess` bytes.
  std::string advice(int64_t excess) const;
  /// The text of an error: no room for `request` bytes of `what`; 0 where they are not known, some
  /// time after the refusal: then the most that was held counts.
  std::string refusal(int64_t request, std::string_view what) const;

 private:
  std::shared_ptr<Ledger> ledger_;
  int64_t bytes_;
  std::vector<CheaperChoice> choices_;
  std::function<Usage()> allocated_;
  std::atomic<bool> tensors_{false};
  std::mutex mutex_;
};

/// While it lives, nothing that this thread allocates is refused: full states on their way to a
/// file, say, which would be the host's. Until it is freed it counts as held all the same.
class HostScope {
 public:
  HostScope();
  ~HostScope();
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;
  /// This thread is in such a scope.
  static bool active();
};

}  // namespace zero
