// Shows the ranks of a group which operators a thread calls.
#pragma once

#include <memory>
#include <thread>

#include "zero/comm/activity.h"
#include "zero/comm/group.h"

namespace zero {

/// While one lives, the operators that the thread that made it calls, in backward passes on it too,
/// are shown to the other ranks of the group's host: where they wait for this rank in vain, their
/// CommError names the operator. Some 120 ns an operator. The engine has one.
class ShownOperators {
 public:
  explicit ShownOperators(comm::Group& group);
  /// On another thread it leaves the first one's callback, which then shows nothing.
  ~ShownOperators();
  ShownOperators(const ShownOperators&) = delete;
  ShownOperators& operator=(const ShownOperators&) = delete;

 private:
  std::shared_ptr<comm::RankActivity> activity_;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace zero
