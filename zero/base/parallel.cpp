#include "zero/base/parallel.h"

#include <ATen/Parallel.h>

#include <utility>

namespace zero {

namespace {

thread_local bool alone = false;

}  // namespace

OneThread::OneThread() : before_(std::exchange(alone, true)) {}

OneThread::~OneThread() { alone = before_; }

bool OneThread::here() { return alone; }

void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> work) {
  if (!alone) {
    at::parallel_for(begin, end, grain, work);
  } else if (begin < end) {
    work(begin, end);
  }
}

}  // namespace zero
