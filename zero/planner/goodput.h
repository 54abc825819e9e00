// Failures: how often a long run should save, and what part of its time is then training.
//
// Young (Communications of the ACM 17(9), 1974) and Daly (Future Generation Computer Systems 22(3),
// 2006), for failures that come independently of each other, at any time alike.
#pragma once

#include <cstdint>

namespace zero::plan {

struct Failures {
  double between = 0;     ///< mean seconds between failures of one device
  int64_t devices = 1;    ///< any of which ends the step
  double checkpoint = 0;  ///< seconds in which training waits for a checkpoint
  double restart = 0;     ///< seconds from a failure until training goes on

  /// Returns the mean seconds between failures of the job.
  double of_job() const { return between / static_cast<double>(devices); }
};

/// Returns the seconds of training between checkpoints that lose least, by Daly's formula of higher
/// order; Young's is its first term.
double best_interval(const Failures& failures);
double youngs_interval(const Failures& failures);

/// Returns the part of the time that is training which is not lost, if a checkpoint is made after
/// each `interval` seconds of training.
double goodput(const Failures& failures, double interval);

}  // namespace zero::plan
