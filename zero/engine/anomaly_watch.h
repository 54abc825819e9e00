// Finds the operator that made the first number that is infinite or NaN, as detect_anomaly
// does in Python's torch.autograd, for forward too. LibTorch's C++ interface lacks it. It needs no
// engine.
//
//   {
//     zero::AnomalyWatch watch(model);  // its parameters are named
//     loss_of(batch).backward();
//     if (watch.first()) std::cerr << watch.report() << '\n';
//   }
//
// Note [What is an anomaly]
// A watch sees the operators that its thread calls (at::RecordFunction), with their outputs. Each
// output is looked at once, by a pass over its elements; inputs only where an output is not finite,
// or where the operator overwrites them. The first operator with a NaN in its output is the
// anomaly, whatever its inputs: the report says whether they were finite, had an infinity, or had
// the NaN already (data, a parameter, a number that the program gave). A copy of what had one is no
// news: the operator that uses it is told.
//
// An infinity alone is none. A mask of attention is full of them, and wants them: they come from a
// number that is infinite itself, and softmax makes zeros of them. So one that an operator makes
// from finite inputs is kept, and is the anomaly once a gradient of a leaf is infinite; what a NaN
// comes from is told with it. Whether the loss is infinite the program knows: `first_infinity`.
//
// Not looked at: memory that nobody has written yet (`empty`), views, and integers. An absent
// parameter (stage 3) is not fetched to be looked at. A kernel that calls no operator shows nothing
// but what others make of its result; libzero's own are shown (base/observed.h).
//
// Note [Where in the model]
// An operator has no module. It is told by the parameter among its inputs (a view of it counts), or
// by the parameter that was used last before it; in backward by that of the forward operator that
// autograd's node belongs to, which both have the sequence number of. Parameters are known by their
// storage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/base/not_finite.h"
#include "zero/engine/named_tensors.h"

namespace zero {

/// An operator whose output is not finite. Note [What is an anomaly].
struct Anomaly {
  /// The kind of numbers that the operator's inputs had.
  enum class Inputs : uint8_t { finite, infinity, nan, absent };

  std::string operation;  ///< "aten::log"; empty: a gradient came so from where nothing is observed
  /// The operator that the program called, where that has called this one: "aten::softmax".
  std::string within = {};
  bool backward = false;
  bool recomputed = false;  ///< a forward operator that runs in backward (zero::recompute)
  std::string node = {};    ///< autograd's, in backward: "LogBackward0"
  std::string forward_operation = {};  ///< that the node belongs to, where that is known
  /// Of an input, or of the forward operator's; else `after` is the last one that was used before.
  std::string parameter = {};
  std::string after = {};
  std::vector<int64_t> sizes = {};
  at::ScalarType dtype = at::kFloat;
  int64_t elements = 0;
  int64_t nans = 0;
  int64_t infinities = 0;
  Inputs inputs = Inputs::finite;
  std::string input = {};  ///< the parameter among `inputs` that is not finite or absent, if it is
  int64_t order = 0;       ///< of the operators since the last `clear`

  /// One sentence without its full stop, beginning with "forward: " or "backward: ".
  std::string text() const;
};

class AnomalyWatch {
 public:
  struct Options {
    /// A backward pass of this thread in which an anomaly was found, or before it, ends with
    /// NotFinite. For one rank: the others would wait for one that throws alone.
    bool throws = false;
  };

  /// Watches the operators of this thread, and of backward passes on it, until it is destroyed;
  /// names the parameters of a module (object, pointer, holder or TorchScript). Throws Error where
  /// another one watches this thread.
  template <ModelLike Model>
  explicit AnomalyWatch(const Model& model, Options options = {false})
      : AnomalyWatch(named_tensors(model), options) {}
  explicit AnomalyWatch(const NamedTensors& tensors = {}, Options options = {false});
  /// On the thread that made it.
  ~AnomalyWatch();
  AnomalyWatch(const AnomalyWatch&) = delete;
  AnomalyWatch& operator=(const AnomalyWatch&) = delete;

  /// The first operator with a NaN, or, where a leaf's gradient is infinite, with an infinity.
  const std::optional<Anomaly>& first() const;
  /// The first operator that made an infinity from finite inputs; of itself no anomaly.
  const std::optional<Anomaly>& first_infinity() const;
  /// `first` in a sentence; behind `first_infinity`, where an input of it had an infinity. Empty
  /// where there is none.
  std::string report() const;
  /// Forgets what was found; once a step, say.
  void clear();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace zero
