#include "zero/report/curves.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "zero/base/error.h"
#include "zero/report/chart.h"

namespace zero::report {
namespace {

constexpr double kWidth = 560;
constexpr double kHeight = 230;
constexpr double kLeft = 64;
constexpr double kRight = kWidth - 12;
constexpr double kTop = 44;
constexpr double kBottom = kHeight - 30;
constexpr size_t kColumns = 200;  // a column is some two pixels wide
constexpr Chart::Style kTitle{.size = 14, .colour = "var(--text)", .bold = true};
constexpr Chart::Style kSmall{.size = 11, .colour = "var(--soft)"};

/// The steps of a curve that share a column of the picture.
struct Bucket {
  int64_t count = 0;
  double x = 0;
  double sum = 0;
  double least = std::numeric_limits<double>::infinity();
  double most = -std::numeric_limits<double>::infinity();
  double mean() const { return sum / static_cast<double>(count); }
  double place() const { return x / static_cast<double>(count); }
};

/// The steps that a picture shows.
struct Steps {
  double first = std::numeric_limits<double>::infinity();
  double last = -std::numeric_limits<double>::infinity();

  explicit Steps(const std::vector<Curve>& all) {
    for (const auto& curve : all) {
      for (size_t i = 0; i < curve.x.size(); ++i) {
        if (!std::isfinite(curve.y[i])) continue;
        first = std::min(first, curve.x[i]);
        last = std::max(last, curve.x[i]);
      }
    }
  }
  bool any() const { return first <= last; }
  size_t columns() const {
    return static_cast<size_t>(std::clamp(last - first + 1, 1.0, static_cast<double>(kColumns)));
  }
  size_t column(double x) const {
    const auto part = (x - first) / (last - first + 1) * static_cast<double>(columns());
    return std::min(static_cast<size_t>(part), columns() - 1);
  }
  double pixel(double x) const {
    return last > first ? kLeft + (x - first) / (last - first) * (kRight - kLeft)
                        : (kLeft + kRight) / 2;
  }
  std::vector<Bucket> of(const Curve& curve) const {
    std::vector<Bucket> all(columns());
    for (size_t i = 0; i < curve.x.size(); ++i) {
      const double y = curve.y[i];
      if (!std::isfinite(y)) continue;
      auto& column = all[this->column(curve.x[i])];
      ++column.count;
      column.x += curve.x[i];
      column.sum += y;
      column.least = std::min(column.least, y);
      column.most = std::max(column.most, y);
    }
    return all;
  }
};

/// Returns a round distance of marks, of which about `count` fit into `span`.
double round_distance(double span, double count) {
  const double power = std::pow(10, std::floor(std::log10(span / count)));
  for (const double digit : {1.0, 2.0, 2.5, 5.0}) {
    if (span / (digit * power) <= count) return digit * power;
  }
  return 10 * power;
}

/// The scale of values, with its marks.
struct Values {
  Values(double low, double high, const Axis& axis) : unit(axis.unit) {
    logarithmic = axis.may_be_logarithmic && low > 0 && high / low >= 50;
    if (logarithmic) {
      first = std::log10(low);
      last = std::log10(high);
      const auto lowest = static_cast<int>(std::ceil(first - 1e-9));
      for (int power = lowest; power <= last + 1e-9; ++power) marks.push_back(std::pow(10, power));
      if (marks.size() < 2) marks = {low, high};
      return;
    }
    if (!(high > low)) {  // one value: it stands in the middle
      const double room = low != 0 ? std::abs(low) * 0.1 : 1;
      low -= room;
      high += room;
    }
    // Marks of bytes are round in the unit that is said.
    double one = 1;
    while (unit == Unit::bytes && high / one >= 1024) one *= 1024;
    const double distance = one * round_distance((high - low) / one, 5);
    first = std::floor(low / distance + 1e-9) * distance;
    last = std::ceil(high / distance - 1e-9) * distance;
    const auto count = std::lround((last - first) / distance);
    for (int64_t i = 0; i <= count; ++i) {
      const double mark = first + static_cast<double>(i) * distance;
      marks.push_back(std::abs(mark) < 1e-9 * distance ? 0 : mark);
    }
  }
  double pixel(double value) const {
    const double place = logarithmic ? std::log10(value) : value;
    return kBottom - (place - first) / (last - first) * (kBottom - kTop);
  }

