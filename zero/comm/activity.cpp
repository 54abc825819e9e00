#include "zero/comm/activity.h"

#include <fmt/format.h>

#include <chrono>

namespace zero::comm {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void Activity::begin(std::string_view operation, bool backward) noexcept {
  Operation now;
  now.began = Clock::now().time_since_epoch().count();
  now.backward = backward ? 1 : 0;
  now.name = FixedText<64>(operation);
  operation_.store(now);
}

void Activity::use(std::string_view unit) noexcept { unit_.store(FixedText<96>(unit)); }

std::string Activity::text() const {
  const auto operation = operation_.load();
  if (operation.name.view().empty()) return {};
  const Clock::duration since(Clock::now().time_since_epoch().count() - operation.began);
  const auto unit = unit_.load();
  return fmt::format("the last operator that it began, {:.1f} s ago, is {} in {}{}{}",
                     std::chrono::duration<double>(since).count(), operation.name.view(),
                     operation.backward != 0 ? "backward" : "forward",
                     unit.view().empty() ? "" : ", with ", unit.view());
}

}  // namespace zero::comm
