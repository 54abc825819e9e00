#include "zero/train/same_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/comm/agreement.h"
#include "zero/comm/fixed_text.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/gather_texts.h"
#include "zero/comm/token.h"

namespace zero::train {
namespace {

using Json = nlohmann::ordered_json;

// These are places on a host, and options on which only the host's own work depends. (The engine
// compares its own settings, and folders for states.)
constexpr std::array kOfAHost{"out",      "overwrite", "resume_from", "data",
                              "val_data", "model",     "threads"};

// Hashes only both ends, which are read at once: a few tokens tell one text from another.
uint64_t checksum(const TokenRange& range) {
  constexpr int64_t kTokens = 4096;
  std::vector<int64_t> tokens(static_cast<size_t>(std::min(kTokens, range.size())));
  Hash hash;
  for (const int64_t begin : {range.begin, range.end - static_cast<int64_t>(tokens.size())}) {
    if (!tokens.empty()) range.tokens->read(begin, tokens);
    for (const int64_t token : tokens) hash.add(token);
  }
  return hash.value();
}

Json json_of(const RunSettings& run, const Dataset& data) {
  auto settings = Json::parse(run.settings.dump());
  auto& options = settings.at("train");
  for (const char* key : kOfAHost) options.erase(key);
  // Hosts may name profile and model differently, so only the presence of a profile counts, and the
  // model's sizes.
  options["profile"] = !run.settings.program.profile.empty();
  const auto tokens = [](const Split& split) -> Json {
    if (split.size() == 0) return 0;
    return identity(split);
  };
  settings["sizes"] = Json::parse(run.model);
  settings["data"] = {{"training", tokens(data.train)}, {"validation", tokens(data.validation)}};
  return settings;
}

}  // namespace

std::string identity(const Split& split) {
  std::vector<std::string> sources;
  for (const auto& range : split.sources) {
    sources.push_back(fmt::format("{} tokens with the checksum {:x}{}", range.size(),
                                  checksum(range), range.tokens->marked() ? " and marks" : ""));
  }
  return fmt::format("{}", fmt::join(sources, ", "));
}

void check_resumed_data(const Progress& saved, const Split& here) {
  const auto now = identity(here);
  if (saved.data.empty() || saved.data == now) return;
  throw DataError(fmt::format(
      "The run that is resumed had other data: {}. {} has {}: the run's position in the data would "
      "mean something else. Give the same --data, in the same order.",
      saved.data, here.name(), now));
}

void check_same_run(comm::Group& group, const RunSettings& run, const Dataset& data) {
  if (group.size() == 1) return;
  const auto mine = json_of(run, data).dump();
  const auto sums = comm::gather_records(group, Hash().add(mine).value(), "settings");
  if (std::ranges::count(sums, sums.front()) == group.size()) return;
  const auto texts = comm::gather_texts(group, mine, "settings");
  const auto other =
      std::ranges::find_if(texts, [&](const std::string& text) { return text != texts.front(); });
  const auto rank = static_cast<int>(other - texts.begin());
  comm::agree<ConfigError>(group, "Comparing the settings", [&] {
    if (group.rank() != 0 && group.rank() != rank) return;
    throw ConfigError(fmt::format(
        "The ranks were not started alike. What rank 0 has -> what rank {} has: {}. Give all ranks "
        "of a run the same options, configuration and data.",
        rank, fmt::join(differences(texts.front(), *other), ", ")));
  });
}

void check_shared(comm::Group& group, const RunFolder& folder) {
  // Nobody has looked for this name before: file systems remember names that were not there.
  const comm::FixedText<40> token(comm::random_token());
  const auto tokens = comm::gather_records(group, token, "a file to look for");
  const auto file = folder.log().parent_path() / fmt::format(".seen-{}", tokens.front().view());
  comm::agree_on_rank_zero<ConfigError>(group, "Writing to the run's folder", [&] {
    if (!std::ofstream(file))
      throw ConfigError(fmt::format("Cannot write {}. Give another --out.", file.string()));
  });
  std::error_code error;
  const bool seen = std::filesystem::exists(file, error);
  const auto blind = comm::first_failure(group, !seen, "a file that rank 0 has written");
  if (group.rank() == 0) std::filesystem::remove(file, error);
  if (!blind) return;
  comm::agree<ConfigError>(group, "Looking for the run's folder", [&] {
    if (group.rank() != 0 && group.rank() != *blind) return;
    throw ConfigError(fmt::format(
        "Rank {} does not see what rank 0 writes to {}. Every rank writes its part of a checkpoint "
        "there: give an --out on a file system that all hosts share, under one path, or leave out "
        "--save-every.",
        *blind, folder.log().parent_path().string()));
  });
}

}  // namespace zero::train
