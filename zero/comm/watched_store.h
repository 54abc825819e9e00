// A store whose waits end when the watch has found somebody missing.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zero::comm {

/// A part of another store, for who would wait there for a rank that is dead: all its waits and
/// looks call `check`, which throws where there is no point in waiting.
class WatchedStore final : public c10d::PrefixStore {
 public:
  WatchedStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store,
               std::function<void()> check)
      : c10d::PrefixStore(std::move(prefix), std::move(store)), check_(std::move(check)) {}

  std::vector<uint8_t> get(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  /// Throws c10::DistStoreError, as every store, when the time is up.
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  std::function<void()> check_;
};

}  // namespace zero::comm
