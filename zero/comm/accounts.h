// Everything that a group's rank counts and shows.
#pragma once

#include <memory>

#include "zero/base/ledger.h"
#include "zero/base/timeline.h"
#include "zero/comm/activity.h"
#include "zero/comm/call_log.h"
#include "zero/comm/traffic.h"
#include "zero/comm/wait_clock.h"

namespace zero::comm {

/// A group makes its own, or several groups of one rank share one. Tensors and transports that
/// count in them may outlive the group.
struct Accounts {
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();       ///< bytes by category
  std::shared_ptr<Traffic> traffic = std::make_shared<Traffic>();    ///< calls and bytes
  std::shared_ptr<WaitClock> clock = std::make_shared<WaitClock>();  ///< time spent waiting
  std::shared_ptr<RankActivity> activity =
      std::make_shared<RankActivity>();  ///< shows what the rank does between calls
  std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();  ///< shows what happens when
  std::shared_ptr<CallLog> calls = std::make_shared<CallLog>();       ///< how long calls take
};

}  // namespace zero::comm
