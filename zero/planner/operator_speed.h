// How long the operators of a traced step take on this machine, found by running each of them.
//
// Note [Operators measured here]
// A processor reaches another part of its peak with each operator and each size, so a plan for this
// machine does not compute an operator's time from FLOPs and bytes. A trace of a CPU keeps the
// distinct calls of operators with the shapes of their inputs. They are few, since layers repeat
// them. Each is run with tensors of such shapes, by as many threads at once as the host has ranks,
// which then share caches and memory as ranks do. Only candidates that fit are measured: a call
// needs no more memory than the step that it is from.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "zero/planner/as_ranks.h"
#include "zero/planner/hardware.h"
#include "zero/planner/trace.h"

namespace zero::plan {

/// A call of an operator. Its tensors are on meta, and have no memory.
struct OperatorCall {
  std::string key;  ///< of equal calls
  c10::OperatorHandle op;
  std::vector<c10::IValue> inputs;
};

/// The distinct calls of a trace.
class OperatorCalls {
 public:
  /// Returns the index of the call, which is kept where it is new; below 0 for one that cannot be
  /// run without the memory that it was given.
  int64_t index(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> inputs);
  const std::vector<OperatorCall>& all() const { return all_; }

 private:
  std::vector<OperatorCall> all_;
  std::map<std::string, int64_t, std::less<>> known_;
};

/// Times of operators on this machine's CPU.
class OperatorSpeed {
 public:
  /// Operators run on `ranks` threads at once, each with its share of the cores, on all `hosts` at
  /// the same time.
  explicit OperatorSpeed(int64_t ranks, OfHosts hosts = {})
      : ranks_(ranks), hosts_(std::move(hosts)) {}
  /// Sets `seconds` of the trace's operators that can be run by themselves, and `modelled` to what
  /// `device` would take by Note [Efficiency]. Calls that an earlier trace had are not run again.
  /// Operators that take longer than a quarter of a second by `modelled` are left out, and so are
  /// those that come after half a minute of measuring.
  void measure(Trace& trace, const Device& device, at::ScalarType dtype);

 private:
  double seconds_of(const OperatorCall& call) const;
  void check_hosts_measure(const OperatorCall& call) const;

  int64_t ranks_;
  OfHosts hosts_;
  double spent_ = 0;                                  // seconds
  std::map<std::string, double, std::less<>> known_;  // below 0: it cannot be run by itself
};

}  // namespace zero::plan
