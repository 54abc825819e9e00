// Limits the memory that a rank holds on a device, and says which configuration would need less.
// Without a device, a cap stands for one.
//
// Note [Device memory]
// A build for CPUs has one memory. With a cap, a part of it stands for a device's memory:
// everything that a rank's ledger counts, except the host tier, and LibTorch's tensors. A request
// that would exceed the cap is refused. The error shows the ledger and the cheapest change of the
// configuration that frees enough; the refusal changes nothing else. The host tier lies outside the
// cap, and its data come and go by counted copies (store/tier.h). So a machine without a device can
// fit a model to one, and measure its traffic.
//
// A device with memory of its own refuses requests itself, by its allocator's error. Then this
// class adds the same information: the memory that is held, and the cheapest change.
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
  int64_t bytes = 0;  ///< about the bytes that it frees
};

/// A limit of one ledger, in force from construction to destruction. If several limits live, bytes
/// of a ledger count for the latest limit of that ledger, and tensors count for all limits that
/// include them. Thread-safe.
class DeviceLimit {
 public:
  /// `choices` begin with the cheapest; each frees more than the one before. Without `allocated`,
  /// `bytes` is a cap. For a device with memory of its own, `allocated` returns the bytes that its
  /// allocator has given to this process; the allocator refuses requests itself, and this class
  /// refuses none.
  DeviceLimit(std::shared_ptr<Ledger> ledger, int64_t bytes, std::vector<CheaperChoice> choices,
              std::function<Usage()> allocated = {});
  ~DeviceLimit();
  DeviceLimit(const DeviceLimit&) = delete;
  DeviceLimit& operator=(const DeviceLimit&) = delete;

  /// From now on the limit also counts LibTorch's tensors of the whole process: all memory of
  /// HostAllocator.
  void include_tensors();

  /// Throws OutOfMemory if `request` bytes for `what` do not fit beside the bytes that are held.
  /// The caller must hold the returned lock until it has counted the request.
  [[nodiscard]] std::unique_lock<std::mutex> admit(int64_t request, std::string_view what);

  int64_t bytes() const { return bytes_; }
  /// Returns the bytes that count against the cap now.
  int64_t held() const;
  /// Returns a sentence that names a change of configuration which frees `excess` bytes.
  std::string advice(int64_t excess) const;
  /// Returns the text of an error: there is no room for `request` bytes of `what`. A `request` of 0
  /// means that the bytes are unknown and were refused some time ago: then the peak of the held
  /// bytes counts.
  std::string refusal(int64_t request, std::string_view what) const;

 private:
  std::shared_ptr<Ledger> ledger_;
  int64_t bytes_;
  std::vector<CheaperChoice> choices_;
  std::function<Usage()> allocated_;
  std::atomic<bool> tensors_{false};
  std::mutex mutex_;
};

/// While a scope lives, nothing that this thread allocates is refused. It serves memory that would
/// lie on the host beside a real device, for example full states on their way to a file. That
/// memory still counts as held until it is freed.
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
