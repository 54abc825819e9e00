// `zero doctor` looks for what makes a run fail. Each subject is a function that adds its lines to
// a report. It reads facts from files under a `root` where the kernel tells them in files, so that
// tests can play a machine with a folder. Nothing is timed: `zero bench` measures.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/comm/job.h"

namespace zero::app::checkup {

/// advice: it costs something. problem: training fails, or is so slow that nobody can want it.
enum class Mark : uint8_t { ok, advice, problem };

/// A line of the report. A line that is not ok has a sentence that says what to change, and one
/// that says what it costs now.
struct Finding {
  std::string section, name, value;
  Mark mark = Mark::ok;
  std::string change{}, cost{};
};

/// The job that the machine is to run.
struct Plan {
  int ranks = 1;  ///< on this host
  int hosts = 1;
};

class Report {
 public:
  /// The lines from here on belong to `section`.
  void begin(std::string section) { section_ = std::move(section); }
  void ok(std::string name, std::string value) {
    findings_.push_back({section_, std::move(name), std::move(value)});
  }
  /// Adds a line that is ok if `fits`. Otherwise it has `mark`, and says what to change.
  void check(bool fits, Mark mark, std::string name, std::string value, std::string change,
             std::string cost);
  const std::vector<Finding>& findings() const { return findings_; }
  int64_t count(Mark mark) const;

 private:
  std::string section_;
  std::vector<Finding> findings_;
};

// Cores, threads and memory: doctor_machine.cpp.

/// Returns the threads of each of `ranks` ranks: OMP_NUM_THREADS, or what `zero launch` sets.
/// Throws ConfigError where OMP_NUM_THREADS is not a number.
int threads_of(const std::filesystem::path& root, const comm::Lookup& variable, int ranks);
void check_cores(Report& report, const std::filesystem::path& root, const comm::Lookup& variable,
                 int ranks);
void check_memory(Report& report, const std::filesystem::path& root, int ranks);

// Limits, and what the kernel lets ranks do: doctor_system.cpp.

void check_limits(Report& report, const std::filesystem::path& root, const Plan& plan, int threads);
/// Tries what ranks of a host need of the kernel, and leaves nothing behind.
void check_sharing(Report& report, int ranks);
void check_uring(Report& report, int ranks);

// Disks: doctor_disks.cpp.

/// Writes and reads a file of 8 MiB in the folder `path`, and removes it.
void check_disk(Report& report, const std::filesystem::path& root, const std::string& path);

// The network: doctor_links.cpp.

void check_links(Report& report, const std::filesystem::path& root, const comm::Lookup& variable,
                 int hosts);

// Files that the kernel writes: doctor_files.cpp.

/// Returns the first line of a file; empty where there is none.
std::string first_line(const std::filesystem::path& file);
/// Returns VALUE of the line "KEY: VALUE", where `key` includes the colon; empty where there is no
/// such line.
std::string value_of(const std::filesystem::path& file, const std::string& key);
/// Returns the number at the front of `text`.
std::optional<int64_t> number(const std::string& text);
/// Returns how many numbers a list has: 4 of "0-2,5".
int count_of(const std::string& list);

}  // namespace zero::app::checkup
