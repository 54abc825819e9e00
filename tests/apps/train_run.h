// Small runs of `zero train`, for tests.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/run_program.h"

namespace zero::test {

using Json = nlohmann::json;

/// Returns the processes whose parent is `parent`: the ranks of a launcher.
std::vector<pid_t> children_of(pid_t parent);

/// A folder with a text to learn, a tiny model's configuration and a place for runs.
class TrainFolder {
 public:
  TrainFolder();
  std::string text() const { return folder_ / "text.txt"; }
  std::string model() const { return folder_ / "tiny.json"; }
  std::filesystem::path out(const std::string& name = "run") const { return folder_ / name; }
  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }

  /// `zero train` of the tiny model on the text, with `more` behind (a later option comes first).
  std::vector<std::string> command(const std::vector<std::string>& more = {},
                                   const std::string& run = "run") const;
  /// `zero launch` with `options` of that training on `ranks` ranks, which starts them again.
  std::vector<std::string> elastic(const std::string& ranks,
                                   const std::vector<std::string>& options,
                                   const std::vector<std::string>& more) const;
  Outcome train(const std::vector<std::string>& more = {}, const std::string& run = "run") const;

  std::vector<Json> log(const std::string& run = "run") const;
  /// The log's steps, and its only object of one event.
  std::vector<Json> steps(const std::string& run = "run") const;
  Json event(const std::string& name, const std::string& run = "run") const;
  std::vector<float> losses(const std::string& run = "run") const;
  std::string weights(const std::string& run = "run") const {
    return read_file(out(run) / "model.safetensors");
  }
  /// Blocks until the log has `step`; false where that takes longer than a minute.
  bool wait_for_step(int64_t step, const std::string& run = "run") const;

 private:
  TemporaryFolder folder_;
};

}  // namespace zero::test
