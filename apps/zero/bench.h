// `zero bench` has a file for each subject; this is what they share, also with the programs of
// benchmarks/programs.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/comm/topology.h"

namespace zero::app::benchmarks {

int collectives(const Arguments& arguments);
int links(const Arguments& arguments);
int nvme(const Arguments& arguments);
int step(const Arguments& arguments);
int timeline(const Arguments& arguments);

using Json = nlohmann::ordered_json;

/// The option --json of every subject names a file that gets the results besides the table.
class JsonFile {
 public:
  void add_to(OptionParser& parser);
  /// Throws ConfigError where the file could not be written, before the work is done.
  void check() const;
  const std::string& path() const { return path_; }
  /// Writes {"benchmark", "version", "machine", "options", "results"}, if a file was asked for.
  /// Throws Error.
  void write(const std::string& subject, const Json& machine, const Json& options,
             const Json& results) const;

 private:
  std::string path_;
};

/// Returns the processor, its cores, and how busy it is just now.
Json machine();
/// Returns a machine in one line.
std::string describe(const Json& machine);

/// Returns where the ranks are: "4 on 2 hosts, 2 on each".
std::string places_of(const comm::Topology& topology);

/// The results of several runs of one thing; `least` and `most` are the spread.
struct Summary {
  double median = 0, least = 0, most = 0;
  Json json() const { return {{"median", median}, {"min", least}, {"max", most}}; }
};
/// Summarizes one value or more.
Summary summarize(std::vector<double> values);

/// Throws ConfigError naming `option` where the file could not be written. An empty path passes.
void check_file(const char* option, const std::string& path);

/// Throws ConfigError naming `option` where a value stands twice.
void check_distinct(const char* option, const std::vector<std::string>& values);

}  // namespace zero::app::benchmarks