  Unit unit;
  bool logarithmic = false;
  double first = 0;
  double last = 1;
  std::vector<double> marks;
};

void draw_axes(Chart& chart, const Values& values, const Steps& steps) {
  auto at_end = kSmall;
  at_end.anchor = "end";
  auto middle = kSmall;
  middle.anchor = "middle";
  for (const double mark : values.marks) {
    const double y = values.pixel(mark);
    chart.line({{kLeft, y}, {kRight, y}}, "var(--grid)", 1);
    chart.text(kLeft - 6, y + 4, say(mark, values.unit), at_end);
  }
  const double span = std::max(1.0, steps.last - steps.first);
  const double distance = std::max(1.0, round_distance(span, 7));
  const auto lowest = static_cast<int64_t>(std::ceil(steps.first / distance));
  for (int64_t i = lowest; static_cast<double>(i) * distance <= steps.last; ++i) {
    const double mark = static_cast<double>(i) * distance;
    chart.text(steps.pixel(mark), kBottom + 16, fmt::format("{:.0f}", mark), middle);
  }
  chart.text(kRight, kBottom + 28, "step", at_end);
}

void draw_legend(Chart& chart, const std::vector<Curve>& all) {
  if (all.size() < 2) return;
  std::vector<std::pair<std::string_view, std::string_view>> entries;
  for (const auto& curve : all) entries.emplace_back(curve.colour, curve.name);
  chart.legend(kLeft, 22, entries, kSmall);
}

/// Draws boxes that nobody sees, and of which a pointer shows the numbers of a column.
void draw_tips(Chart& chart, const Steps& steps, const std::vector<Curve>& all,
               const std::vector<std::vector<Bucket>>& columns, Unit unit) {
  const size_t count = steps.columns();
  const double width = (kRight - kLeft) / static_cast<double>(count);
  for (size_t i = 0; i < count; ++i) {
    std::string tip;
    for (size_t c = 0; c < all.size(); ++c) {
      const auto& column = columns[c][i];
      if (column.count == 0) continue;
      if (tip.empty()) tip = fmt::format("step {:.0f}", column.place());
      tip += fmt::format("\n{}: {}", all[c].name, say(column.mean(), unit));
      if (column.count > 1)
        tip += fmt::format(" ({} to {})", say(column.least, unit), say(column.most, unit));
    }
    if (tip.empty()) continue;
    chart.box(kLeft + width * static_cast<double>(i), kTop, width, kBottom - kTop, "transparent",
              tip);
  }
}

void draw_curve(Chart& chart, const Curve& curve, const std::vector<Bucket>& columns,
                const Steps& steps, const Values& values) {
  std::vector<Chart::Point> line;
  std::vector<Chart::Point> upper;
  std::vector<Chart::Point> lower;
  bool several = false;
  for (const auto& column : columns) {
    if (column.count == 0) continue;
    several = several || column.count > 1;
    const double x = steps.pixel(column.place());
    line.push_back({x, values.pixel(column.mean())});
    upper.push_back({x, values.pixel(column.most)});
    lower.push_back({x, values.pixel(column.least)});
  }
  if (curve.dots || line.size() == 1) {
    for (const auto& point : line) chart.dot(point.x, point.y, 3, curve.colour);
    return;
  }
  if (several) {
    upper.insert(upper.end(), lower.rbegin(), lower.rend());
    chart.area(upper, curve.colour, 0.18);
  }
  chart.line(line, curve.colour);
}

}  // namespace

std::string say(double value, Unit unit) {
  if (unit == Unit::bytes) return format_bytes(value);
  if (unit == Unit::milliseconds) return fmt::format("{:.4g} ms", value);
  return fmt::format("{:.4g}", value);
}

std::string curves(const std::string& title, const std::vector<Curve>& all, const Axis& axis) {
  const Steps steps(all);
  if (!steps.any()) return "";
  std::vector<std::vector<Bucket>> columns;
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const auto& curve : all) {
    columns.push_back(steps.of(curve));
    for (const auto& column : columns.back()) {
      low = std::min(low, column.least);
      high = std::max(high, column.most);
    }
  }
  const Values values(low, high, axis);
  Chart chart;
  chart.text(0, 14, title, kTitle);
  draw_legend(chart, all);
  draw_axes(chart, values, steps);
  for (size_t c = 0; c < all.size(); ++c) draw_curve(chart, all[c], columns[c], steps, values);
  draw_tips(chart, steps, all, columns, axis.unit);
  return chart.element(kWidth, kHeight, title);
}

