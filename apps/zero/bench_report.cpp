// Reports of the benchmarks.
#include <fmt/format.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>
#include <thread>

#include "apps/zero/bench.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"

namespace zero::app::benchmarks {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const auto colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

}  // namespace

void JsonFile::add_to(OptionParser& parser) {
  parser.add_option("--json", path_, "File for the figures, which it replaces")->type_name("FILE");
}

void JsonFile::check() const { check_file("--json", path_); }

void JsonFile::write(const std::string& subject, const Json& machine, const Json& options,
                     const Json& results) const {
  if (path_.empty()) return;
  const Json whole{{"benchmark", subject},
                   {"version", {{"zero", ZERO_VERSION}, {"libtorch", TORCH_VERSION}}},
                   {"machine", machine},
                   {"options", options},
                   {"results", results}};
  const std::string text = whole.dump(2) + "\n";
  write_file(path_, text, fail<Error>);
}

void check_file(const char* option, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  std::error_code ignored;
  const fs::path file(path);
  if (fs::is_directory(file, ignored)) {
    throw ConfigError(fmt::format("{} is {}, which is a folder; name a file.", option, path));
  }
  // It is replaced by a rename: a link or a device would be, too.
  const auto type = fs::symlink_status(file, ignored).type();
  if (type != fs::file_type::not_found && type != fs::file_type::regular) {
    throw ConfigError(fmt::format("{} is {}, which is no regular file but a {}; name another file.",
                                  option, path,
                                  type == fs::file_type::symlink ? "link" : "device or a pipe"));
  }
  const auto folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, ignored) || access(folder.c_str(), W_OK) != 0) {
    throw ConfigError(fmt::format("{} is {}, but {} is no folder that can be written to.", option,
                                  path, folder.string()));
  }
}

Json machine() {
  std::array<double, 1> load{};
  Json json{{"processor", processor()}, {"cores", std::thread::hardware_concurrency()}};
  json["load"] = getloadavg(load.data(), 1) == 1 ? Json(load[0]) : Json();
  return json;
}

std::string describe(const Json& machine) {
  const auto load = machine["load"].is_null()
                        ? std::string("unknown")
                        : fmt::format("{:.2f}", machine["load"].get<double>());
  return fmt::format("{}, {} cores, load {} before the start",
                     machine["processor"].get<std::string>(), machine["cores"].get<unsigned>(),
                     load);
}

std::string places_of(const comm::Topology& topology) {
  if (topology.hosts == 1) return fmt::format("{} on one host", topology.local_size);
  return fmt::format("{} on {} hosts, {} on each", topology.hosts * topology.local_size,
                     topology.hosts, topology.local_size);
}

Summary summarize(std::vector<double> values) {
  ensure(!values.empty(), "there is something to summarize");
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {.median = n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2,
          .least = values.front(),
          .most = values.back()};
}

void check_distinct(const char* option, const std::vector<std::string>& values) {
  std::set<std::string_view> seen;
  for (const auto& value : values) {
    if (seen.insert(value).second) continue;
    throw ConfigError(fmt::format("{} names {} twice; once is enough.", option, value));
  }
}

}  // namespace zero::app::benchmarks
