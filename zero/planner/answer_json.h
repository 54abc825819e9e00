// The answer of a plan as JSON, for files and for other languages.
#pragma once

#include <optional>
#include <string>

#include "zero/planner/budget.h"
#include "zero/planner/planner.h"

namespace zero::plan {

/// Returns a candidate with the memory of a rank by category in bytes, what it lacks, its
/// configuration ("ds_config"), and, if it fits, its step in seconds by part.
std::string to_json(const Candidate& candidate);

/// Returns the tokens of a training, its seconds, its device hours, the part of the time that is
/// training, and its cost if it has a price.
std::string to_json(const Training& training);

/// Returns the candidate of a point with the number of ranks, and its training if there is one.
std::string to_json(const ScalePoint& point, const std::optional<Training>& training);

/// Returns all candidates ("candidates", the best one first) and the sentences of an answer.
std::string to_json(const Answer& answer);

}  // namespace zero::plan
