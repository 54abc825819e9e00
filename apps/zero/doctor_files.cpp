// Reads the files in which the kernel tells facts, for `zero doctor`.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

#include "apps/zero/doctor_checks.h"

namespace zero::app::checkup {

namespace fs = std::filesystem;

Finding fine(std::string section, std::string name, std::string value) {
  return {.section = std::move(section), .name = std::move(name), .value = std::move(value)};
}

Finding advice(Finding line, std::string change, std::string cost) {
  line.mark = Mark::advice;
  line.change = std::move(change);
  line.cost = std::move(cost);
  return line;
}

Finding problem(Finding line, std::string change, std::string cost) {
  line = advice(std::move(line), std::move(change), std::move(cost));
  line.mark = Mark::problem;
  return line;
}

std::string first_line(const fs::path& file) {
  std::string line;
  std::getline(std::ifstream(file), line);
  return line;
}

std::string value_of(const fs::path& file, const std::string& key) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    const auto value = line.find_first_not_of(" \t:", key.size());
    return value == std::string::npos ? "" : line.substr(value);
  }
  return "";
}

std::optional<int64_t> number(const std::string& text) {
  std::istringstream stream(text);
  int64_t value = 0;
  if (stream >> value) return value;
  return std::nullopt;
}

std::vector<int> numbers(const std::string& list) {
  std::vector<int> all;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto first = number(part);
    if (!first) continue;
    const auto dash = part.find('-');
    const auto last = dash == std::string::npos ? first : number(part.substr(dash + 1));
    for (auto i = *first; i <= last.value_or(*first); ++i) all.push_back(static_cast<int>(i));
  }
  return all;
}

std::string chosen_word(const std::string& line) {
  const auto begin = line.find('[');
  const auto end = line.find(']');
  if (begin == std::string::npos || end == std::string::npos) return line;
  return line.substr(begin + 1, end - begin - 1);
}

std::vector<fs::path> groups_of(const fs::path& root, const std::string& controller) {
  std::vector<fs::path> all;
  std::ifstream lines(root / "proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string number, controllers, path;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    const bool second = controllers.empty();
    if (!second && ("," + controllers + ",").find("," + controller + ",") == std::string::npos)
      continue;
    auto mount = root / "sys/fs/cgroup";
    if (!second) mount /= controller;
    // In a container the path may be that outside it; then the mount itself is this process's
    // group.
    auto group = mount / fs::path(path).relative_path();
    std::error_code ignored;
    if (!fs::exists(group, ignored)) group = mount;
    const auto levels = std::distance(mount.begin(), mount.end());
    for (; std::distance(group.begin(), group.end()) >= levels; group = group.parent_path())
      all.push_back(group);
  }
  return all;
}

}  // namespace zero::app::checkup
