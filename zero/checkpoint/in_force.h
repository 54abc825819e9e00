// Parameters in force beside a delayed update, in a manifest.
//
// A run may be saved while an update is delayed. The update is complete in the checkpoint: the
// state "parameter" has the parameters after it. The state kInForce has those that the next step
// computes with. docs/checkpoint-format.md says what that means for a reader.
#pragma once

#include <cstdint>

#include "zero/checkpoint/manifest.h"

namespace zero {

inline constexpr const char* kInForce = "in_force";
/// The version of a manifest with such a state, which readers of Manifest::kVersion would pass
/// over.
inline constexpr int64_t kVersionInForce = 3;

/// Returns whether some parameter has this state.
bool has_in_force(const Manifest& manifest);
/// Returns the version of the format that a manifest needs.
int64_t version_of(const Manifest& manifest);

}  // namespace zero
