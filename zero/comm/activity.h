// What a rank does between its calls, for the others to tell where they wait for it in vain.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "zero/comm/fixed_text.h"
#include "zero/comm/shared_value.h"

namespace zero::comm {

/// Lies in memory that the ranks of a group on one host share. The rank shows, all read, without
/// locks: a text that is read while it is written can only spoil the wording of an error. Zeros:
/// nothing shown.
class ActivitySlot {
 public:
  void begin(std::string_view operation, bool backward) noexcept;
  void use(std::string_view unit) noexcept;

  /// "the last operator that it began, 12.3 s ago, is aten::addmm in backward, with unit 3
  /// (h.0.bias)"; empty where nothing was shown.
  std::string text() const;

 private:
  struct Operation {
    int64_t began = 0;  // by the steady clock, which is one for all processes of a host
    uint64_t backward = 0;
    FixedText<64> name{};
  };
  SharedValue<Operation> operation_;
  SharedValue<FixedText<96>> unit_;
};

/// Of one rank: shows what it does in the slots of all its groups. Thread-safe.
class RankActivity {
 public:
  /// A slot in which it is shown as well, as long as that is there.
  void show_in(const std::shared_ptr<ActivitySlot>& slot);
  /// An operator begins. Costs a few dozen nanoseconds.
  void begin(std::string_view operation, bool backward) noexcept;
  /// The unit of parameters that is used from now on.
  void use(std::string_view unit) noexcept;
  /// As its slots have it.
  std::string text() const { return own_.text(); }

 private:
  template <class Show>
  void show(const Show& show) noexcept;

  ActivitySlot own_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<ActivitySlot>> slots_;
};

}  // namespace zero::comm
