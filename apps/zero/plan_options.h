// The options of `zero plan`, and what they mean.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/zero/bench.h"
#include "apps/zero/options.h"
#include "zero/planner/budget.h"
#include "zero/planner/goodput.h"
#include "zero/planner/planner.h"

namespace zero::app::planning {

/// The options, as they are given. The functions throw ConfigError for a value that means nothing.
struct Options {
  std::string model = "gpt2";
  int64_t batch = 256;
  int64_t seq = 1024;
  std::string dtype = "bf16";
  std::string autocast;
  std::string device = "h100";
  std::string hardware;
  int64_t hosts = 1;
  int64_t per_host = 0;
  std::string host_memory, link, network, nvme, pcie, scale, out, svg;
  std::string tokens;
  double price = 0;
  bool here = false;
  bool disk_given = false;
  std::string nvme_path = "/local_nvme";
  int64_t most_micro_batch = 64;
  int64_t rows = 8;
  std::vector<std::string> updates;
  double jitter = 0;
  double stragglers = 0;
  double straggler_slower = 0;
  double mtbf = 0;
  double checkpoint = 60;
  double restart = 300;
  bool operators = false;
  std::string flops, bandwidth;
  bool devices = false;
  bool papers = false;
  benchmarks::JsonFile json;

  /// Returns the machines. With `here` it measures this one.
  plan::Cluster cluster() const;
  /// Returns the device of --operators, whose speeds are those that operators reach.
  plan::Device device_of_operators() const;
  std::optional<at::ScalarType> autocast_dtype() const;
  /// Returns the first and the last number of ranks of --scale.
  std::pair<int64_t, int64_t> scale_range() const;
  /// Returns the failures of so many devices, or none.
  std::optional<plan::Failures> failures(int64_t devices) const;
  /// Returns the training that --tokens asks for, or none.
  std::optional<plan::Training> training(const plan::Candidate& candidate) const;
};

/// Reads the command line. Returns the status to end with, if there is nothing to plan. Throws
/// ConfigError for options that do not go together.
std::optional<int> read_command_line(const Arguments& arguments, Options& o);

}  // namespace zero::app::planning
