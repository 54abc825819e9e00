#include "zero/comm/watched_store.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "zero/comm/deadline.h"

namespace zero::comm {

std::string seconds(std::chrono::milliseconds time) {
  return fmt::format("{:g} s", static_cast<double>(time.count()) / 1000);
}

std::string first_line(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

void WatchedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  check_();
  answer_to([below = store_, key = joinKey(key), value] { below->set(key, value); }, check_);
}

int64_t WatchedStore::add(const std::string& key, int64_t value) {
  check_();
  return answer_to([below = store_, key = joinKey(key), value] { return below->add(key, value); },
                   check_);
}

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return answer_to([below = store_, key = joinKey(key)] { return below->get(key); }, check_);
}

bool WatchedStore::check(const std::vector<std::string>& keys) {
  check_();
  return answer_to([below = store_, keys = joinKeys(keys)] { return below->check(keys); }, check_);
}

void WatchedStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

void WatchedStore::wait(const std::vector<std::string>& keys,
                        const std::chrono::milliseconds& timeout) {
  using std::chrono::milliseconds;
  const auto deadline = deadline_after(timeout);
  for (milliseconds pause(1); !check(keys); pause = std::min(pause * 2, milliseconds(20))) {
    if (Clock::now() >= deadline) {
      C10_THROW_ERROR(DistStoreError,
                      fmt::format("Waited {} ms for {}.", timeout.count(), fmt::join(keys, ", ")));
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace zero::comm
