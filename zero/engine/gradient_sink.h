// The interface by which a model's hooks pass gradients on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/base/gradient_place.h"

namespace zero {

/// Takes the gradients of a model's parameters.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  /// Takes the gradient of `variable`, which is parameter number `parameter`. Called on any thread.
  virtual void arrive(int64_t parameter, const at::Tensor& variable) = 0;
  /// Does the work of GradientPlace::place.
  virtual at::Tensor place(int64_t parameter) = 0;
  /// Returns GradientPlace::loss_factor.
  virtual double loss_factor() const = 0;
  // These do what GradientPlace's functions of the same name do.
  virtual bool announce_rows(int64_t parameter, const at::Tensor& indices) = 0;
  virtual c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(int64_t parameter,
                                                               const at::Tensor& indices) = 0;
  virtual GradientTaker* taker(int64_t parameter) = 0;
  virtual void returns_whole(int64_t parameter, const at::Tensor& gradient) = 0;
};

}  // namespace zero
