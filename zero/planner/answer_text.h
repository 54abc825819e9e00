// The answer of a plan as text for people: what `zero plan` and `libzero.plan` print.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "zero/planner/budget.h"
#include "zero/planner/planner.h"

namespace zero::plan {

/// Returns what was asked, in a line: the model's name, its dtype and size, the batch, the
/// machines.
std::string title(const std::string& model, const Question& question, const Answer& answer);

/// Returns what was measured of this machine (measured_here), in a line.
std::string here_text(const Cluster& cluster);

/// Returns the first `rows` candidates as a table of memory, times and speed, one line each.
std::string table_text(const std::vector<Candidate>& candidates, size_t rows);

/// Returns a time for people: "3.2 hours".
std::string duration(double seconds);

/// Returns what a candidate fits into, or lacks: "fits", "lacks device 3.0 GiB".
std::string verdict(const Candidate& candidate);

/// Returns the memory of a rank by category, one line each, and the moment of the most. `of` names
/// the candidate: "the first one".
std::string memory_text(const Candidate& candidate, const std::string& of);

/// Returns the sentences of an answer, one line each: whether ZeRO is needed, what binds the step,
/// what helps, what the cluster holds.
std::string sentences_text(const Answer& answer);

/// Returns a line for each operator whose memory is not exact.
std::string bounds_text(const std::vector<Bound>& bounds);

/// Returns what a training takes, in a line. `failures` says that it counts them.
std::string training_text(const Training& training, bool failures);

/// Returns the training of a candidate; none where nobody asked for it, or where it does not fit.
using TrainingOf = std::function<std::optional<Training>(const Candidate& candidate)>;
/// Returns the points of scale() as a table, one line each, with the time of each one's training
/// and its cost where it has a price.
std::string scale_text(const std::vector<ScalePoint>& points, const TrainingOf& training_of);

/// Returns the text of an answer without trainings and other clusters, of the first `rows`
/// candidates.
std::string to_text(const Answer& answer, size_t rows);

}  // namespace zero::plan
