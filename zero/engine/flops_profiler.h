// Counts the FLOPs and the time of each module of a model in forward, as DeepSpeed's flops profiler
// does in Python. It needs no engine.
//
//   zero::FlopsProfiler profiler(model);  // its parameters are named
//   auto loss = loss_of(batch);
//   loss.backward();
//   profiler.stop();
//   std::cout << zero::flops_report({.model = profiler.profile()});
//
// Note [Whose an operator is]
// LibTorch's modules have no hooks in C++. A profiler sees the operators that its thread calls
// (at::RecordFunction), and knows parameters and buffers by their storage.
//
// - An operator that reads parameters or buffers belongs to the module that has them, or to the
//   deepest module that holds all of theirs. A copy of a parameter in another dtype counts as the
//   parameter.
// - An operator that reads none belongs to the deepest module that holds two modules: that of the
//   parameter that was used last before it, and that of the next one. So attention between two
//   projections of `h.0.attn` belongs to `h.0.attn`. If that would leave a layer (a module with a
//   number for its name), it belongs to the layer: the sum that ends `h.0`, and a ReLU between two
//   modules of a Sequential.
// - Operators before the first parameter of a pass, or after its last, belong to the model itself.
//
// So a module without parameters and buffers has no row of its own. A parameter of two modules
// counts for the first one. Operators in backward are not counted, and neither are forward
// operators that are recomputed: backward is taken as 2 times forward.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero/engine/named_tensors.h"

namespace zero {

struct FlopsCount {
  int64_t parameters = 0;  ///< elements
  int64_t macs = 0;        ///< multiply-accumulates: Note [What an operator counts]
  int64_t flops = 0;       ///< 2 macs, and those of element-wise operators
  double ms = 0;           ///< time in its operators, also in those that count nothing

  FlopsCount& operator+=(const FlopsCount& other);
};

struct ModuleFlops {
  std::string name;    ///< "h.0.attn"; empty for the model
  FlopsCount own{};    ///< without the modules in it
  FlopsCount total{};  ///< with them: own, and the children's totals
  std::vector<ModuleFlops> children{};
};

class FlopsProfiler {
 public:
  /// Counts the operators of this thread until it is stopped or destroyed. The module (object,
  /// pointer, holder or TorchScript) gives the names of parameters and buffers. Let it see forward
  /// and backward passes only: it would count an optimizer's operators as the model's. Throws Error
  /// if another profiler counts on this thread.
  template <ModelLike Model>
  explicit FlopsProfiler(const Model& model) : FlopsProfiler(named_tensors(model)) {}
  explicit FlopsProfiler(const NamedTensors& tensors);
  /// Must run on the thread that made the profiler, as must `stop`.
  ~FlopsProfiler();
  FlopsProfiler(const FlopsProfiler&) = delete;
  FlopsProfiler& operator=(const FlopsProfiler&) = delete;

  /// Ends the pass and the counting.
  void stop();
  /// Returns the counts of all passes so far.
  ModuleFlops profile() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zero
