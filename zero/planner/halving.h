// Finds the fastest of some candidates by short runs: all run for a few steps, the faster half for
// twice as many, and so on.
//
// Note [Noise of a median]
// Steps that vary by chance, and independently, have a median that varies less, the more there are.
// If they are normally distributed with the standard deviation s, their quartiles are 2 x 0.6745 s
// apart, and the standard error of the median of n steps is about 1.2533 s / sqrt(n). With h, half
// the distance of the quartiles, that is 1.858 h / sqrt(n). The medians of two candidates with the
// standard errors a and b are told apart where they differ by more than sqrt(a^2 + b^2). Twice as
// many steps shrink that by the square root of two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zero::plan {

/// The speed of a candidate in a short run.
struct Speed {
  double seconds = 0;         ///< of a step: the median of its steps
  double standard_error = 0;  ///< of that median, in seconds: Note [Noise of a median]
  std::string failure{};      ///< a sentence; not empty: it did not run
};

/// The fewest steps whose quartiles say something.
inline constexpr int64_t kFewestSteps = 3;

/// Returns the speed of a run whose steps took these `seconds`, in any order. Its failure says so
/// where there are fewer than kFewestSteps.
Speed speed_of_steps(std::vector<double> seconds);

struct HalvingOptions {
  int64_t first_steps = 4;  ///< of each candidate in the first round; each round has twice as many
};

struct Tried {
  size_t candidate = 0;
  int64_t steps = 0;  ///< of its last run
  Speed speed{};      ///< in its last run
};

/// Measures candidates 0 to `count` - 1, which are in the order of expectation, by
/// `measure(candidate, steps)`. Stops when one is left, or when the fastest and the slowest of
/// those that are left cannot be told apart (Note [Noise of a median]): then the one that was
/// expected to be the best of them comes first. Returns all, the best one first, those that were
/// dropped later before those that were dropped earlier, and those that did not run last.
std::vector<Tried> halve(size_t count,
                         const std::function<Speed(size_t candidate, int64_t steps)>& measure,
                         const HalvingOptions& options = {});

}  // namespace zero::plan
