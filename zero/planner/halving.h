// Finds the fastest of some candidates by short runs: all run for a few steps, the faster half for
// twice as many, and so on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zero::plan {

/// The speed of a candidate in a short run.
struct Speed {
  double seconds = 0;     ///< of a step: the median of its steps
  double spread = 0;      ///< half the distance of the steps' quartiles, in seconds
  std::string failure{};  ///< a sentence; not empty: it did not run
};

struct HalvingOptions {
  int64_t first_steps = 4;  ///< of each candidate in the first round; each round has twice as many
};

struct Tried {
  size_t candidate = 0;
  int64_t steps = 0;  ///< of its last run
  Speed speed{};      ///< in its last run
};

/// Measures candidates 0 to `count` - 1, which are in the order of expectation, by
/// `measure(candidate, steps)`. Stops when one is left, or when those that are left differ by less
/// than their spread: then the one that was expected to be the best of them comes first. Returns
/// all, the best one first, those that were dropped later before those that were dropped earlier,
/// and those that did not run last.
std::vector<Tried> halve(size_t count,
                         const std::function<Speed(size_t candidate, int64_t steps)>& measure,
                         const HalvingOptions& options = {});

}  // namespace zero::plan
