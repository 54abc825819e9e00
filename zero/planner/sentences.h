// The planner's answers in words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zero/planner/candidates.h"

namespace zero::plan {

/// Returns whether the run needs ZeRO, and why.
std::string zero_or_not(const Answer& answer, const Question& question);
/// Returns what binds the step of the best candidate.
std::string binds(const Candidate& best);
/// Returns the change of the machine that helps the best candidate most, and the next candidate.
std::string helps(const Table& table, const Candidate& best);
/// Returns the largest models that the cluster holds: by states alone, of which a parameter has as
/// many bytes as in `plain`, and like the question's with more layers.
std::string largest_model(const Question& question, const Candidate& plain, int64_t parameters);
/// Returns the fewest devices that hold the model: of one host, or several full hosts like those of
/// the question. `known` has the candidates of the question's own cluster.
std::string fewest_devices(const Question& question, Traces& traces,
                           const std::vector<Candidate>& known);

/// Nothing fits: what the nearest candidate lacks.
std::string nearest_lacks(const Candidate& nearest);

}  // namespace zero::plan