std::string layers(const std::string& title, const std::vector<Curve>& all, const Axis& axis) {
  const Steps steps(all);
  if (!steps.any()) return "";
  std::vector<std::vector<Bucket>> columns;
  for (const auto& curve : all) columns.push_back(steps.of(curve));
  double high = 0;
  for (size_t i = 0; i < steps.columns(); ++i) {
    double sum = 0;
    for (const auto& layer : columns) sum += layer[i].count > 0 ? layer[i].mean() : 0;
    high = std::max(high, sum);
  }
  const Values values(0, high, {.unit = axis.unit});
  Chart chart;
  chart.text(0, 14, title, kTitle);
  draw_legend(chart, all);
  draw_axes(chart, values, steps);
  std::vector<double> below(steps.columns(), 0);
  for (size_t c = 0; c < all.size(); ++c) {
    std::vector<Chart::Point> outline;
    std::vector<Chart::Point> lower;
    for (size_t i = 0; i < below.size(); ++i) {
      const auto& column = columns[c][i];
      if (column.count == 0) continue;
      const double x = steps.pixel(column.place());
      lower.push_back({x, values.pixel(below[i])});
      below[i] += column.mean();
      outline.push_back({x, values.pixel(below[i])});
    }
    if (outline.size() == 1) {  // one step is a bar
      for (auto* side : {&outline, &lower}) {
        side->push_back({side->front().x + 10, side->front().y});
        side->front().x -= 10;
      }
    }
    outline.insert(outline.end(), lower.rbegin(), lower.rend());
    chart.area(outline, all[c].colour, 1);
  }
  draw_tips(chart, steps, all, columns, axis.unit);
  return chart.element(kWidth, kHeight, title);
}

std::string bars(const std::string& title, const std::vector<BarPart>& parts,
                 const std::vector<Bar>& all, Unit unit) {
  constexpr double kBar = 18;
  constexpr double kName = 120;
  constexpr double kTotal = 84;
  double most = 0;
  for (const auto& bar : all) {
    double sum = 0;
    for (const double part : bar.parts) sum += part;
    most = std::max(most, sum);
  }
  if (!(most > 0)) return "";
  Chart chart;
  chart.text(0, 14, title, kTitle);
  double x = 0;
  double y = 24;
  for (const auto& part : parts) {
    const double width = 34 + 7 * static_cast<double>(part.name.size());
    if (x + width > kWidth) {
      x = 0;
      y += 18;
    }
    chart.box(x, y, 12, 12, part.colour);
    chart.text(x + 17, y + 10, part.name, kSmall);
    x += width;
  }
  y += 24;
  const double pixels = (kWidth - kName - kTotal) / most;
  for (const auto& bar : all) {
    auto name = kSmall;
    name.anchor = "end";
    chart.text(kName - 8, y + 13, bar.name, name);
    double left = kName;
    double sum = 0;
    for (size_t i = 0; i < parts.size() && i < bar.parts.size(); ++i) {
      const double width = bar.parts[i] * pixels;
      if (width > 0) {
        chart.box(left, y, width, kBar, parts[i].colour,
                  fmt::format("{}: {} {}", bar.name, parts[i].name, say(bar.parts[i], unit)));
      }
      left += width;
      sum += bar.parts[i];
    }
    chart.text(left + 6, y + 13, say(sum, unit), kSmall);
    y += kBar + 5;
  }
  return chart.element(kWidth, y + 4, title);
}

std::string_view part_colour(size_t number) {
  static constexpr std::array<std::string_view, 12> kColours{
      "var(--p0)", "var(--p1)", "var(--p2)", "var(--p3)", "var(--p4)",  "var(--p5)",
      "var(--p6)", "var(--p7)", "var(--p8)", "var(--p9)", "var(--p10)", "var(--p11)"};
  return kColours[number % kColours.size()];
}

}  // namespace zero::report
