// The memory ledger: bytes by category, current and peak, one per rank.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

/// The purposes for which bytes are held. The first three are the model states of the formula
/// (ZeRO, 1910.02054, section 3).
enum class Category : uint8_t {
  parameters,      ///< parameter storage: replicated, or this rank's shards
  gradients,       ///< gradient storage that outlives the backward pass: replicated, or this rank's
                   ///< shards
  optimizer,       ///< master weights and moments
  gathered_units,  ///< stage 3: full units, present for the operators that use them
  gradient_buckets,  ///< full units of gradients on their way to being reduced
  communication,     ///< staging buffers of the collectives
  offload_buffers,   ///< blocks of states on their way from and to a disk
  host_parameters,   ///< the host tier: this rank's shards of parameters
  host_gradients,    ///< the host tier: reduced gradients
  host_optimizer,    ///< the host tier: master weights and moments
  host_buffers,      ///< the host tier: staging, and second copies for an update beside a step
  activations,       ///< the rest, of the process: 0 in a ledger; HostAllocator::usage counts it
};
inline constexpr size_t kCategories = 12;

/// Returns the category's name as logs and tables print it: "parameters", ...
std::string_view name(Category category);

/// Returns true if the category belongs to the host tier: beside a device, it would lie in the
/// host's memory.
constexpr bool on_host(Category category) {
  return category >= Category::host_parameters && category <= Category::host_buffers;
}

class DeviceLimit;

/// The bytes held now, and the most that were held at once since the last `reset_peaks`.
struct Usage {
  int64_t current = 0;
  int64_t peak = 0;
};

/// Counts bytes by category. Thread-safe; every rank (and every Engine, if a rank has several) has
/// its own.
class Ledger {
 public:
  /// Throws OutOfMemory, and counts nothing, if a DeviceLimit refuses the bytes.
  void add(Category category, int64_t bytes);
  void remove(Category category, int64_t bytes);
  Usage usage(Category category) const;
  /// Returns the usage of all categories together; its peak is the peak of the sum, not the sum of
  /// the peaks.
  Usage total() const;
  /// Returns the usage without the host tier, which is what a device would hold.
  Usage device() const;
  /// Returns the bytes that are now on a device with memory of its own. The staging of collectives
  /// does not count, since it lies in the host's memory there.
  int64_t own_memory() const;
  /// Sets each peak to the current value.
  void reset_peaks();
  /// Returns a text that says why `request` more bytes for `what` do not fit on the device, with
  /// the table and the advice of the DeviceLimit in force; "" without one.
  std::string refusal(int64_t request, std::string_view what);

 private:
  friend class DeviceLimit;
  struct Counter {
    std::atomic<int64_t> current{0};
    std::atomic<int64_t> peak{0};
    void add(int64_t bytes);
  };
  void count(Category category, int64_t bytes);
  void add_limit(DeviceLimit* limit);
  void remove_limit(DeviceLimit* limit);
  std::array<Counter, kCategories> counters_;
  Counter total_;
  Counter device_;
  std::mutex limits_mutex_;  // guards `limits_`; taken before a limit's own mutex
  std::vector<DeviceLimit*> limits_;
  std::atomic<size_t> limit_count_{0};
};

/// Charges bytes to a ledger for as long as this object lives. Move-only; keeps the ledger alive.
class Charge {
 public:
  Charge() = default;
  Charge(std::shared_ptr<Ledger> ledger, Category category, int64_t bytes);
  Charge(Charge&& other) noexcept;
  Charge& operator=(Charge&& other) noexcept;
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  ~Charge();
  int64_t bytes() const { return bytes_; }

 private:
  void release();
  std::shared_ptr<Ledger> ledger_;
  Category category_{};
  int64_t bytes_ = 0;
};

}  // namespace zero
