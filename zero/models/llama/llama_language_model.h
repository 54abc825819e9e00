// Llama and its relatives as language models among others.
#pragma once

#include "zero/models/language/language_model.h"
#include "zero/models/llama/llama_config.h"

namespace zero {

/// Returns the architecture of a family. It has no names: sizes come from a config.json.
Architecture llama_architecture(LlamaFamily family);

}  // namespace zero
