// Runs a program as a user would, for tests: with its output in files, so that no pipe can fill up.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace zero::test {

using zero::TemporaryFolder;

/// The whole of a file, or "" where there is none.
std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& text);

struct Outcome {
  int status = -1;  ///< as a shell has it: 128 + N for signal N
  std::string out, err;
};

class Program {
 public:
  /// Starts `command` (found through PATH) with `variables` set in its environment; those set to ""
  /// are unset.
  explicit Program(const std::vector<std::string>& command,
                   const std::map<std::string, std::string>& variables = {});
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  /// Kills it if it still runs.
  ~Program();

  pid_t pid() const { return pid_; }
  std::string out() const;
  std::string err() const;
  void signal(int number) const;
  /// Blocks until stdout holds `text`; false where the program ended, or the time was up, without
  /// it.
  bool wait_for_output(const std::string& text,
                       std::chrono::seconds limit = std::chrono::seconds(60));
  /// Blocks until it ends. Fails the test, and kills it, where that takes longer than `limit`.
  Outcome wait(std::chrono::seconds limit = std::chrono::seconds(120));

 private:
  bool poll_end();
  TemporaryFolder folder_;
  pid_t pid_ = -1;
  int status_ = -1;
  bool ended_ = false;
};

/// Starts it and waits.
Outcome run(const std::vector<std::string>& command,
            const std::map<std::string, std::string>& variables = {});

}  // namespace zero::test
