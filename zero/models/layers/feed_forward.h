// The feed-forward layer of a transformer: two linear layers with GELU between them.
//
// Note [Epilogues of products]
// A GPU's library of products can do more with a product while it is written (its epilogue). Where
// a device has these two operators, a feed-forward layer makes three passes less over the array
// that lies between its products:
//
//   zero::linear_gelu            h = x W + b and y = gelu(h), where y is calculated from the sums
//                                in fp32, before they are rounded to h
//   zero::linear_gelu_backward   dh = (dy W^T) gelu'(h), and the sums of its columns, which are the
//                                gradient of the bias in h. W is the weight of the product that
//                                follows GELU
//
// As in gelu_linear, h alone is kept for backward, which computes the values of GELU again for the
// gradient of the second weight. These are values of the rounded h: they may differ from those of
// the forward pass by a rounding of 16 bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "zero/models/layers/linear.h"

namespace zero {

/// Says when a device that has the operators of Note [Epilogues of products] uses them.
enum class EpilogueUse : uint8_t {
  where_faster,  ///< on the devices that a plugin expects to gain by them
  always,        ///< on all that have them
  never,
};

/// While a scope lives, feed-forward layers use epilogues so. It is a setting of the whole process,
/// where_faster without a scope: scopes nest, and do not overlap on different threads. All ranks
/// should have the same, since losses and weights differ by roundings.
class Epilogues {
 public:
  explicit Epilogues(EpilogueUse use);
  ~Epilogues();
  Epilogues(const Epilogues&) = delete;
  Epilogues& operator=(const Epilogues&) = delete;
  static EpilogueUse use();

 private:
  EpilogueUse before_;
};

/// For plugins: `faster(index)` says whether a device of this type gains by epilogues. Without it
/// all devices that have the operators do.
void set_epilogues_faster(c10::DeviceType type, bool (*faster)(c10::DeviceIndex index));

/// Returns gelu_linear(linear(x, weight1, bias1), weight2, bias2), with weights that both lie as
/// `layout` says and biases that may be undefined: x (..., in) -> (..., out). Where it is by Note
/// [Epilogues of products], for bf16 and fp16 with widths that are multiples of 8 and no autocast,
/// the result equals that up to roundings; elsewhere it is that. Backward runs once (there is no
/// second derivative). Throws as linear does.
at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& weight1, const at::Tensor& bias1,
                        const at::Tensor& weight2, const at::Tensor& bias2,
                        WeightLayout layout = WeightLayout::out_in);

}  // namespace zero
