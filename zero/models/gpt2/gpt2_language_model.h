// GPT-2 as a language model among others.
#pragma once

#include "zero/models/language/language_model.h"

namespace zero {

/// model_type "gpt2"; Gpt2Config::preset's names.
Architecture gpt2_architecture();

}  // namespace zero
