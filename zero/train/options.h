// What a training run is asked to do: the `train` section of a configuration file, or the program's
// options.
#pragma once

#include "zero/config/settings.h"

namespace zero::train {

using Options = ProgramSettings;

}  // namespace zero::train
