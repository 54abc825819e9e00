// Ranks that do not compute at the same speed: jitter from step to step, and stragglers.
//
// Note [The slowest rank]
// Ranks wait for each other in every step, so a step takes as long as that of the slowest. The time
// that a rank computes is random: log-normal about its mean, and with a small chance several times
// as long. All operators of a rank's step share its factor, and the ranks' factors are independent.
// With the distribution F of a factor that of the slowest of n ranks is F^n, whose mean is computed
// here; nothing is drawn.
#pragma once

#include <cstdint>

namespace zero::plan {

/// How the times that ranks compute differ.
struct SpeedsDiffer {
  double jitter = 0;      ///< standard deviation of a rank's time, as a part of its mean
  double stragglers = 0;  ///< the chance that a rank is a straggler in a step, at most 1
  double slower = 1.5;    ///< a straggler's time, as a multiple of the others'; at least 1
};

/// Returns the expected time of the slowest of `ranks` ranks, as a multiple of the mean time of a
/// rank that is no straggler. It is 1 where speeds do not differ.
double slowest_rank(const SpeedsDiffer& differ, int64_t ranks);

}  // namespace zero::plan
