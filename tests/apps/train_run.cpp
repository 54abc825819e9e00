#include "tests/apps/train_run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <sstream>

namespace zero::test {

std::vector<pid_t> children_of(pid_t parent) {
  std::istringstream words(read_file(fmt::format("/proc/{0}/task/{0}/children", parent)));
  std::vector<pid_t> children;
  for (pid_t pid = 0; words >> pid;) children.push_back(pid);
  return children;
}

TrainFolder::TrainFolder() {
  std::string text;
  for (int i = 0; text.size() < 40000; ++i) {
    text += "line " + std::to_string(i % 97) + ": the quick brown fox jumps over the lazy dog\n";
  }
  write_file(this->text(), text);
  write_file(model(),
             R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
                          "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})");
}

std::vector<std::string> TrainFolder::command(const std::vector<std::string>& more,
                                              const std::string& run) const {
  const std::vector<std::pair<std::string, std::string>> defaults{
      {"--model", model()},  {"--data", text()},        {"--out", out(run)},
      {"--nproc", "2"},      {"--seq", "32"},           {"--micro-batch", "4"},
      {"--steps", "6"},      {"--lr", "1e-2"},          {"--warmup", "0"},
      {"--threads", "1"},    {"--eval-tokens", "512"},  {"--sample-tokens", "8"},
      {"--prompt", "line "}, {"--schedule", "constant"}};
  std::vector<std::string> words{ZERO_PROGRAM, "train"};
  for (const auto& [name, value] : defaults) {
    if (std::find(more.begin(), more.end(), name) != more.end()) continue;
    words.insert(words.end(), {name, value});
  }
  for (const auto& word : more) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

std::vector<std::string> TrainFolder::elastic(const std::string& ranks,
                                              const std::vector<std::string>& options,
                                              const std::vector<std::string>& more) const {
  std::vector<std::string> words{ZERO_PROGRAM, "launch", "-n", ranks, "--max-restarts", "2"};
  words.insert(words.end(), options.begin(), options.end());
  words.emplace_back("--");
  auto training = command(more);
  const auto nproc = std::find(training.begin(), training.end(), "--nproc");
  if (nproc != training.end()) training.erase(nproc, nproc + 2);
  words.insert(words.end(), training.begin(), training.end());
  return words;
}

Outcome TrainFolder::train(const std::vector<std::string>& more, const std::string& run) const {
  return test::run(command(more, run));
}

std::vector<Json> TrainFolder::log(const std::string& run) const {
  std::istringstream text(read_file(out(run) / "log.jsonl"));
  std::vector<Json> lines;
  for (std::string line; std::getline(text, line);) {
    if (auto object = Json::parse(line, nullptr, false); !object.is_discarded())
      lines.push_back(std::move(object));
  }
  return lines;
}

std::vector<Json> TrainFolder::steps(const std::string& run) const {
  std::vector<Json> found;
  for (const auto& line : log(run)) {
    if (!line.contains("event")) found.push_back(line);
  }
  return found;
}

Json TrainFolder::event(const std::string& name, const std::string& run) const {
  Json found;
  for (const auto& line : log(run)) {
    if (!line.contains("event") || line["event"] != name) continue;
    EXPECT_TRUE(found.is_null()) << "more than one event '" << name << "'";
    found = line;
  }
  EXPECT_FALSE(found.is_null()) << "no event '" << name << "'";
  return found;
}

std::vector<float> TrainFolder::losses(const std::string& run) const {
  std::vector<float> losses;
  for (const auto& step : steps(run)) losses.push_back(step["loss"].get<float>());
  return losses;
}

bool TrainFolder::wait_for_step(int64_t step, const std::string& run) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (std::chrono::steady_clock::now() < deadline) {
    const auto done = steps(run);
    if (!done.empty() && done.back()["step"].get<int64_t>() >= step) return true;
    usleep(20000);
  }
  return false;
}

}  // namespace zero::test
