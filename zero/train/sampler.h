// Generates text from the model under training.
#pragma once

#include <functional>

#include "zero/train/run.h"

namespace zero::train {

/// Generates `sample_tokens` from the prompt and reports them; as token numbers if the data does
/// not say how to decode them. Generates fewer if `stop`, which gives all ranks the same answer,
/// returns true meanwhile. Collective.
void sample(Run& run, const std::function<bool()>& stop);

}  // namespace zero::train
