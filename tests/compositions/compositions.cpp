// Draws compositions of the engine's features at random, and compares what each makes of training
// with the oracle: docs/compositions.md.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <random>

#include "tests/compositions/choices.h"
#include "tests/compositions/worker.h"
#include "zero/base/error.h"

namespace zero::compositions {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = Verdict::Kind;

/// How often a case that fails by chance is tried.
constexpr int kTries = 3;

/// Returns the failure of a case, if it fails.
std::optional<std::string> failure(Worker& worker, const Case& given) {
  for (int i = 0; i < kTries; ++i) {
    const auto verdict = worker.run(given);
    if (verdict.kind == Kind::failed) return verdict.why;
  }
  return std::nullopt;
}

/// Makes one choice after the other plainer while the case still fails, until `end`.
Case shrink(Worker& worker, Case failing, std::string& why, Clock::time_point end) {
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (size_t row = failing.size(); row-- > 0;) {
      for (size_t word = 0; word < failing[row] && Clock::now() < end; ++word) {
        auto candidate = failing;
        candidate[row] = word;
        const auto still = failure(worker, candidate);
        if (!still) continue;
        failing = candidate;
        why = *still;
        smaller = true;
      }
    }
  }
  return failing;
}

/// Returns a message without its numbers: the part that messages of one kind share.
std::string kind_of(const std::string& message) {
  std::string kind;
  for (const char c : message.substr(0, 100)) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) kind += c;
  }
  return kind;
}

int main(int count, char** arguments) {
  CLI::App app("Draws compositions of the engine's features, and compares each with the oracle.");
  uint64_t seed = std::random_device()();
  uint64_t first = 0;
  uint64_t cases = UINT64_MAX;
  int64_t seconds = 10;
  int64_t limit = 120;
  std::string given;
  bool lists = false;
  bool refusals = false;
  app.add_option("--seed", seed, "Of the draws; a fresh one where it is left out");
  app.add_option("--first", first, "Number of the first case");
  app.add_option("--cases", cases, "So many cases at most");
  app.add_option("--seconds", seconds, "So long at most; 0: as long as it takes")
      ->capture_default_str();
  app.add_option("--limit", limit, "Seconds after which a case counts as one that hangs")
      ->capture_default_str();
  auto* const one = app.add_option("--case", given, "Runs this case alone, as a failure prints it");
  app.add_flag("--list", lists, "Prints the table of choices");
  app.add_flag("--refusals", refusals, "Prints what was refused, how often, and an example");
  CLI11_PARSE(app, count, arguments);
  std::signal(SIGPIPE, SIG_IGN);
  if (lists) {
    for (const auto& row : choices()) {
      std::string words;
      for (const auto& word : row.words) words += fmt::format(" {}", word.word);
      fmt::print("{}:{}\n", row.name, words);
    }
    return 0;
  }
  Worker worker{std::chrono::seconds(limit)};
  constexpr std::array kNames{"same", "near", "refused", "FAILED"};
  if (one->count() > 0) {
    const auto verdict = worker.run(parse(given));
    fmt::print("{} {}\n", kNames.at(static_cast<size_t>(verdict.kind)), verdict.why);
    return verdict.kind == Kind::failed ? 1 : 0;
  }
  fmt::print("seed {}\n", seed);
  std::fflush(stdout);
  std::array<uint64_t, 4> counts{};
  std::map<std::string, std::pair<uint64_t, std::string>> refused;  // how often, and one of them
  const auto begin = Clock::now();
  const auto end =
      begin + (seconds > 0 ? std::chrono::seconds(seconds) : std::chrono::hours(24 * 365));
  for (uint64_t number = first; number - first < cases && Clock::now() < end; ++number) {
    auto drawn = draw(seed, number);
    auto verdict = worker.run(drawn);
    ++counts.at(static_cast<size_t>(verdict.kind));
    if (verdict.kind == Kind::refused) {
      auto& [times, example] = refused[kind_of(verdict.why)];
      if (++times == 1) example = text_of(drawn);
    }
    if (verdict.kind != Kind::failed) continue;
    fmt::print("FAILED --seed {} --first {}: {}\n  as drawn: --case '{}'\n", seed, number,
               verdict.why, text_of(drawn));
    std::fflush(stdout);
    if (const auto again = failure(worker, drawn)) {
      verdict.why = *again;
      drawn = shrink(worker, drawn, verdict.why, Clock::now() + std::chrono::minutes(2));
      fmt::print("  smallest: --case '{}'\n  which {}\n", text_of(drawn), verdict.why);
    } else {
      fmt::print("  which did not fail again in {} tries\n", kTries);
    }
    std::fflush(stdout);
  }
  const double took = std::chrono::duration<double>(Clock::now() - begin).count();
  fmt::print("{} same, {} near, {} refused, {} failed in {:.0f} s (seed {})\n", counts[0],
             counts[1], counts[2], counts[3], took, seed);
  if (refusals) {
    for (const auto& [kind, found] : refused)
      fmt::print("{:7} {}\n        --case '{}'\n", found.first, kind, found.second);
  }
  return counts[3] > 0 ? 1 : 0;
}

}  // namespace
}  // namespace zero::compositions

int main(int count, char** arguments) {
  try {
    return zero::compositions::main(count, arguments);
  } catch (const zero::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 2;
  }
}
