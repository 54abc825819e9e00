// The frozen weights beneath adapters in fewer bits (QLoRA, arXiv 2305.14314), as a change of a
// model.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <string>

#include "zero/optim/base_format.h"

namespace zero {

/// Keeps the frozen weights of the linear layers below `root` in a format of
/// zero/optim/base_format.h. These are the layers Projection, of libzero's models and those that
/// add_lora has made of torch::nn::Linear; embeddings, output projections, norms and biases stay as
/// they are, and so do weights that several modules share. A weight becomes a parameter of bytes
/// (Byte, 1-D, of the same name) that needs no gradient, so an Engine keeps, shards and gathers it
/// as it does any frozen one. Values that a weight has are quantised; a weight without values
/// (zero::WithoutValues) gets them from files (PretrainedOptions::packed). Call it after add_lora
/// or freeze, and before the engine takes the model. Returns the number of layers.
///
/// Throws ConfigError, and changes nothing, for a layer in tiles, and where there is no such layer.
int64_t quantise_frozen(torch::nn::Module& root, BaseFormat format = BaseFormat::nf4);

/// Returns the matrices that are kept so, by the names of their parameters.
std::map<std::string, PackedMatrix> quantised_weights(const torch::nn::Module& root);

}  // namespace zero
