// Limits the memory that a rank holds of a device, and says what would hold less. Where there is no
// device a cap stands for one.
//
// Note [Device memory]
// A build for CPUs has one memory. With a cap a part of it stands for a device's: all that a rank's
// ledger counts, except the host tier, and LibTorch's tensors. A request that would exceed the cap
// is refused, with the ledger and the cheapest change of the configuration that frees enough; the
// refusal changes nothing else. The host tier lies outside the cap, and its data come and go by
// counted copies (store/tier.h). So a model can be fitted to a device, and its traffic known, on a
// machine that has none.
//
// A device with memory of its own refuses by itself, by the error of its allocator. Then this class
// says the same: what is held, and the cheapest change.
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
  std::string what;   ///< such as "stage 2 with offload_optimizer.device \"cpu\""
  int64_t bytes = 0;  ///< it frees about so many
};

/// A limit of one ledger, in force from construction to destruction. If several limits live, a
/// ledger's bytes count for the last of its own, and tensors for all that include them.
/// Thread-safe.
class DeviceLimit {
 public:
  /// `choices` begin with the cheapest; each frees more than the one before. For a device with
  /// memory of its own `allocated` returns the bytes that its allocator has given to this process;
  /// that refuses by itself, and nothing is refused here. Without `allocated` `bytes` are a cap.
  DeviceLimit(std::shared_ptr<Ledger> ledger, int64_t bytes, std::vector<CheaperChoice> choices,
              std::function<Usage()> allocated = {});
  ~DeviceLimit();
  DeviceLimit(const DeviceLimit&) = delete;
  DeviceLimit& operator=(const DeviceLimit&) = delete;

  /// From here on counts LibTorch's tensors too, of the whole process: all that HostAllocator
  /// holds.
  void include_tensors();

  /// Throws OutOfMemory if `request` bytes for `what` do not fit beside what is held. The caller
  /// holds the returned lock until it has counted the request.
  [[nodiscard]] std::unique_lock<std::mutex> admit(int64_t request, std::string_view what);

  int64_t bytes() const { return bytes_; }
  /// Returns the bytes that count against the cap now.
  int64_t held() const;
  /// Returns the sentence that names what frees `excess` bytes.
  std::string advice(int64_t excess) const;
  /// Returns the text of an error: no room for `request` bytes of `what`. A `request` of 0 is an
  /// unknown one, some time after its refusal: then the most that was held counts.
  std::string refusal(int64_t request, std::string_view what) const;

 private:
  std::shared_ptr<Ledger> ledger_;
  int64_t bytes_;
  std::vector<CheaperChoice> choices_;
  std::function<Usage()> allocated_;
  std::atomic<bool> tensors_{false};
  std::mutex mutex_;
};

/// While a scope lives, nothing that this thread allocates is refused: for example full states on
/// their way to a file, which would lie in the host's memory. Until it is freed it still counts as
/// held.
class HostScope {
 public:
  HostScope();
  ~HostScope();
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;
  /// Returns true if this thread is in such a scope.
  static bool active();
};

}  // namespace zero
