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
// A watch sees the operators that its thread calls (at::RecordFunction), with their outputs. It
// checks each output once, by a pass over its elements. It checks an input only if an output is not
// finite, or before the operator overwrites the input. The first operator with a NaN in its output
// is the anomaly, whatever its inputs are. The report says whether they were finite, had an
// infinity, or had a NaN already (from data, a parameter, or a number that the program gave). An
// operator that only copies a NaN is not reported; the operator that uses the copy is.
//
// An infinity alone is no anomaly. Masks of attention are full of infinities on purpose: the
// program gives an infinite number, and softmax makes zeros of the masked entries. So the watch
// only remembers the first operator that makes an infinity from finite inputs. That operator is the
// anomaly if the gradient of a leaf is infinite later. If the first NaN comes from an infinity, the
// report names both operators. Only the program knows whether the loss is infinite; it can then ask
// `first_infinity`.
//
// The watch does not check memory that nobody has written yet (`empty`), views, and integers. It
// does not fetch an absent parameter (stage 3) to check it. Of a kernel that calls no operator it
// sees only the results that other operators make of its result; libzero's own kernels appear as
// operators (base/observed.h).
//
// Note [Where in the model]
// An operator does not know its module. The report names the parameter among the operator's inputs
// (a view of it counts), or else the parameter that was used last before it. For an operator in
// backward it names the parameter of the forward operator that autograd's node belongs to; both
// have the same sequence number. The watch recognises parameters by their storage.
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

  std::string operation;  ///< "aten::log"; empty: no observed operator has made the gradient
  /// The operator that the program called, if that has called this one: "aten::softmax".
  std::string within = {};
  bool backward = false;
  bool recomputed = false;  ///< a forward operator that runs in backward (zero::recompute)
  std::string node = {};    ///< autograd's, in backward: "LogBackward0"
  std::string forward_operation = {};  ///< the operator that the node belongs to, if known
  /// The parameter that the operator reads, or that the forward operator of its node reads. If it
  /// is empty, `after` is the parameter that was used last before.
  std::string parameter = {};
  std::string after = {};
  std::vector<int64_t> sizes = {};
  at::ScalarType dtype = at::kFloat;
  int64_t elements = 0;
  int64_t nans = 0;
  int64_t infinities = 0;
  Inputs inputs = Inputs::finite;
  std::string input = {};  ///< the input that `inputs` describes, if it is a parameter
  int64_t order = 0;       ///< this operator's number since the last `clear`

  /// One sentence without its full stop, beginning with "forward: " or "backward: ".
  std::string text() const;
};

class AnomalyWatch {
 public:
  struct Options {
    /// A backward pass of this thread throws NotFinite at its end if an anomaly was found in it or
    /// before it. Use it with one rank only: other ranks would wait for the one that throws.
    bool throws = false;
  };

  /// Watches the operators of this thread, and of backward passes on it, until it is destroyed. The
  /// model (object, pointer, holder or TorchScript) gives the names of the parameters. Throws Error
  /// if another watch on this thread lives.
  template <ModelLike Model>
  explicit AnomalyWatch(const Model& model, Options options = {false})
      : AnomalyWatch(named_tensors(model), options) {}
  explicit AnomalyWatch(const NamedTensors& tensors = {}, Options options = {false});
  /// Must run on the thread that made the watch.
  ~AnomalyWatch();
  AnomalyWatch(const AnomalyWatch&) = delete;
  AnomalyWatch& operator=(const AnomalyWatch&) = delete;

  /// Returns the first operator with a NaN, or, if the gradient of a leaf is infinite, the first
  /// one that made an infinity.
  const std::optional<Anomaly>& first() const;
  /// Returns the first operator that made an infinity from finite inputs. It is no anomaly by
  /// itself.
  const std::optional<Anomaly>& first_infinity() const;
  /// Returns a sentence about `first`. One about `first_infinity` precedes it if an input of
  /// `first` had an infinity. The text is empty if there is no anomaly.
  std::string report() const;
  /// Forgets all findings. A program may call it once a step.
  void clear();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace zero
