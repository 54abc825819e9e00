#include "apps/zero/timeline_picture.h"

#include <algorithm>
#include <array>
#include <set>
#include <string_view>

#include "zero/report/chart.h"

namespace zero::app::benchmarks {
namespace {

using paging::Resource;
using paging::SimulatedTask;
using paging::Work;
using report::Chart;

constexpr double kWidth = 860;  // pixels of the axis
constexpr double kLeft = 120;   // pixels left of it, for the names of the rows
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

/// Returns the tasks of a resource that take time. Those of one unit that follow each other without
/// a gap are joined.
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

void draw_bar(Chart& chart, const SimulatedTask& task, double top, double pixels_a_second) {
  const double x = kLeft + task.begin * pixels_a_second;
  const double width = (task.end - task.begin) * pixels_a_second;
  // A gap of half a pixel parts units where there is room for it.
  chart.box(x, top, width > 1.5 ? width - 0.5 : std::max(width, 0.2), kRow - 4, colour(task.work));
  const auto number = std::to_string(task.unit);
  if (width <= 4 + 7 * static_cast<double>(number.size())) return;
  const bool light = task.work == Work::backward || task.work == Work::reduce ||
                     task.work == Work::write || task.work == Work::copy;
  chart.text(x + width / 2, top + 12, number,
             {.size = 10, .anchor = "middle", .colour = light ? "#222222" : "#ffffff"});
}

}  // namespace

std::string timeline_picture(const std::string& title, const std::string& caption,
                             const std::vector<TimelineBand>& bands) {
  double seconds = 0;
  for (const auto& band : bands) seconds = std::max(seconds, band.step.seconds);
  const double scale = seconds > 0 ? kWidth / seconds : 0;
  double top = 62;
  Chart chart;
  std::set<Work> seen;
  for (const auto& band : bands) {
    chart.text(16, top + 12, band.title, {.size = 13, .bold = true});
    top += 18;
    for (const auto resource : kRows) {
      const auto tasks = bars(band.step, resource);
      if (tasks.empty()) continue;
      chart.text(kLeft - 8, top + 13, paging::name(resource), {.anchor = "end"});
      chart.box(kLeft, top, band.step.seconds * scale, kRow - 4, "#f3f3f3");
      for (const auto& task : tasks) {
        draw_bar(chart, task, top, scale);
        seen.insert(task.work);
      }
      top += kRow;
    }
    top += 10;
  }
  chart.time_axis(kLeft, 60, top - 6, seconds, scale);
  std::vector<std::pair<std::string_view, std::string_view>> entries;
  for (const auto work : kWorks) {
    if (seen.contains(work)) entries.emplace_back(colour(work), paging::name(work));
  }
  chart.legend(kLeft, top + 18, entries);
  return chart.svg(kLeft + kWidth + 24, top + 40, title, caption);
}

}  // namespace zero::app::benchmarks
