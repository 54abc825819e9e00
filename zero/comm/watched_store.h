// A store whose waits end when the watch has found that somebody is missing.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/thread.h"

namespace zero::comm {

/// A store that does not answer gets so much more time than the ranks have to come.
inline constexpr std::chrono::milliseconds kLastAnswer{1000};

/// Returns "2.5 s", for messages.
std::string seconds(std::chrono::milliseconds time);

/// Returns the message of an error of c10d's, without the stack trace that follows it.
std::string first_line(const c10::Error& error);

/// Runs `operation` on a thread of its own, and passes on its result or exception. Meanwhile calls
/// `check` again and again. If `check` throws, the operation is left to itself, and must keep its
/// data alive. For operations of c10d and Gloo that nothing can end: the answer of a store that has
/// been stopped or is another program, the connection of a rank that has died.
template <class Operation>
auto answer_to(Operation operation, const std::function<void()>& check) {
  std::packaged_task<std::invoke_result_t<Operation>()> task(std::move(operation));
  auto answer = task.get_future();
  auto thread = start_thread<CommError>("a wait for other ranks", std::move(task));
  try {
    while (answer.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) check();
  } catch (...) {
    thread.detach();
    throw;
  }
  thread.join();
  return answer.get();
}

/// A part of another store. All its waits, also those for the store's own answers, call `check`,
/// which throws if there is no point in waiting: a rank that waits for a dead one would wait for
/// ever.
class WatchedStore final : public c10d::PrefixStore {
 public:
  WatchedStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store,
               std::function<void()> check)
      : c10d::PrefixStore(std::move(prefix), std::move(store)), check_(std::move(check)) {}

  using c10d::PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  int64_t add(const std::string& key, int64_t value) override;
  std::vector<uint8_t> get(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  /// Throws c10::DistStoreError when the time is up, as every store does.
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  std::function<void()> check_;
};

}  // namespace zero::comm
