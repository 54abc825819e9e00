// `zero bench`: its subjects, one file each, and what they share.
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
int optimizer(const Arguments& arguments);
int pager(const Arguments& arguments);
int step(const Arguments& arguments);
int timeline(const Arguments& arguments);

using Json = nlohmann::ordered_json;

/// Where a benchmark's results go besides the table: the option --json of every subject.
class JsonFile {
 public:
  void add_to(OptionParser& parser);
  /// Throws ConfigError where the file could not be written, before the work is done.
  void check() const;
  /// Writes {"benchmark", "version", "machine", "options", "results"}, if a file was asked for.
  /// Throws Error.
  void write(const std::string& subject, const Json& machine, const Json& options,
             const Json& results) const;

 private:
  std::string path_;
};

/// The processor, its cores, and how busy it is just now.
Json machine();
/// The same in a line.
std::string describe(const Json& machine);

/// "4 on 2 hosts, 2 on each".
std::string places_of(const comm::Topology& topology);

/// Of several runs of one thing; `least` and `most` are the spread.
struct Summary {
  double median = 0, least = 0, most = 0;
  Json json() const { return {{"median", median}, {"min", least}, {"max", most}}; }
};
/// `values` has one or more.
Summary summarize(std::vector<double> values);

/// Seconds of AdamW's update of whole models in bf16 with fp32 master weights, printed row by row
/// beside the published ones. Throws OutOfMemory, before it allocates anything, for a size that
/// does not fit.
Json whole_models(const std::vector<int64_t>& sizes, const std::vector<int>& threads, int rounds);

/// A file that is to be written could be: throws ConfigError naming `option`. An empty path will
/// do.
void check_file(const char* option, const std::string& path);

/// Every element is the name of something that exists, without repetition. Throws ConfigError
/// naming `option`.
void check_distinct(const char* option, const std::vector<std::string>& values);

}  // namespace zero::app::benchmarks
