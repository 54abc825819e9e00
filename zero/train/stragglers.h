// Names ranks that keep the others waiting.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zero::train {

/// The times of a rank in one step, without its waits for other ranks.
struct RankTime {
  float busy_ms = 0;  ///< computing, and waiting for its disk
  float disk_ms = 0;  ///< waiting for its disk
};

/// Compares the ranks over windows of kWindow steps. Each counts by the median of its steps, so
/// that a few slow steps (a page that came late) say nothing. Reserves its memory at construction.
class Stragglers {
 public:
  static constexpr size_t kWindow = 16;
  /// A rank is slow if it takes this many times as long as the middle one of the others.
  static constexpr double kSlow = 1.2;

  /// `ranks_a_host` consecutive ranks are on one host; 0: one host.
  explicit Stragglers(int ranks, int ranks_a_host = 0);

  /// Adds the times of all ranks in one step. If a window ends, and a rank is slow that was not in
  /// the window before, returns a sentence that names all slow ranks; otherwise an empty text.
  std::string add(std::span<const RankTime> times);

 private:
  struct Medians {
    double busy = 0;
    double disk = 0;
  };
  Medians medians_of(size_t rank);
  std::string told_of(size_t rank, const std::vector<Medians>& all) const;

  size_t ranks_;
  int ranks_a_host_;
  size_t steps_ = 0;             // in this window
  std::vector<RankTime> times_;  // by rank, kWindow each
  std::vector<uint8_t> slow_;    // by rank, in the window before
  std::vector<float> scratch_;
};

}  // namespace zero::train
