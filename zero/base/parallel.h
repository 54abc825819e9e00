// Loops on LibTorch's intra-op threads. A thread that works beside the training runs them alone.
//
// Note [One thread beside]
// OpenMP gives every thread that enters a parallel loop a team of its own. So a thread that works
// beside the training would bring as many new threads as there are cores. They would take turns
// with the threads that compute. OpenMP would see more threads than cores, and sleep instead of
// spinning at the end of each loop, which means at every operator. So such a thread runs its loops
// alone.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace zero {

/// While a scope lives, parallel_for runs on this thread alone.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  /// Returns true if a scope lives on this thread.
  static bool here();

 private:
  bool before_;
};

/// Calls work(first, last) on several threads, for ranges that cover [begin, end). No range except
/// the last is shorter than `grain`.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> work);

}  // namespace zero
