// Layer-major accumulation: all micro-batches of a step pass one layer before the next.
//
// Note [Layer-major accumulation]
// With k micro-batches stage 3 gathers each parameter 2 k times a step, and reduces each gradient k
// times: 3 k Psi. If all micro-batches pass a layer before the next, forward gathers it once,
// backward once more, and one reduction takes the sum over micro-batches: 3 Psi, whatever k is
// (GreedySnake, 2512.17570, calls the order vertical). The same holds for parameters that are read
// from a disk. The price is recomputation, and room for the inputs of each layer: k times a hidden
// state a layer, which may go to disk (RecomputeOptions::store).
//
// Forward takes the micro-batches from the last to the first and backward from the first to the
// last. So a store of activations works as a stack, and the gradients of a parameter add up in the
// same order as at stages 0 and 1 without layer-major accumulation. So the sums over micro-batches,
// then ranks, are those of stages 0 and 1 to the bit, except for a weight that several layers
// share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "zero/engine/engine.h"
#include "zero/models/language/layer_sequence.h"

namespace zero {

/// Runs forward and backward of the model's micro-batches; `engine` takes their gradients, and one
/// Engine::step must follow. Returns their losses, without graphs. Every layer is recomputed in
/// backward, as `options` say. Random numbers are drawn in another order than micro-batch by
/// micro-batch, so dropout differs from that; it is the same in both runs of a layer. Collective as
/// Engine::accumulate. Throws as that does, and Error for a loss of several elements.
std::vector<at::Tensor> backward_layer_major(Engine& engine, const LayerSequence& model,
                                             const RecomputeOptions& options = {});

}  // namespace zero
