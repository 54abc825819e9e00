// Generates text from the model under training.
#pragma once

#include <functional>

#include "zero/train/run.h"

namespace zero::train {

/// Generates `sample_tokens` from the prompt, fewer where `stop`, which is asked on all ranks
/// alike, says so meanwhile, and reports them: token numbers where the data does not say how to
/// decode them. Collective.
void sample(Run& run, const std::function<bool()>& stop);

}  // namespace zero::train
