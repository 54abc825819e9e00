// Shows the operators that a thread calls to one observer.
#pragma once

#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <unordered_set>

#include "zero/base/error.h"

namespace zero {

/// While one lives, `observer` sees the operators that this thread calls. `start(range)` returns
/// what the observer wants to keep until the operator ends, or null, and `end(range, context)` gets
/// that back. It sees nothing on other threads, to which autograd may take LibTorch's callbacks
/// along.
template <class Observer>
class ThreadObserver {
 public:
  using Scopes = std::unordered_set<at::RecordScope, std::hash<at::RecordScope>>;
  /// Throws Error with the text `refusal` if another one of this kind observes the thread. With
  /// `values` the observer can look at inputs and outputs of operators.
  ThreadObserver(Observer& observer, const Scopes& scopes, bool values, const char* refusal) {
    if (of_this_thread() != nullptr) throw Error(refusal);
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_start, &on_end)
                                             .needsInputs(values)
                                             .needsOutputs(values)
                                             .scopes(scopes));
    of_this_thread() = &observer;
  }
  ~ThreadObserver() {
    at::removeCallback(handle_);
    of_this_thread() = nullptr;
  }
  ThreadObserver(const ThreadObserver&) = delete;
  ThreadObserver& operator=(const ThreadObserver&) = delete;

 private:
  // LibTorch's callbacks are plain functions: they find the observer by their thread.
  static Observer*& of_this_thread() {
    thread_local Observer* observer = nullptr;
    return observer;
  }
  static std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& range) {
    auto* observer = of_this_thread();
    return observer == nullptr ? nullptr : observer->start(range);
  }
  static void on_end(const at::RecordFunction& range, at::ObserverContext* context) {
    auto* observer = of_this_thread();
    if (observer != nullptr && context != nullptr) observer->end(range, *context);
  }

  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace zero
