// The options of a training run: the `train` section of a configuration file, or the program's
// options.
#pragma once

#include "zero/config/settings.h"

namespace zero::train {

using Options = ProgramSettings;

}  // namespace zero::train
