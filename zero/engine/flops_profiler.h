// Counts what each module of a model computes in forward, and times it, as DeepSpeed's flops
// profiler does in Python. It needs no engine.
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
// - An operator that reads one belongs to the module that has it; one that reads those of several
//   modules to the deepest that holds them all. A copy of a parameter in another dtype counts as
//   the parameter.
// - Another belongs to the deepest module that holds both the module whose parameter was used last
//   before it and that of the next one: attention between two projections of `h.0.attn` to
//   `h.0.attn`. Where that would leave a layer, a module with a number for its name, it belongs to
//   the layer: the sum that ends `h.0`, and a ReLU between two modules of a Sequential.
// - What comes before the first parameter of a pass, or after its last, is the model's own.
//
// So a module without parameters and buffers is no row of its own. A parameter of two modules is
// the first one's. Operators in backward are not counted, recomputed forward ones neither: in
// numbers, backward is 2 times forward.
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
  int64_t flops = 0;       ///< 2 macs, and what is done element by element
  double ms = 0;           ///< in its operators, those too that count nothing

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
  /// Counts the operators of this thread until it is stopped or destroyed; names the parameters
  /// and buffers of a module (object, pointer, holder or TorchScript). Give it the forward and
  /// backward passes alone: an optimizer's operators would count as the model's. Throws Error where
  /// another one counts on this thread.
  template <ModelLike Model>
  explicit FlopsProfiler(const Model& model) : FlopsProfiler(named_tensors(model)) {}
  explicit FlopsProfiler(const NamedTensors& tensors);
  /// On the thread that made it, as `stop`.
  ~FlopsProfiler();
  FlopsProfiler(const FlopsProfiler&) = delete;
  FlopsProfiler& operator=(const FlopsProfiler&) = delete;

  /// Ends the pass, and counts no more.
  void stop();
  /// The model, of all passes so far.
  ModuleFlops profile() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zero
