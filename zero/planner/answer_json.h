// The answer of a plan as JSON, for files and for other languages.
#pragma once

#include <string>

#include "zero/planner/planner.h"

namespace zero::plan {

/// Returns a candidate with the memory of a rank by category in bytes, what it lacks, its
/// configuration ("ds_config"), and, if it fits, its step in seconds by part.
std::string to_json(const Candidate& candidate);

/// Returns all candidates ("candidates", the best one first) and the sentences of an answer.
std::string to_json(const Answer& answer);

}  // namespace zero::plan
