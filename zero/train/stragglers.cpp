#include "zero/train/stragglers.h"

#include <fmt/format.h>

#include <algorithm>

namespace zero::train {

namespace {

/// Returns the middle value; for an even count the mean of the two in the middle.
double median(std::span<float> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (static_cast<double>(*middle) + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace

Stragglers::Stragglers(int ranks, int ranks_a_host)
    : ranks_(static_cast<size_t>(ranks)),
      ranks_a_host_(ranks_a_host),
      times_(ranks_ * kWindow),
      slow_(ranks_, 0),
      scratch_(std::max(ranks_, kWindow)) {}

Stragglers::Medians Stragglers::medians_of(size_t rank) {
  const std::span steps(times_.data() + rank * kWindow, kWindow);
  const std::span values(scratch_.data(), kWindow);
  const auto of = [&](float RankTime::*time) {
    std::ranges::transform(steps, values.begin(), [&](const RankTime& each) { return each.*time; });
    return median(values);
  };
  return {of(&RankTime::busy_ms), of(&RankTime::disk_ms)};
}

std::string Stragglers::add(std::span<const RankTime> times) {
  if (ranks_ < 2) return {};
  for (size_t rank = 0; rank < ranks_; ++rank) times_[rank * kWindow + steps_] = times[rank];
  if (++steps_ < kWindow) return {};
  steps_ = 0;
  std::vector<Medians> all;
  for (size_t rank = 0; rank < ranks_; ++rank) all.push_back(medians_of(rank));
  std::string text;
  bool new_one = false;
  for (size_t rank = 0; rank < ranks_; ++rank) {
    const auto told = told_of(rank, all);
    new_one = new_one || (!told.empty() && slow_[rank] == 0);
    slow_[rank] = told.empty() ? 0 : 1;
    if (!told.empty()) text += (text.empty() ? "" : " ") + told;
  }
  return new_one ? text : std::string();
}

std::string Stragglers::told_of(size_t rank, const std::vector<Medians>& all) const {
  std::vector<float> busy;
  std::vector<float> disk;
  for (size_t other = 0; other < ranks_; ++other) {
    if (other == rank) continue;
    busy.push_back(static_cast<float>(all[other].busy));
    disk.push_back(static_cast<float>(all[other].disk));
  }
  const double usual = median(busy);
  if (all[rank].busy <= kSlow * usual) return {};
  const double more = all[rank].busy - usual;
  const double disk_more = all[rank].disk - median(disk);
  const auto place =
      ranks_a_host_ > 0 ? fmt::format(" (host {})", static_cast<int>(rank) / ranks_a_host_) : "";
  return fmt::format(
      "Rank {}{} is slow: it takes {:.0f} ms a step where the others take {:.0f} and wait for it. "
      "{}",
      rank, place, all[rank].busy, usual,
      disk_more > more / 2
          ? fmt::format("Of the difference its disk makes {:.0f} ms.", disk_more)
          : "The difference is its computation: look for other programs on its cores, their clock, "
            "or fewer threads.");
}

}  // namespace zero::train
