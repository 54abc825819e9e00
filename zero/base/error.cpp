#include "zero/base/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

namespace zero {

void ensure(bool holds, std::string_view message, std::source_location where) {
  if (holds) return;
  fmt::print(stderr, "{}:{}: broken invariant in {}: {}\n", where.file_name(), where.line(),
             where.function_name(), message);
  std::abort();
}

namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t substituted = diagonal + (lower(a[i]) == lower(b[j]) ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(std::string_view word, std::span<const std::string> known) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (const auto& candidate : known) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> known) {
  const auto best = nearest(word, known);
  return best.empty() ? "" : fmt::format(" Did you mean '{}'?", best);
}

std::string format_bytes(double bytes) {
  static constexpr std::array<const char*, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, std::abs(bytes) < 10 ? 2 : 1, kUnits[unit]);
}

std::optional<int64_t> parse_bytes(std::string_view text) {
  static constexpr std::string_view kUnits = "KMGTP";
  double number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !(number >= 0)) return std::nullopt;
  std::string unit;
  for (const char c : text.substr(static_cast<size_t>(rest - text.data()))) {
    if (c != ' ') unit += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  if (unit.ends_with('B')) unit.pop_back();
  if (unit.size() == 2 && unit.back() == 'I') unit.pop_back();
  if (unit.size() > 1) return std::nullopt;
  if (!unit.empty()) {
    const auto power = kUnits.find(unit.front());
    if (power == std::string_view::npos) return std::nullopt;
    number *= std::pow(1024.0, static_cast<double>(power) + 1);
  }
  if (number >= 9.2e18) return std::nullopt;
  return static_cast<int64_t>(number);
}

std::optional<double> parse_duration(std::string_view text) {
  static constexpr std::string_view kUnits = "dhms";
  static constexpr std::array<double, 4> kSeconds{86400, 3600, 60, 1};
  double seconds = 0;
  size_t next = 0;  // units from this index on may follow
  do {
    double number = 0;
    const auto [rest, error] =
        std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
    if (error != std::errc() || !(number >= 0)) return std::nullopt;
    text.remove_prefix(static_cast<size_t>(rest - text.data()));
    const size_t unit = text.empty() ? kUnits.size() : kUnits.find(text.front(), next);
    if (unit >= kUnits.size()) return std::nullopt;
    seconds += number * kSeconds[unit];
    next = unit + 1;
    text.remove_prefix(1);
  } while (!text.empty());
  return seconds;
}

}  // namespace zero
