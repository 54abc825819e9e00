// The queues of the streams and the two executors that run them.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "tests/device/clock.h"

namespace zero::simulated {

struct Task {
  std::string name;
  std::function<void()> body;  ///< null: only waits
  Actor after_stream = -1;     ///< runs when that stream has done its task `after_task`
  uint64_t after_task = 0;
};

/// Tasks of a stream run in order; those of several streams in any order that their waits allow.
/// Its mutex is the machine's: every call is made with it held. Never destroyed, since its threads
/// go on for ever.
class Streams {
 public:
  using Lock = std::unique_lock<std::mutex>;
  Lock lock() { return Lock(mutex_); }

  /// When nothing is enqueued.
  void configure(Executor executor, uint64_t seed, std::chrono::microseconds delay);
  /// Returns the task's number in its stream, from 1 on.
  uint64_t enqueue(Actor stream, Task task);
  /// The number of the last task that was enqueued.
  uint64_t last(Actor stream) const { return queue(stream).issued; }
  bool done(Actor stream, uint64_t task) const { return queue(stream).done >= task; }
  /// The host waits. With the seeded executor it runs tasks meanwhile.
  void wait(Lock& lock, Actor stream, uint64_t task);
  /// The message of the first task that threw since the last call, or nothing.
  std::string take_failure() { return std::exchange(failure_, {}); }

 private:
  struct Queue {
    std::deque<Task> tasks;
    uint64_t issued = 0, done = 0;
    bool busy = false;
    unsigned priority = 0;  // of the seeded executor
    std::condition_variable ready;
    std::thread thread;
  };
  Queue& queue(Actor stream) { return queues_[static_cast<size_t>(stream)]; }
  const Queue& queue(Actor stream) const { return queues_[static_cast<size_t>(stream)]; }
  bool ready(const Queue& queue) const;
  void work(Queue& queue);
  bool run_one(Lock& lock);
  void execute(Lock& lock, Queue& queue, std::chrono::microseconds delay);

  std::mutex mutex_;
  std::condition_variable changed_;  // for hosts that wait
  std::array<Queue, kAllStreams> queues_;
  Executor executor_ = Executor::threads;
  std::chrono::microseconds delay_{0};
  std::mt19937_64 random_{0};
  std::string failure_;
};

}  // namespace zero::simulated
