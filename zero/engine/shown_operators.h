// Shows the ranks of a group which operators a thread calls.
#pragma once

#include <memory>
#include <thread>

#include "zero/comm/activity.h"
#include "zero/comm/group.h"

namespace zero {

/// While one lives, the other ranks of the group's host see the operators that this thread calls,
/// also in backward passes on it. If they wait for this rank in vain, their CommError names the
/// operator. An operator takes some 120 ns longer. The engine has one.
class ShownOperators {
 public:
  explicit ShownOperators(comm::Group& group);
  /// If it runs on another thread, the first thread keeps its callback, which then shows nothing.
  ~ShownOperators();
  ShownOperators(const ShownOperators&) = delete;
  ShownOperators& operator=(const ShownOperators&) = delete;

 private:
  std::shared_ptr<comm::RankActivity> activity_;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace zero
