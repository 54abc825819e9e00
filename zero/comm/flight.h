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

/// A call that has been counted in the traffic. Where nobody measures it is empty.
class Flight {
 public:
  Flight() = default;
  /// Starts now. `bytes`: as the traffic counts them.
  Flight(const Accounts& accounts, const CallTime& call, int64_t bytes) {
    if (accounts.timeline->on() || accounts.calls->on()) begin(accounts, call, bytes);
  }
  explicit operator bool() const { return call_ != nullptr; }
  /// What who waits for it waits for; of one that is not empty.
  Activity waiting() const;
  Timeline& timeline() const;
  std::string_view label() const;
  /// It is done, since `at`. Once; an empty one does nothing.
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

/// What a backend's work tells that knows when it was done.
class KnowsItsEnd {
 public:
  virtual ~KnowsItsEnd() = default;
  /// Timeline::now() then. Of one that is done.
  virtual int64_t ended() const = 0;
};

/// Ends the flight of a work that has been waited for: when it was done where it knows that, else
/// now.
void end_flight(Flight& flight, const c10d::Work& work);

}  // namespace zero::comm
