#include "tests/device/streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <utility>

namespace zero::simulated {

namespace {

// A task computes on plain CPU tensors, whatever the thread that runs it was about to do: with the
// seeded executor that is a host that waits, in the midst of autograd or under autocast.
struct TaskScope {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::DisableRecordFunctionGuard unseen;  // by profilers, which saw the operator's launch
};

}  // namespace

void Streams::configure(Executor executor, uint64_t seed, std::chrono::microseconds delay) {
  executor_ = executor;
  delay_ = delay;
  random_.seed(seed);
  for (Queue& queue : queues_) queue.priority = static_cast<unsigned>(random_() % 1000);
  failure_.clear();
}

bool Streams::ready(const Queue& queue) const {
  if (queue.busy || queue.tasks.empty()) return false;
  const Task& task = queue.tasks.front();
  return task.after_stream < 0 || done(task.after_stream, task.after_task);
}

uint64_t Streams::enqueue(Actor stream, Task task) {
  Queue& own = queue(stream);
  own.tasks.push_back(std::move(task));
  if (executor_ == Executor::threads) {
    if (!own.thread.joinable()) own.thread = std::thread([this, &own] { work(own); });
    own.ready.notify_one();
  } else {
    changed_.notify_all();
  }
  return ++own.issued;
}

void Streams::work(Queue& own) {
  at::set_num_threads(1);
  Lock lock(mutex_);
  for (;;) {
    own.ready.wait(lock, [&] { return executor_ == Executor::threads && ready(own); });
    execute(lock, own, delay_);
  }
}

void Streams::wait(Lock& lock, Actor stream, uint64_t task) {
  while (!done(stream, task)) {
    if (executor_ == Executor::threads || !run_one(lock)) changed_.wait(lock);
  }
}

// Runs the first task of the ready stream of the highest priority; false if none is ready, which
// happens only while another host runs a task.
bool Streams::run_one(Lock& lock) {
  if (random_() % 16 == 0) {
    for (Queue& queue : queues_) queue.priority = static_cast<unsigned>(random_() % 1000);
  }
  Queue* best = nullptr;
  for (Queue& queue : queues_) {
    if (ready(queue) && (best == nullptr || queue.priority > best->priority)) best = &queue;
  }
  if (best == nullptr) return false;
  execute(lock, *best, std::chrono::microseconds(0));
  return true;
}

void Streams::execute(Lock& lock, Queue& own, std::chrono::microseconds delay) {
  Task task = std::move(own.tasks.front());
  own.tasks.pop_front();
  if (task.body) {
    own.busy = true;
    const auto longest = static_cast<uint64_t>(delay.count());
    const std::chrono::microseconds pause(longest > 0 ? random_() % longest : 0);
    lock.unlock();
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    std::string failure;
    try {
      const TaskScope scope;
      task.body();
    } catch (const c10::Error& error) {
      failure = task.name + ": " + error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = task.name + ": " + error.what();
    }
    task.body = nullptr;  // frees what it holds without the lock
    lock.lock();
    if (failure_.empty()) failure_ = failure;
    own.busy = false;
  }
  ++own.done;
  for (Queue& other : queues_) {
    if (!other.tasks.empty() && other.thread.joinable() && ready(other)) other.ready.notify_one();
  }
  changed_.notify_all();
}

}  // namespace zero::simulated
