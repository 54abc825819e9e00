// BERT as a language model among others.
#pragma once

#include "zero/models/language/language_model.h"

namespace zero {

/// model_type "bert".
Architecture bert_architecture();

}  // namespace zero
