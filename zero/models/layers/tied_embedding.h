// The embedding of a tied weight, which is also the output projection.
//
// Note [Tied gradient]
// A tied weight gets a gradient twice: a dense one from the output projection, and some rows from
// the embedding. Autograd would make both dense and add them, which takes three arrays as large as
// the weight (147 MiB each for GPT-2 in fp32) to change the rows of a few hundred tokens. Instead
// the projection leaves its gradient in a slot, and the embedding, whose backward always runs
// later, adds its rows to it in place and passes it on. The slot has its memory from the start of
// forward, so that the largest gradient does not lie among the activations, which go before it.
// Where the collector of gradients takes tiles it needs no memory: Note [Tied gradient in tiles] in
// engine/look_up_gradient.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

/// Returns an empty slot for one forward and backward pass, of the dtype of `weight`, with memory
/// for its gradient unless that is made in backward
/// (LinearCrossEntropyOptions::weight_in_backward).
at::Tensor gradient_slot(const at::Tensor& weight, bool made_in_backward = false);

/// Returns rows of `weight` (V, C): indices (...) int64 -> (..., C). In backward the gradient that
/// `slot` holds by then (LinearCrossEntropyOptions::weight_slot), or zeros, plus the rows of this
/// embedding, becomes the gradient of `weight`; the row `padding` gets none from here (-1: all do).
at::Tensor tied_embedding(const at::Tensor& weight, const at::Tensor& indices,
                          const at::Tensor& slot, int64_t padding = -1);

}  // namespace zero
