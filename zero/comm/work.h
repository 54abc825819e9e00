// An asynchronous collective returns a Work.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <string>

#include "zero/comm/flight.h"

namespace zero::comm {

/// The name of a call in errors.
struct CallName {
  const char* collective = "";
  std::string label{};
  int rank = 0;
};

/// To be called in a handler. Rethrows an Error unchanged, and any other exception of a c10d
/// backend as a CommError that names the call.
[[noreturn]] void rethrow_named(const CallName& call);

/// A collective under way. `wait` blocks until this rank may use the outputs and overwrite the
/// inputs, and throws CommError if the collective failed; waiting again returns at once. A Work
/// that is dropped without `wait` still completes, since the transport holds the tensors; its
/// error, if any, surfaces at the group's next call.
class Work {
 public:
  Work() = default;
  Work(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<WaitClock> clock, CallName call,
       Flight flight = {});
  void wait();
  /// Returns true once `wait` would return at once.
  bool done() const;

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::shared_ptr<WaitClock> clock_;
  CallName call_;
  Flight flight_;
};

}  // namespace zero::comm
