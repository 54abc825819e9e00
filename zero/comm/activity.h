// Each rank shows what it does between its calls; a rank that waits for it in vain says so in its
// error.
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

/// A slot lies in memory that the ranks of a group on one host share. Its rank writes and all read,
/// without locks: a text that is read while it is written can only spoil the wording of an error. A
/// slot of zeros shows nothing.
class ActivitySlot {
 public:
  void begin(std::string_view operation, bool backward) noexcept;
  void use(std::string_view unit) noexcept;

  /// Returns, for example, "the last operator that it began, 12.3 s ago, is aten::addmm in
  /// backward, with unit 3 (h.0.bias)"; "" if nothing was shown.
  std::string text() const;

 private:
  struct Operation {
    int64_t began = 0;  // the steady clock is one for all processes of a host
    uint64_t backward = 0;
    FixedText<64> name{};
  };
  SharedValue<Operation> operation_;
  SharedValue<FixedText<96>> unit_;
};

/// Shows what one rank does in the slots of all its groups. Thread-safe.
class RankActivity {
 public:
  /// Shows it in `slot` too, from now on, as long as that lives.
  void show_in(const std::shared_ptr<ActivitySlot>& slot);
  /// Says that an operator begins. Costs a few dozen nanoseconds.
  void begin(std::string_view operation, bool backward) noexcept;
  /// Says which unit of parameters the rank uses from now on.
  void use(std::string_view unit) noexcept;
  /// Returns the text that its slots show.
  std::string text() const { return own_.text(); }

 private:
  template <class Show>
  void show(const Show& show) noexcept;

  ActivitySlot own_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<ActivitySlot>> slots_;
};

}  // namespace zero::comm
