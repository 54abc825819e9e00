// GPT-2 as a language model among others.
#pragma once

#include "zero/models/language/language_model.h"

namespace zero {

/// Returns the architecture with model_type "gpt2" and the names of Gpt2Config::preset.
Architecture gpt2_architecture();

}  // namespace zero
