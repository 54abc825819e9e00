// The way of a rank's gradients from autograd's hooks into the arrays of their units.
//
// Note [Arrivals]
// Autograd calls the hook of a parameter when all uses of the parameter in a backward pass have
// run. The hook copies the gradient into the array of the parameter's unit and drops `.grad`. A
// backward function may ask for this place beforehand (base/gradient_place.h) and write the
// gradient there itself; then nothing is copied.
//
// A backward pass inside another one (reentrant checkpoints) may bring a second gradient of a
// parameter while the first one is still on its way to the hook. The first one then moves out of
// the place that it was given, to memory of its own, and both are added up when they arrive.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <vector>

#include "zero/partition/layout.h"

namespace zero {

/// Knows which gradients of this rank lie in the arrays of their units, and which are on their way
/// to a place there. The arrays themselves belong to a GradientReduction.
class GradientArrivals {
 public:
  /// `layout` outlives this. `parameters` gives the shapes and strides.
  GradientArrivals(const partition::Layout& layout, std::vector<at::Tensor> parameters);

  /// Removes the gradient of `variable` from autograd and returns it as a dense tensor. Returns
  /// an undefined tensor if there is none.
  static at::Tensor remove_gradient(const at::Tensor& variable);

  /// Returns the tensor that has the parameter's shape and strides.
  const at::Tensor& parameter(int64_t index) const {
    return parameters_[static_cast<size_t>(index)];
  }

  /// Begins a backward pass. Places that were given out in earlier passes are forgotten.
  void begin_pass();
  void end_pass() { in_pass_ = false; }
  bool in_pass() const { return in_pass_; }

  /// Notes that a backward function asks for the place of a gradient. Returns false if it must use
  /// memory of its own: outside of a pass, or where another gradient of the parameter lies in the
  /// array or is on its way.
  bool await(int64_t parameter);
  /// Gives out the place of an awaited gradient in its unit's array.
  at::Tensor give_place(int64_t parameter, const at::Tensor& array);
  /// Returns whether a backward function has asked for a place in this unit, and its gradient has
  /// not arrived.
  bool awaits(int64_t unit) const;

  /// A gradient of the parameter arrives. If another one is on its way to the place of the
  /// parameter, that one moves out.
  void arrive(int64_t parameter, const at::Tensor& gradient);
  /// Writes the gradient to its place in the unit's array, or adds it to the one that lies there.
  void collect(int64_t parameter, const at::Tensor& variable, const at::Tensor& gradient,
               const at::Tensor& array) const;
  /// Notes that the gradient lies in the array. Returns false if another one lay there before.
  bool note_in_array(int64_t parameter);
  /// Ends the use of a unit's array by this rank's gradients: writes zeros to all elements that no
  /// gradient was written to, which are other parameters' and padding.
  void close(int64_t unit, const at::Tensor& array);

  /// Counts one more parameter of the unit, and returns whether all have been counted.
  bool count_arrival(int64_t unit);
  bool all_arrived(int64_t unit) const;
  void restart_count(int64_t unit) { counts_[static_cast<size_t>(unit)] = 0; }
  void restart_counts();

  /// Forgets all gradients that lie in arrays.
  void clear();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  at::Tensor place(int64_t parameter, const at::Tensor& shape, const at::Tensor& array) const;

  const partition::Layout& layout_;
  std::vector<at::Tensor> parameters_;
  bool in_pass_ = false;
  std::vector<uint8_t> in_array_;   // by parameter
  std::vector<uint8_t> awaited_;    // by parameter
  std::vector<WeakTensor> places_;  // by parameter: the tensor that was given out last
  std::vector<int64_t> counts_;     // by unit
};

}  // namespace zero
