// Colours and measures are those of benchmarks/draw.py.
#include "apps/zero/timeline_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string_view>

namespace zero::app::benchmarks {
namespace {

using paging::Resource;
using paging::SimulatedTask;
using paging::Work;

constexpr double kWidth = 860;  // pixels of the axis
constexpr double kLeft = 120;   // of the names beside it
constexpr double kRow = 20;
constexpr Resource kRows[] = {Resource::compute, Resource::link, Resource::up,
                              Resource::down,    Resource::disk, Resource::host};
constexpr Work kWorks[] = {Work::forward, Work::backward, Work::gather, Work::reduce,
                           Work::update,  Work::copy,     Work::read,   Work::write};

std::string_view colour(Work work) {
  constexpr std::array<std::string_view, std::size(kWorks)> kColours{
      "#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#ee8866", "#777777", "#bbbbbb"};
  return kColours[static_cast<size_t>(work)];
}

std::string escaped(std::string_view words) {
  std::string text;
  for (const char c : words) {
    if (c == '&') {
      text += "&amp;";
    } else if (c == '<') {
      text += "&lt;";
    } else if (c == '>') {
      text += "&gt;";
    } else {
      text += c;
    }
  }
  return text;
}

struct Style {
  int size = 12;
  std::string_view anchor = "start";
  std::string_view colour = "#222222";
  bool bold = false;
};

std::string text(double x, double y, std::string_view words, const Style& style) {
  return fmt::format(
      "<text x='{:.1f}' y='{:.1f}' font-size='{}' text-anchor='{}' fill='{}' font-weight='{}' "
      "font-family='Helvetica, Arial, sans-serif'>{}</text>\n",
      x, y, style.size, style.anchor, style.colour, style.bold ? "bold" : "normal", escaped(words));
}

std::string box(double x, double y, double width, double height, std::string_view fill) {
  return fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}' fill='{}'/>\n", x,
                     y, width, height, fill);
}

// Tasks of a resource that last; those of one unit that follow each other without a gap as one.
std::vector<SimulatedTask> bars(const paging::SimulatedStep& step, Resource resource) {
  std::vector<SimulatedTask> all;
  for (const auto& task : step.tasks) {
    if (task.resource != resource || task.end <= task.begin) continue;
    if (!all.empty() && all.back().work == task.work && all.back().unit == task.unit &&
        all.back().end == task.begin) {
      all.back().end = task.end;
    } else {
      all.push_back(task);
    }
  }
  return all;
}

std::string bar(const SimulatedTask& task, double top, double pixels_a_second) {
  const double x = kLeft + task.begin * pixels_a_second;
  const double width = (task.end - task.begin) * pixels_a_second;
  // A gap of half a pixel parts units where there is room for it.
  auto svg =
      box(x, top, width > 1.5 ? width - 0.5 : std::max(width, 0.2), kRow - 4, colour(task.work));
  const auto number = std::to_string(task.unit);
  if (width > 4 + 7 * static_cast<double>(number.size())) {
    const bool light = task.work == Work::backward || task.work == Work::reduce ||
                       task.work == Work::write || task.work == Work::copy;
    svg += text(x + width / 2, top + 12, number,
                {.size = 10, .anchor = "middle", .colour = light ? "#222222" : "#ffffff"});
  }
  return svg;
}

}  // namespace

std::string timeline_picture(const std::string& title, const std::string& caption,
                             const std::vector<TimelineBand>& bands) {
  double seconds = 0;
  for (const auto& band : bands) seconds = std::max(seconds, band.step.seconds);
  const double scale = seconds > 0 ? kWidth / seconds : 0;
  double top = 62;
  std::string svg;
  std::set<Work> seen;
  for (const auto& band : bands) {
    svg += text(16, top + 12, band.title, {.size = 13, .bold = true});
    top += 18;
    for (const auto resource : kRows) {
      const auto tasks = bars(band.step, resource);
      if (tasks.empty()) continue;
      svg += text(kLeft - 8, top + 13, paging::name(resource), {.anchor = "end"});
      svg += box(kLeft, top, band.step.seconds * scale, kRow - 4, "#f3f3f3");
      for (const auto& task : tasks) {
        svg += bar(task, top, scale);
        seen.insert(task.work);
      }
      top += kRow;
    }
    top += 10;
  }
  // An axis of at most a dozen marks.
  double mark = 1e-6;
  for (int digit = 0; seconds / mark > 12; ++digit) mark *= digit % 3 == 1 ? 2.5 : 2;
  for (int i = 0; i * mark <= seconds * (1 + 1e-9) && scale > 0; ++i) {
    const double x = kLeft + i * mark * scale;
    svg += fmt::format(
        "<line x1='{0:.1f}' y1='60.0' x2='{0:.1f}' y2='{1:.1f}' stroke='#dddddd' "
        "stroke-width='0.5'/>\n",
        x, top - 6);
    svg += text(x, top + 6, fmt::format("{:g} ms", i * mark * 1e3),
                {.size = 11, .anchor = "middle", .colour = "#555555"});
  }
  double x = kLeft;
  for (const auto work : kWorks) {
    if (!seen.contains(work)) continue;
    svg += box(x, top + 18, 12, 12, colour(work));
    svg += text(x + 18, top + 28, paging::name(work), {});
    x += 44 + 7 * static_cast<double>(paging::name(work).size());
  }
  const double width = kLeft + kWidth + 24;
  const double height = top + 40;
  return fmt::format(
             "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {0:.0f} {1:.0f}' "
             "width='{0:.0f}' height='{1:.0f}' role='img'>\n<title>{2}</title>\n",
             width, height, escaped(title)) +
         box(0, 0, width, height, "#ffffff") + text(16, 24, title, {.size = 16, .bold = true}) +
         text(16, 42, caption, {.colour = "#555555"}) + svg + "</svg>\n";
}

}  // namespace zero::app::benchmarks
