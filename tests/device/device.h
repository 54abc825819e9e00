// A simulated asynchronous accelerator behind LibTorch's PrivateUse1 key, for tests of schedules on
// machines without one. docs/simulated-device.md says how to use it. It takes over PrivateUse1 as
// soon as it is loaded, so only test programs may be linked to it.
//
// Note [Two addresses]
// A device pointer lies in a range that is never accessible, so whatever the host does with it
// faults at once. The bytes are in a second range, at a constant distance; only tasks on streams
// compute that address (`backing`). No page is ever made accessible for a moment, so no wrong
// access slips through, and threads need not agree.
//
// Note [A launch captures addresses]
// An operator captures raw addresses when it is enqueued and runs the CPU's kernel on them later,
// as a kernel of a GPU does. The task owns no device memory: what is freed, reused or swapped too
// early is really read or overwritten.
//
// Note [Happens before]
// Vector clocks, one component for each stream and for the host of each device, advance when work
// is enqueued: a launch joins the clock of its host, an event carries a stream's, a wait of the
// host joins into the host's. Every access to a range of bytes is compared with the unordered ones
// before it. So a missing wait is reported whatever order the tasks happened to run in.
//
// Note [Hosts]
// What one rank waits for must not count as known to another. So there is a host for each device:
// a thread is the host of its current device, and a thread that changes its device takes along what
// it knows. Ranks that are threads have a device each and keep it. That hosts have met (a barrier
// of the ranks) is declared: `hosts_met`.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace zero::simulated {

inline constexpr int kDevices = 4;
inline constexpr int kStreams = 8;  ///< of a device; stream 0 is the default one

enum class Executor {
  threads,  ///< a thread for each stream
  seeded,   ///< no threads: tasks run when the host waits, in an order that the seed alone decides
};

struct Options {
  Executor executor = Executor::threads;
  uint64_t seed = 0;
  /// Up to so long a task sleeps before it runs; of threads only.
  std::chrono::microseconds delay{0};
  /// Fills memory that is new with NaNs, and memory that is freed too, by a task on its stream.
  bool poison = true;
  bool check = true;
  /// Bytes of a device's memory; an allocation beyond throws c10::OutOfMemoryError.
  size_t memory_bytes = size_t{1} << 31U;
  /// The wait of a stream for an event that does not happen, of those that the host of the device
  /// `left_out_host` enqueues, counted from 0 since `configure`.
  int64_t left_out_wait = -1;
  /// The same of this host's own waits for a stream or an event (not of those inside operators).
  int64_t left_out_host_wait = -1;
  int left_out_host = 0;
  /// Keeps where in the program each wait of a stream was asked for, for `place_of_wait`.
  bool places = false;
};

/// Waits until the devices are idle, forgets reports and counts, and begins anew.
void configure(const Options& options);

/// The device `index`, below kDevices.
c10::Device device(int index = 0);
/// The stream `id`, below kStreams, of a device.
c10::Stream stream(int id, int index = 0);
/// The stream on which this thread enqueues the operators of a device.
c10::Stream current_stream(int index = 0);

/// Waits for all work of all devices; afterwards every host knows that it is done.
void synchronize();
/// Declares that the hosts of all devices have met: what one of them has waited for, all know.
void hosts_met();

/// Bytes of device memory, or of host memory that asynchronous copies use: all of them, or
/// `row_bytes` at the beginning of each `row_stride`.
struct Range {
  const void* data;
  size_t bytes;  ///< from the first to the last
  bool write;
  size_t row_bytes = 0, row_stride = 0;  ///< 0: all
};

/// Enqueues a kernel on the current stream of the current device. `body` runs later, on any thread,
/// and reads and writes the `backing` of the ranges and nothing else. What it throws leaves the
/// next wait of a host.
void launch(const char* name, const std::vector<Range>& ranges, std::function<void()> body);
/// Returns the address at which tasks find the bytes of a device pointer; a host pointer is its
/// own.
void* backing(const void* pointer);
template <class T>
T* backing(T* pointer) {
  return static_cast<T*>(backing(static_cast<const void*>(pointer)));
}

/// The host reads or writes, now, memory that asynchronous copies use too. `what` is for reports.
void host_access(const char* what, const Range& range);

/// Raw memory of the current stream of the current device; throws c10::OutOfMemoryError.
void* allocate(size_t bytes);
void release(void* pointer);

/// Returns the checker's findings since `configure` or the last call, one text for each pair of
/// operations; docs/simulated-device.md explains them.
std::vector<std::string> take_reports();

struct Counts {
  int64_t operators = 0;    ///< that the dispatcher brought
  int64_t tasks = 0;        ///< enqueued, kernels and copies
  int64_t shadow_runs = 0;  ///< Note [Shadow runs] in effects.h
  int64_t accesses = 0;     ///< compared by the checker
  int64_t waits = 0;        ///< of a stream for an event, not those of `Collectives` and copies
  int64_t host_waits = 0;   ///< of a host for device work, those inside operators too
  /// The same, by what waited: "stream", "event", "device", "copy to the host", an operator's name.
  std::map<std::string, int64_t> host_waits_by_cause;
  /// The waits of streams that a host enqueued, by host; and those of its own that Options can
  /// leave out.
  std::array<int64_t, kDevices> waits_by_host{}, own_waits_by_host{};
};
/// Returns the counts since `configure`.
Counts counts();
/// The wait of a stream with that number waited for this, among those that a host enqueued since
/// `configure`; for failures of tests.
std::string describe_wait(int host, int64_t number);
/// The place in the program that asked for it, if Options say that places are kept.
std::string place_of_wait(int host, int64_t number);

}  // namespace zero::simulated
