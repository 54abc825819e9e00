#include "zero/report/plan_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/report/chart.h"

namespace zero::report {
namespace {

constexpr std::array<std::string_view, kCategories> kOfCategory{
    "#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#ee8866",
    "#777777", "#99ddff", "#44bb99", "#bbcc33", "#ffaabb", "#cfcfcf"};

struct StepPart {
  std::string_view name;
  std::string_view colour;
  double plan::StepTime::*seconds;
};
constexpr std::array<StepPart, 6> kStepParts{{{"compute", "#4477aa", &plan::StepTime::compute},
                                              {"gathers", "#228833", &plan::StepTime::gather},
                                              {"reductions", "#ccbb44", &plan::StepTime::reduce},
                                              {"offload", "#ee8866", &plan::StepTime::offload},
                                              {"update", "#aa3377", &plan::StepTime::update},
                                              {"disk", "#777777", &plan::StepTime::disk}}};

using Entries = std::vector<std::pair<std::string_view, std::string_view>>;

constexpr double kName = 320;  // pixels for the words of a candidate
constexpr double kBars = 400;  // pixels of the bars on either side
constexpr double kGap = 110;   // pixels for the number behind a bar
constexpr double kRow = 24;
constexpr double kPictureWidth = kName + 2 * (kBars + kGap);

double bar(Chart& chart, double x, double y, double width, std::string_view colour) {
  if (width > 0) chart.box(x, y, width, kRow - 6, colour);
  return x + std::max(0.0, width);
}

/// Draws the candidates from `top` on; returns where they end.
double draw_candidates(Chart& chart, const std::vector<const plan::Candidate*>& shown,
                       const plan::Cluster& cluster, double top) {
  double most = 0;
  double longest = 0;
  for (const auto* each : shown) {
    most = std::max(most, static_cast<double>(each->memory.device));
    longest = std::max(longest, each->time.seconds);
  }
  // A device that is far larger than what is held would leave nothing of the bars.
  const double has = cluster.memory_of_rank();
  const bool shows_device = has > 0 && has < 4 * most;
  const double bytes = kBars / std::max({most, shows_device ? has : 0.0, 1.0});
  const double seconds = longest > 0 ? kBars / longest : 0;
  const double right = kName + kBars + kGap;
  chart.text(kName, top, fmt::format("memory of a rank; its device has {}", format_bytes(has)),
             {.bold = true});
  chart.text(right, top, "a step by part", {.bold = true});
  top += 10;
  const double begin = top;
  for (const auto* each : shown) {
    chart.text(kName - 8, top + 13, each->words(), {.anchor = "end"});
    double x = kName;
    // Categories peak at different moments; what all hold at once is the sum of the bar.
    double sum = 0;
    for (size_t i = 0; i < kCategories; ++i) {
      if (!on_host(static_cast<Category>(i))) sum += static_cast<double>(each->memory.peaks[i]);
    }
    const double fits = sum > 0 ? static_cast<double>(each->memory.device) / sum : 0;
    for (size_t i = 0; i < kCategories; ++i) {
      if (on_host(static_cast<Category>(i))) continue;
      x = bar(chart, x, top, static_cast<double>(each->memory.peaks[i]) * fits * bytes,
              kOfCategory[i]);
    }
    chart.text(x + 6, top + 13, format_bytes(static_cast<double>(each->memory.device)));
    x = right;
    for (const auto& part : kStepParts)
      x = bar(chart, x, top, each->time.*part.seconds * seconds, part.colour);
    chart.text(x + 6, top + 13, fmt::format("{:.4g} ms", 1e3 * each->time.seconds));
    top += kRow;
  }
  if (shows_device) {
    const double x = kName + has * bytes;
    chart.line({{x, begin - 4}, {x, top}}, "#bb0000", 1.5);
  }
  return top;
}

double draw_scale(Chart& chart, const std::vector<plan::ScalePoint>& scale, double top) {
  double best = 1;
  for (const auto& point : scale) best = std::max(best, point.efficiency);
  chart.text(kName, top, "tokens a second of a rank, of those at the first number of ranks",
             {.bold = true});
  top += 10;
  for (const auto& point : scale) {
    chart.text(kName - 8, top + 13, fmt::format("{} ranks", point.ranks), {.anchor = "end"});
    const double x = bar(chart, kName, top, point.efficiency * kBars / best, "#4477aa");
    chart.text(x + 6, top + 13,
               point.fits ? fmt::format("{:.0f} %: {:.4g} tokens/s, {}", 100 * point.efficiency,
                                        point.best.tokens_per_second, point.best.words())
                          : "nothing fits");
    top += kRow;
  }
  return top;
}

}  // namespace

std::string plan_picture(const std::string& title, const plan::Answer& answer,
                         const plan::Cluster& cluster, const std::vector<plan::ScalePoint>& scale,
                         size_t rows) {
  std::vector<const plan::Candidate*> shown;
  for (const auto& candidate : answer.candidates) {
    if (candidate.fits() && shown.size() < rows) shown.push_back(&candidate);
  }
  Chart chart;
  double top = 76;
  if (shown.empty()) {
    chart.text(16, top, answer.zero_or_not);
    top += kRow;
  } else {
    top = draw_candidates(chart, shown, cluster, top);
    Entries categories;
    for (size_t i = 0; i < kCategories; ++i) {
      const bool held = std::ranges::any_of(
          shown, [&](const plan::Candidate* each) { return each->memory.peaks[i] > 0; });
      if (held && !on_host(static_cast<Category>(i)))
        categories.emplace_back(kOfCategory[i], name(static_cast<Category>(i)));
    }
    Entries parts;
    for (const auto& part : kStepParts) {
      const bool takes = std::ranges::any_of(
          shown, [&](const plan::Candidate* each) { return each->time.*part.seconds > 0; });
      if (takes) parts.emplace_back(part.colour, part.name);
    }
    chart.legend(16, top + 12, categories);
    chart.legend(16, top + 32, parts);
    top += 60;
  }
  if (!scale.empty()) top = draw_scale(chart, scale, top + 24);
  return chart.svg(kPictureWidth, top + 16, title, shown.empty() ? "" : answer.binds);
}

}  // namespace zero::report
