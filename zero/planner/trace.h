// A step of a model on the device meta, where tensors have shapes and no values: the memory that it
// takes and the work that it does are known exactly, in milliseconds, without the model's memory.
//
//   auto step = zero::plan::trace([] { return std::make_shared<Net>(); },
//                                 [](auto& net) { return net.loss(torch::zeros({8, 512})); });
//
// Note [Traces]
// LibTorch's C++ has no mode that sees every operator. A boxed fallback for a dispatch key that
// LibTorch keeps for tests does the same: while a trace runs, it moves each new tensor to meta,
// runs each operator on shapes alone, and writes it down. Composite operators are seen whole, which
// attention needs: its kernel is chosen by device, so a trace calls that of the traced device. An
// allocator for meta counts bytes, rounded as the traced device rounds them. LibTorch registers
// many kernels for meta from Python; those that it lacks without Python are in meta_kernels.cpp.
//
// The gradient of a parameter goes to a place of its own, as in an engine, and is not counted: its
// memory depends on the stage (memory.h). A step that reads values (`item`, a branch on data)
// cannot be traced, and the error names the operator. Tensors that were made before the trace are
// taken for their shapes. Operators whose result has a size that
// depends on values get the largest, and those that take memory besides tensors get an estimate:
// `Trace::bounds` lists both.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/engine/look_ups.h"
#include "zero/engine/model_shape.h"
#include "zero/engine/named_tensors.h"
#include "zero/models/language/language_model.h"

namespace zero::plan {

class OperatorCalls;

struct TraceOptions {
  /// Parameters in fp32 get this dtype, except those that an engine leaves in fp32 (running
  /// statistics: Note [Buffers] in engine/model.h).
  at::ScalarType dtype = at::kFloat;
  /// The traced device: a CPU, where libzero and LibTorch compute in other ways than on a GPU.
  bool host = false;
  /// Gradients are collected in another dtype than the parameters have, so that backward functions
  /// cannot write them to their place (several micro-batches in bf16 that add up in fp32).
  bool gradients_apart = false;
  /// The optimizer of the parameters.
  Optimizer optimizer = AdamW{};
  /// The loss is computed in a zero::Autocast scope of this dtype for the traced device. A loss may
  /// have a scope of its own, too: Note [Casts in a trace] in planner/autocast_calls.h.
  std::optional<at::ScalarType> autocast{};
  /// No cast of a parameter stays after the operator that used it (libzero's parameters in Python
  /// at stage 3): autocast keeps none for the operators after it.
  bool casts_dropped = false;
  /// Called in the handler of an exception of an operator. Returns its message, where `what()` does
  /// not have it, or throws it again, where it says nothing of the operator (exceptions of Python).
  /// Null: `what()` does.
  std::function<std::string()> reason{};
};

/// An operator as it ran.
struct TracedOperator {
  int64_t name = 0;    ///< its index in Trace::names
  int64_t module = 0;  ///< the index in Trace::modules of the module whose parameter was used last
  bool backward = false;
  bool attention = false;  ///< it is fused attention (Note [Efficiency] in planner/hardware.h)
  /// In which it computes: that of its first operand in floating point. Undefined without one.
  at::ScalarType dtype = at::ScalarType::Undefined;
  double flops = 0;     ///< Note [What an operator counts]
  double bytes = 0;     ///< of its tensors, which it reads or writes
  int64_t call = -1;    ///< its index in Trace::calls; below 0: it cannot be run by itself
  double seconds = 0;   ///< measured (Note [Operators measured here]); 0: not
  double modelled = 0;  ///< what Note [Efficiency] says of the device on which it was measured
};

/// Something that changes memory, in the order of the step.
struct TraceEvent {
  enum class Kind : uint8_t {
    memory,   ///< `value` bytes are taken, or given back if below 0
    use,      ///< an operator reads parameter `value`
    place,    ///< backward asks for the place of the gradient of parameter `value`
    arrival,  ///< the gradient of parameter `value` has arrived
    loss      ///< forward ends here
  };
  Kind kind{};
  int64_t value = 0;
  int64_t op = 0;  ///< the operator, an index into Trace::operators
};

/// Bytes that forward keeps for backward.
struct KeptBytes {
  std::string module;
  /// Undefined for what an operator keeps besides its results (statistics of norms).
  at::ScalarType dtype{};
  int64_t bytes = 0;
};

/// An operator whose memory is not exact.
struct Bound {
  std::string name;
  std::string module;
  int64_t bytes = 0;  ///< of memory that the trace does not have, at most
  std::string why;
};

struct Trace {
  ModelShape model;
  std::vector<std::string> names;    ///< of operators
  std::vector<std::string> modules;  ///< of modules; the first one is the model, ""
  std::vector<TracedOperator> operators;
  std::vector<TraceEvent> events;
  std::vector<KeptBytes> kept;  ///< by module and dtype, in the order of their first bytes
  std::vector<Bound> bounds;
  bool casts_parameters = false;               ///< autocast has cast a parameter
  std::shared_ptr<const OperatorCalls> calls;  ///< of a traced CPU, else null
  int64_t buffers = 0;                         ///< bytes of the model's buffers
  int64_t peak = 0;     ///< the most bytes beside parameters, their gradients, and buffers
  int64_t peak_at = 0;  ///< the operator at that moment
  /// The look-up of the tokens, of a model on the CPU.
  PlannedLookUp look_up{};

  int64_t parameters() const;  ///< elements
  double flops() const;        ///< of the step
  const std::string& name_of(int64_t op) const {
    return names[static_cast<size_t>(operators[static_cast<size_t>(op)].name)];
  }
  const std::string& module_of(int64_t op) const {
    return modules[static_cast<size_t>(operators[static_cast<size_t>(op)].module)];
  }
};

/// A trace under way on this thread; use `trace` instead. One at a time on a thread.
class Tracing {
 public:
  explicit Tracing(const TraceOptions& options);
  ~Tracing();
  Tracing(const Tracing&) = delete;
  Tracing& operator=(const Tracing&) = delete;
  /// Takes the parameters of a module that was built meanwhile, or got others on meta meanwhile.
  void begin(const NamedTensors& tensors);
  /// Runs the step. Throws as `trace`, and ConfigError for a loss that is not one number.
  Trace run(const std::function<at::Tensor()>& loss);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Builds a module by `build()`, which returns a pointer or a holder of it, and traces
/// `loss(*module)` and its backward. Both run with every tensor that they make on meta. Throws
/// Error naming an operator that cannot be traced.
template <class Build, class Loss>
Trace trace(const Build& build, const Loss& loss, const TraceOptions& options = {}) {
  Tracing tracing(options);
  const auto module = build();
  tracing.begin(named_tensors(*module));
  return tracing.run([&] { return loss(*module); });
}

/// Traces a step of a language model: `batch` sequences of `sequence` tokens, with the first of
/// every `recompute` layers computed again in backward (0: none).
Trace trace(const LanguageModelConfig& model, int64_t batch, int64_t sequence,
            int64_t recompute = 0, const TraceOptions& options = {});

}  // namespace zero::plan
