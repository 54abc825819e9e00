// The report of `zero doctor`, and the files in which the kernel tells facts.
#include <algorithm>
#include <fstream>
#include <sstream>

#include "apps/zero/doctor_checks.h"

namespace zero::app::checkup {

namespace fs = std::filesystem;

void Report::check(bool fits, Mark mark, std::string name, std::string value, std::string change,
                   std::string cost) {
  ok(std::move(name), std::move(value));
  if (fits) return;
  auto& line = findings_.back();
  line.mark = mark;
  line.change = std::move(change);
  line.cost = std::move(cost);
}

int64_t Report::count(Mark mark) const {
  return std::count_if(findings_.begin(), findings_.end(),
                       [&](const Finding& finding) { return finding.mark == mark; });
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
    const auto value = line.find_first_not_of(" \t", key.size());
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

int count_of(const std::string& list) {
  int64_t count = 0;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto first = number(part);
    if (!first) continue;
    const auto dash = part.find('-');
    const auto last = dash == std::string::npos ? first : number(part.substr(dash + 1));
    count += last.value_or(*first) - *first + 1;
  }
  return static_cast<int>(count);
}

}  // namespace zero::app::checkup
