// Runs a validation.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "zero/train/monitor.h"
#include "zero/train/run.h"

namespace zero::train {

/// Returns the mean loss over the task's validation after `step`: Note [Validation] in
/// validation.h. Returns none if `stop`, which gives all ranks the same answer, returns true
/// meanwhile. Collective.
std::optional<ValidationReport> validate(Run& run, int64_t step, const std::function<bool()>& stop);

}  // namespace zero::train
