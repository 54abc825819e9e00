// A collective of a group on several hosts while it is under way on one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "zero/comm/call.h"
#include "zero/comm/rail.h"
#include "zero/comm/shm_control.h"

namespace zero::comm {

class HostsLinks;
struct HostsCall;

/// The work of one collective in its two phases (Note [Two phases] in hosts_collectives.h). One
/// object serves one call. All functions throw CommError.
class HostsAlgorithm {
 public:
  HostsAlgorithm(HostsLinks& links, HostsCall& call) : links_(links), call_(call) {}
  virtual ~HostsAlgorithm() = default;
  HostsAlgorithm(const HostsAlgorithm&) = delete;
  HostsAlgorithm& operator=(const HostsAlgorithm&) = delete;
  /// Returns true if `homeward` may begin before `send` has ended.
  virtual bool sends_in_chunks() const { return false; }
  virtual void open() {}
  virtual void send() {}
  virtual void homeward() = 0;

 protected:
  HostsLinks& links_;
  HostsCall& call_;
};

/// Lets one phase of a call wait for the end of the other.
class Sending {
 public:
  /// To be called once.
  void end(std::exception_ptr error = nullptr) {
    error ? ended_.set_exception(std::move(error)) : ended_.set_value();
  }
  /// Blocks until `end`, and throws the error that it was given.
  void wait() const { over_.get(); }

 private:
  std::promise<void> ended_;
  std::shared_future<void> over_ = ended_.get_future();
};

/// A call between its phases.
struct HostsCall {
  struct Departure {
    int host = 0;
    std::unique_ptr<Passage> passage;
  };
  Call call;
  Sending sending;  ///< the outward phase
  CallRecord record;
  std::vector<CallRecord> records;            ///< the other hosts' ranks', by host
  std::vector<at::Tensor> held;               ///< arrays that the call has borrowed
  std::unique_ptr<HostsAlgorithm> algorithm;  ///< from `open` until the call has ended
  std::vector<Departure> departures;          ///< the homeward phase's own once `sending` is over
  std::vector<std::vector<std::unique_ptr<Passage>>> arrivals;  ///< by host: its record first
};

}  // namespace zero::comm
