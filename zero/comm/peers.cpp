#include "zero/comm/peers.h"

#include <fmt/format.h>
#include <sched.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/base/error.h"

namespace zero::comm {
namespace {

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace

Peers::Peers(int rank, std::vector<Process> processes, std::vector<int> numbers) : rank_(rank) {
  known_->numbers = std::move(numbers);
  known_->watches.reserve(processes.size());
  for (const auto& process : processes) known_->watches.emplace_back(process);
  known_->processes = std::move(processes);
  spins_ = size() <= usable_cores() ? 200 : 0;
}

void Peers::attach(std::shared_ptr<Mapping> mapping) { mapping_ = std::move(mapping); }

Peers Peers::on_channel(int channel) const {
  ensure(channel >= 0 && channel < kLocalChannels && mapping_ != nullptr,
         "ranks that have met have a few channels");
  Peers other = *this;
  other.channel_ = channel;
  return other;
}

RankSlot& Peers::slot(int rank) const {
  return *std::launder(
      reinterpret_cast<RankSlot*>(mapping_->at(slot_offset(rank, size(), channel_))));
}

RankSlot& Peers::being(int rank) const {
  return *std::launder(reinterpret_cast<RankSlot*>(mapping_->at(slot_offset(rank, size(), 0))));
}

void Peers::pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool Peers::troubled() const {
  if (!mapping_) return false;
  for (int r = 0; r < size(); ++r) {
    if (being(r).current_state() == RankState::failed) return true;
  }
  return false;
}

std::string Peers::who(int rank) const {
  const auto& process = known_->processes[static_cast<size_t>(rank)];
  return fmt::format("rank {} (pid {}, host {})", number(rank), process.pid, process.host);
}

std::string Peers::last_seen(int rank) const {
  if (!mapping_) return "it has not joined the group";
  const auto& there = slot(rank);
  const auto finished = there.finished.load(std::memory_order_acquire);
  const auto call = there.last_call();
  if (call.op != Op::none && finished < call.sequence) return "it is in " + call.describe();
  const auto doing = being(rank).activity.text();
  return (call.op == Op::none ? "it has not called any collective"
                              : "its last call was " + call.describe() + ", which it finished") +
         (doing.empty() ? "" : "; " + doing);
}

std::shared_ptr<ActivitySlot> Peers::own_activity() const {
  return {mapping_, &being(rank_).activity};
}

std::optional<Peers::Trouble> Peers::find_trouble(std::optional<int> awaited) const {
  for (int r = 0; r < size(); ++r) {
    if (known_->watches[static_cast<size_t>(r)].dead() &&
        (!mapping_ || being(r).current_state() == RankState::active)) {
      return Trouble{number(r), who(r) + " died"};
    }
  }
  if (!mapping_) return std::nullopt;
  std::optional<Trouble> follow_up;
  for (int r = 0; r < size(); ++r) {
    if (being(r).current_state() != RankState::failed) continue;
    const auto failure = being(r).failure.load();
    const bool known = failure.origin >= 0 && failure.origin <= std::numeric_limits<int>::max();
    Trouble trouble{known ? static_cast<int>(failure.origin) : number(r),
                    std::string(failure.message.view())};
    if (trouble.origin == number(r)) return trouble;
    follow_up = std::move(trouble);
  }
  if (follow_up) return follow_up;
  if (awaited && being(*awaited).current_state() == RankState::left) {
    return Trouble{number(*awaited),
                   fmt::format("{} left the group; {}", who(*awaited), last_seen(*awaited))};
  }
  return std::nullopt;
}

void Peers::check_failed(const Describe& doing) const {
  if (!troubled()) return;
  if (const auto trouble = find_trouble(std::nullopt)) fail(*trouble, doing);
}

void Peers::fail(const Trouble& trouble, const Describe& doing) const {
  std::string_view message = trouble.message;
  if (message.ends_with('.')) message.remove_suffix(1);
  throw PeerError(trouble.origin, trouble.message,
                  fmt::format("{}; rank {} was waiting in {}.", message, number(rank_), doing()));
}

void Peers::fail_timeout(int awaited, const Describe& doing) const {
  const auto behind = [&](int r) {
    if (!mapping_) return r == awaited;
    return static_cast<int32_t>(slot(r).ticks.load(std::memory_order_acquire) -
                                own().ticks.load(std::memory_order_relaxed)) < 0;
  };
  std::string missing;
  for (int r = 0; r < size(); ++r) {
    if (r != awaited && (r == rank_ || !behind(r))) continue;
    if (!missing.empty()) missing += "; ";
    missing += fmt::format("{} has not arrived: {}", who(r), last_seen(r));
  }
  const auto cause = fmt::format("Timed out: {}", missing);
  throw PeerError(number(rank_), cause,
                  fmt::format("{}; rank {} was waiting in {}.", cause, number(rank_), doing()));
}

void Peers::post_failure(int origin, std::string_view message) const noexcept {
  const std::lock_guard lock(known_->posting);
  auto& here = being(rank_);
  if (here.current_state() != RankState::active) return;
  Failure failure;
  failure.origin = origin;
  failure.message = FixedText<2040>(message);
  here.failure.store(failure);
  here.state.store(static_cast<uint32_t>(RankState::failed), std::memory_order_release);
  wake_waiters();
}

void Peers::post_left() const noexcept {
  const std::lock_guard lock(known_->posting);
  auto& here = being(rank_);
  if (here.current_state() != RankState::active) return;
  here.state.store(static_cast<uint32_t>(RankState::left), std::memory_order_release);
  wake_waiters();
}

void Peers::wake_waiters() const noexcept {
  for (int channel = 0; channel < kLocalChannels; ++channel) {
    auto* slot = reinterpret_cast<RankSlot*>(mapping_->at(slot_offset(rank_, size(), channel)));
    futex_wake(&std::launder(slot)->ticks);
  }
}

}  // namespace zero::comm
