// The devices as one machine: streams, memory and checker under one mutex. For the files that teach
// LibTorch about it; tests use device.h.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/device/checker.h"
#include "tests/device/memory.h"
#include "tests/device/streams.h"

namespace zero::simulated {

/// The device of this thread, whose host it is.
int current_device();
/// Returns the one before. A thread that goes over to another device takes what it knows along,
/// unless it has done nothing yet.
int exchange_current_device(int device);
/// While it lives this thread acts in the name of another one, the host of a device: it takes
/// nothing along.
class HostScope {
 public:
  explicit HostScope(int device);
  ~HostScope();
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;

 private:
  int before_;
};
/// The stream on which this thread enqueues the work of a device.
Actor current_actor(int device);
/// Returns the one before, of the same device.
Actor exchange_current_actor(Actor stream);

class Machine {
 public:
  /// The one machine. It is never destroyed: tensors may outlive static destructors.
  static Machine& instance();

  void configure(const Options& options);

  void launch(Actor stream, const std::string& name, const std::vector<Range>& ranges,
              std::function<void()> body);
  void host_access(const std::string& name, const Range& range);
  /// See Checker::forget.
  void forget(const void* data, size_t bytes);
  void hosts_met();
  /// A thread stops to be the one host and becomes the other.
  void change_host(int from, int to);

  Mark record(Actor stream);
  /// Work enqueued on the stream from now on comes after the mark. A wait of the machine's own,
  /// which is not numbered.
  void order(Actor stream, const Mark& after);
  /// The same for an event of the program's: numbered, and left out where Options says so.
  void wait(Actor stream, const Mark& mark);
  /// Returns whether it is reached; if so, the host knows from then on.
  bool query(const Mark& mark);
  bool idle(Actor stream);
  /// `cause` is for the counts. Throws what a task threw.
  void host_wait(const Mark& mark, const std::string& cause, bool numbered);
  void host_wait_for_stream(Actor stream, const std::string& cause, bool numbered);
  void host_wait_for_device(int device, const std::string& cause);
  void host_wait_for_all();

  void* allocate(size_t bytes, Actor stream);
  void release(void* pointer);
  void record_stream(const void* pointer, Actor stream);
  bool owns(const void* pointer) const { return memory_.owns(pointer); }
  int device_of_pointer(const void* pointer);
  Memory::Usage usage(int device);
  void reset_peak(int device);
  void empty_cache();
  size_t memory_limit();

  void* allocate_pinned(size_t bytes);
  void release_pinned(void* pointer);
  bool pinned(const void* pointer);

  void count_operator();
  void count_shadow_run();
  Counts counts();
  std::string describe_wait(int host, int64_t number);
  std::string place_of_wait(int host, int64_t number);
  std::vector<std::string> take_reports();

 private:
  struct Released {
    Memory::Block block;
    std::vector<Mark> uses;  // of other streams; free when all are reached
  };
  struct Wait {
    std::string text;
    std::vector<void*> calls;  // under way when it was asked for
  };
  Machine() = default;
  Wait wait_number(int host, int64_t number);
  Clock& clock(Actor actor) { return clocks_[static_cast<size_t>(actor)]; }
  Clock& own_host();
  Mark mark(Actor stream);
  bool reached(const Mark& mark) const;
  void join_and_wait(Actor stream, const Mark& mark);
  void enqueue(Actor stream, Task task, const std::vector<Range>& ranges);
  void wait_for(Streams::Lock& lock, const Mark& mark, const std::string& cause);
  bool left_out(int64_t& number, int64_t Options::*which);
  void throw_failure();
  void learn(Clock& host, const Clock& what);
  void reuse_released();
  void release_on_stream(const Memory::Block& block);

  Streams streams_;
  Memory memory_;
  Checker checker_{memory_};
  Options options_;
  std::array<Clock, kActors> clocks_{};
  std::vector<Released> released_;
  std::map<uintptr_t, size_t> pinned_;
  Counts counts_;
  std::array<std::vector<Wait>, kDevices> waits_;  // by host, what they were
};

}  // namespace zero::simulated
