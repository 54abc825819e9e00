#include "zero/comm/activity.h"

#include <fmt/format.h>

#include <chrono>

namespace zero::comm {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void ActivitySlot::begin(std::string_view operation, bool backward) noexcept {
  Operation now;
  now.began = Clock::now().time_since_epoch().count();
  now.backward = backward ? 1 : 0;
  now.name = FixedText<64>(operation);
  operation_.store(now);
}

void ActivitySlot::use(std::string_view unit) noexcept { unit_.store(FixedText<96>(unit)); }

std::string ActivitySlot::text() const {
  const auto operation = operation_.load();
  if (operation.name.view().empty()) return {};
  const Clock::duration since(Clock::now().time_since_epoch().count() - operation.began);
  const auto unit = unit_.load();
  return fmt::format("the last operator that it began, {:.1f} s ago, is {}{}{}{}",
                     std::chrono::duration<double>(since).count(), operation.name.view(),
                     operation.backward != 0 ? " in backward" : "",
                     unit.view().empty() ? "" : ", with ", unit.view());
}

void RankActivity::show_in(const std::shared_ptr<ActivitySlot>& slot) {
  const std::lock_guard lock(mutex_);
  std::erase_if(slots_, [](const auto& place) { return place.expired(); });
  slots_.push_back(slot);
}

template <class Show>
void RankActivity::show(const Show& show) noexcept {
  show(own_);
  const std::lock_guard lock(mutex_);
  for (const auto& place : slots_) {
    if (const auto slot = place.lock()) show(*slot);
  }
}

void RankActivity::begin(std::string_view operation, bool backward) noexcept {
  show([&](ActivitySlot& slot) { slot.begin(operation, backward); });
}

void RankActivity::use(std::string_view unit) noexcept {
  show([&](ActivitySlot& slot) { slot.use(unit); });
}

}  // namespace zero::comm
