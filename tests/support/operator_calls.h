// Counts how often an operator is called.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <string>

namespace zero::test {

/// While it lives, counts the calls of the operator `name` ("zero::linear_gelu") on all threads.
/// One at a time.
class OperatorCalls {
 public:
  explicit OperatorCalls(std::string name) {
    watched() = std::move(name);
    calls() = 0;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          if (watched() == function.name()) ++calls();
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorCalls() { at::removeCallback(handle_); }
  OperatorCalls(const OperatorCalls&) = delete;
  OperatorCalls& operator=(const OperatorCalls&) = delete;
  int64_t count() const { return calls(); }

 private:
  static std::string& watched() {
    static std::string name;
    return name;
  }
  static std::atomic<int64_t>& calls() {
    static std::atomic<int64_t> count = 0;
    return count;
  }
  at::CallbackHandle handle_;
};

}  // namespace zero::test
