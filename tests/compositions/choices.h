// The table of choices that a case is made of. A new feature of the engine is a new row, or a new
// word of one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "zero/config/config.h"
#include "zero/optim/optimizer.h"

namespace zero::compositions {

/// A case, ready to be run.
struct Setup {
  int hosts = 1;
  int ranks_a_host = 2;
  int sum_block = 0;  ///< GroupOptions::sum_block
  std::vector<std::string_view> blocks;
  std::vector<std::string_view> steps;
  bool recomputes = false;
  /// Parameters are gathered by calls that all ranks make, so all ranks use the same ones.
  bool together = false;
  /// Vectors have a parameter group of their own, with another rate.
  bool two_groups = false;
  Optimizer optimizer = AdamW{.lr = 1e-2};
  Config config;
  /// PlainZero has none of what was chosen; the oracle is an Engine with all that only says where
  /// and when at its plainest.
  bool beyond_plain = false;

  int ranks() const { return hosts * ranks_a_host; }
};

/// One row: what may be chosen, the plainest first. A failing case is shrunk towards that.
struct Choice {
  struct Word {
    std::string_view word;
    int weight = 1;  ///< how often it is drawn, compared with the others of the row
    std::function<void(Setup&)> apply = [](Setup&) {};
  };
  std::string_view name;
  std::vector<Word> words;
};
const std::vector<Choice>& choices();

/// The chosen word of each row, by its place there.
using Case = std::vector<size_t>;
/// Draws case `number` of a seed. The same seed and number give the same case.
Case draw(uint64_t seed, uint64_t number);
/// Text that `parse` reads: "stage=3 ranks=2", without what is plainest.
std::string text_of(const Case& given);
/// Throws ConfigError naming an unknown row or word.
Case parse(std::string_view text);
Setup setup_of(const Case& given);

/// Stands for a path in the configuration until a run gives it a folder.
inline constexpr std::string_view kFolder = "FOLDER";

}  // namespace zero::compositions
