#include "zero/comm/watched_store.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "zero/comm/peers.h"

namespace zero::comm {

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

bool WatchedStore::check(const std::vector<std::string>& keys) {
  check_();
  return PrefixStore::check(keys);
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
