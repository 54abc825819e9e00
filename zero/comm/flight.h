// One call from its start to its end, for a rank's timeline and its log of calls.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <memory>
#include <string_view>

#include "zero/base/timeline.h"
#include "zero/comm/accounts.h"
#include "zero/comm/traffic.h"

namespace zero::comm {

/// A call that the traffic has counted. It is empty if nobody measures calls.
class Flight {
 public:
  Flight() = default;
  /// Starts now. `bytes` are as the traffic counts them.
  Flight(const Accounts& accounts, const CallTime& call, int64_t bytes) {
    if (accounts.timeline->on() || accounts.calls->on()) begin(accounts, call, bytes);
  }
  explicit operator bool() const { return call_ != nullptr; }
  /// Returns the activity of a thread that waits for the call. The flight must not be empty.
  Activity waiting() const;
  Timeline& timeline() const;
  std::string_view label() const;
  /// Says that the call was done at the time `at`. To be called once; an empty flight does nothing.
  void end(int64_t at);
  void end() {
    if (call_) end(Timeline::now());
  }

 private:
  struct Call;
  void begin(const Accounts& accounts, const CallTime& call, int64_t bytes);
  struct Delete {
    void operator()(Call* call) const noexcept;
  };
  std::unique_ptr<Call, Delete> call_;
};

/// A backend's work that knows when it was done.
class KnowsItsEnd {
 public:
  virtual ~KnowsItsEnd() = default;
  /// Returns the Timeline::now() of its end. The work must be done.
  virtual int64_t ended() const = 0;
};

/// Ends the flight of a work that has been waited for: at the time when the work was done, if it
/// knows that, otherwise now.
void end_flight(Flight& flight, const c10d::Work& work);

}  // namespace zero::comm
