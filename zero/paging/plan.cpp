#include "zero/paging/plan.h"

#include <algorithm>
#include <set>
#include <utility>

namespace zero::paging {

namespace {

// The time between two uses of a unit. It takes room at the instants [first, last]. Instant 2p is
// operator p, and instant 2p + 1 the gap after it.
struct Interval {
  size_t touch = 0;
  size_t first = 0;
  size_t last = 0;
  int64_t bytes = 0;
};

// Chooses the intervals that are kept.
class Choice {
 public:
  Choice(std::vector<Interval> intervals, std::vector<int64_t> capacity, int64_t effort)
      : intervals_(std::move(intervals)), capacity_(std::move(capacity)), effort_(effort) {
    starts_.resize(capacity_.size() + 1, intervals_.size());
    for (size_t i = intervals_.size(); i-- > 0;) starts_[intervals_[i].first] = i;
    for (size_t t = capacity_.size(); t-- > 0;)
      if (starts_[t] == intervals_.size() || intervals_[starts_[t]].first != t)
        starts_[t] = starts_[t + 1];
    for (const auto& interval : intervals_) total_ += interval.bytes;
  }

  void solve() {
    bound_ = fraction_given_up(0, {}, total_ + 1);
    best_.assign(intervals_.size(), 1);
    for (const size_t i : farthest_first()) best_[i] = 0;
    improve(best_);
    given_up_ = given_up(best_);
    if (given_up_ > bound_) {
      dropped_.clear();
      search(0, {}, 0);
    }
  }

  const std::vector<uint8_t>& kept() const { return best_; }
  const std::vector<Interval>& intervals() const { return intervals_; }
  /// Return the bytes of the intervals that are not kept, and the least that any choice gives up.
  int64_t given_up() const { return given_up_; }
  int64_t bound() const { return bound_; }

 private:
  // The intervals that take room, in the order of their ends.
  using Active = std::set<std::pair<size_t, size_t>>;  // (last, index)

  int64_t given_up(const std::vector<uint8_t>& keep) const {
    int64_t sum = 0;
    for (size_t i = 0; i < keep.size(); ++i) sum += keep[i] != 0 ? 0 : intervals_[i].bytes;
    return sum;
  }

  // Returns the intervals that Belady's rule gives up.
  std::vector<size_t> farthest_first() const {
    std::vector<size_t> dropped;
    Active active;
    int64_t used = 0;
    for (size_t t = 0; t < capacity_.size(); ++t) {
      used -= advance(t, active);
      for (size_t i = starts_[t]; i < starts_[t + 1]; ++i) {
        active.emplace(intervals_[i].last, i);
        used += intervals_[i].bytes;
      }
      while (used > capacity_[t]) {
        const auto farthest = std::prev(active.end());
        dropped.push_back(farthest->second);
        used -= intervals_[farthest->second].bytes;
        active.erase(farthest);
      }
    }
    return dropped;
  }

  // Removes the intervals that have ended before instant `t`; returns their bytes.
  int64_t advance(size_t t, Active& active) const {
    int64_t bytes = 0;
    while (!active.empty() && active.begin()->first < t) {
      bytes += intervals_[active.begin()->second].bytes;
      active.erase(active.begin());
    }
    return bytes;
  }

  // Applies Belady's rule from instant `t` on, over intervals that may be kept in part. Returns the
  // bytes given up, or a number above `limit` as soon as they exceed it.
  int64_t fraction_given_up(size_t t, const std::vector<size_t>& present, int64_t limit) {
    std::set<std::pair<size_t, size_t>> active;
    part_.resize(intervals_.size());
    int64_t used = 0;
    int64_t lost = 0;
    const auto enter = [&](size_t i) {
      active.emplace(intervals_[i].last, i);
      part_[i] = intervals_[i].bytes;
      used += part_[i];
    };
    for (const size_t i : present) enter(i);
    const size_t begin = t;
    for (; t < capacity_.size() && lost <= limit; ++t) {
      while (!active.empty() && active.begin()->first < t) {
        used -= part_[active.begin()->second];
        active.erase(active.begin());
      }
      if (t > begin || present.empty())
        for (size_t i = starts_[t]; i < starts_[t + 1]; ++i) enter(i);
      while (used > capacity_[t]) {
        const size_t farthest = std::prev(active.end())->second;
        const int64_t lose = std::min(part_[farthest], used - capacity_[t]);
        part_[farthest] -= lose;
        used -= lose;
        lost += lose;
        if (part_[farthest] == 0) active.erase(std::prev(active.end()));
      }
      --effort_;
    }
    return lost;
  }

  std::vector<int64_t> room(const std::vector<uint8_t>& keep) const {
    auto left = capacity_;
    for (size_t i = 0; i < keep.size(); ++i)
      if (keep[i] != 0) take(left, intervals_[i], 1);
    return left;
  }
  static void take(std::vector<int64_t>& left, const Interval& interval, int64_t sign) {
    for (size_t t = interval.first; t <= interval.last; ++t) left[t] -= sign * interval.bytes;
  }
  static bool fits(const std::vector<int64_t>& left, const Interval& interval) {
    for (size_t t = interval.first; t <= interval.last; ++t)
      if (left[t] < interval.bytes) return false;
    return true;
  }

  // Fills holes, and exchanges a kept interval for a larger one that fits.
  void improve(std::vector<uint8_t>& keep) {
    auto left = room(keep);
    std::vector<size_t> order;
    for (size_t i = 0; i < keep.size(); ++i)
      if (keep[i] == 0) order.push_back(i);
    std::ranges::stable_sort(
        order, [&](size_t a, size_t b) { return intervals_[a].bytes > intervals_[b].bytes; });
    const auto spend = [&](const Interval& interval) {
      effort_ -= static_cast<int64_t>(interval.last - interval.first + 1);
    };
    bool changed = true;
    while (changed && effort_ > 0) {
      changed = false;
      for (const size_t i : order) {
        const auto& wanted = intervals_[i];
        if (keep[i] != 0) continue;
        spend(wanted);
        if (fits(left, wanted)) {
          take(left, wanted, 1);
          keep[i] = 1;
          changed = true;
          continue;
        }
        for (size_t k = 0; k < keep.size() && effort_ > 0; ++k) {
          const auto& held = intervals_[k];
          if (keep[k] == 0 || held.bytes >= wanted.bytes || held.last < wanted.first ||
              held.first > wanted.last)
            continue;
          spend(held);
          take(left, held, -1);
          spend(wanted);
          if (fits(left, wanted)) {
            take(left, wanted, 1);
            keep[k] = 0;
            keep[i] = 1;
            order.push_back(k);
            changed = true;
            break;
          }
          take(left, held, 1);
        }
        if (changed) break;  // the order has grown
      }
    }
  }

  // Searches depth-first from instant `t` with `active` kept. At every shortage it branches over
  // the intervals that may be given up, the farthest first. It leaves a branch whose bound is no
  // better than the best choice so far.
  void search(size_t t, std::vector<size_t> active, int64_t lost) {
    for (; t < capacity_.size(); ++t) {
      std::erase_if(active, [&](size_t i) { return intervals_[i].last < t; });
      for (size_t i = starts_[t]; i < starts_[t + 1]; ++i) active.push_back(i);
      int64_t used = 0;
      for (const size_t i : active) used += intervals_[i].bytes;
      if (used <= capacity_[t]) continue;
      std::ranges::sort(active, [&](size_t a, size_t b) {
        return std::pair(intervals_[a].last, a) > std::pair(intervals_[b].last, b);
      });
      shortage(t, active, 0, used - capacity_[t], lost);
      return;
    }
    if (lost >= given_up_) return;
    given_up_ = lost;
    std::fill(best_.begin(), best_.end(), uint8_t{1});
    for (const size_t i : dropped_) best_[i] = 0;
  }

  // Gives up `short_of` bytes of `active`. The intervals before `from` stay.
  void shortage(size_t t, const std::vector<size_t>& active, size_t from, int64_t short_of,
                int64_t lost) {
    for (size_t c = from; c < active.size(); ++c) {
      if (given_up_ == bound_ || effort_ <= 0) return;
      const int64_t bytes = intervals_[active[c]].bytes;
      if (lost + bytes >= given_up_) continue;
      effort_ -= static_cast<int64_t>(active.size());
      auto rest = active;
      rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(c));
      dropped_.push_back(active[c]);
      if (bytes < short_of) {
        shortage(t, rest, c, short_of - bytes, lost + bytes);
      } else {
        const int64_t limit = given_up_ - lost - bytes;
        if (rest.empty() || fraction_given_up(t, rest, limit) < limit) {
          // All intervals that start at this instant are in `rest` already.
          search_after(t, std::move(rest), lost + bytes);
        }
      }
      dropped_.pop_back();
    }
  }

  void search_after(size_t t, std::vector<size_t> active, int64_t lost) {
    search(t + 1, std::move(active), lost);
  }

  std::vector<Interval> intervals_;  // by first instant
  std::vector<int64_t> capacity_;    // by instant
  std::vector<size_t> starts_;       // by instant: the first interval that starts there or later
  std::vector<int64_t> part_;
  std::vector<size_t> dropped_;
  std::vector<uint8_t> best_;
  int64_t total_ = 0;
  int64_t given_up_ = 0;
  int64_t bound_ = 0;
  int64_t effort_;
};

// Moves the gathers ahead of their use, in order.
void prefetch(Plan& plan, std::vector<int64_t> left, std::span<const int64_t> unit_bytes,
              int64_t window) {
  size_t earliest = 0;
  std::vector<int64_t> ahead(plan.trace.operators(), 0);  // bytes gathered ahead, by operator
  for (auto& gather : plan.gathers) {
    const int64_t bytes = unit_bytes[static_cast<size_t>(gather.unit)];
    while (gather.start > earliest) {
      const size_t before = gather.start - 1;
      if (left[2 * before] < bytes || left[2 * before + 1] < bytes ||
          ahead[before] + bytes > window)
        break;
      // This is rule 2 of Note [Gathers that ranks agree on] in pager.h.
      if (plan.trace.units(before).empty()) break;
      // The unit may be in use at that operator, or may be kept only until then.
      if (std::ranges::find(plan.trace.units(before), gather.unit) !=
          plan.trace.units(before).end())
        break;
      left[2 * before] -= bytes;
      left[2 * before + 1] -= bytes;
      ahead[before] += bytes;
      gather.start = before;
    }
    earliest = gather.start;
  }
}

}  // namespace

Plan make_plan(Trace trace, std::span<const int64_t> unit_bytes, const PlanOptions& options) {
  Plan plan;
  plan.trace = std::move(trace);
  const size_t operators = plan.trace.operators();
  const auto& touches = plan.trace.touches();
  plan.next.assign(touches.size(), Plan::kNever);
  plan.keep.assign(touches.size(), 0);

  const auto bytes_of = [&](int64_t unit) { return unit_bytes[static_cast<size_t>(unit)]; };
  std::vector<int64_t> capacity(2 * operators, options.budget_bytes);
  std::vector<Interval> intervals;
  std::vector<size_t> last_touch(unit_bytes.size(), Plan::kNever);
  std::vector<size_t> operator_of(touches.size());
  int64_t all = 0;
  for (size_t op = 0; op < operators; ++op) {
    int64_t pinned = 0;
    for (size_t i = plan.trace.begin(op); i < plan.trace.begin(op + 1); ++i) {
      operator_of[i] = op;
      pinned += bytes_of(touches[i]);
      auto& last = last_touch[static_cast<size_t>(touches[i])];
      if (last == Plan::kNever) {
        all += bytes_of(touches[i]);
      } else {
        plan.next[last] = op;
        intervals.push_back({last, 2 * operator_of[last] + 1, 2 * op - 1, bytes_of(touches[i])});
      }
      last = i;
    }
    capacity[2 * op] = std::max<int64_t>(0, options.budget_bytes - pinned);
  }
  auto left = capacity;
  if (all <= options.budget_bytes) {
    for (const auto& interval : intervals) plan.keep[interval.touch] = 1;
    plan.bound_bytes = plan.gathered_bytes = all;
    for (auto& room : left) room = all;
  } else {
    std::ranges::sort(intervals, {}, &Interval::first);
    Choice choice(std::move(intervals), std::move(capacity), options.effort);
    choice.solve();
    for (size_t i = 0; i < choice.kept().size(); ++i) {
      const auto& interval = choice.intervals()[i];
      if (choice.kept()[i] == 0) continue;
      plan.keep[interval.touch] = 1;
      for (size_t t = interval.first; t <= interval.last; ++t) left[t] -= interval.bytes;
    }
    plan.gathered_bytes = all + choice.given_up();
    plan.bound_bytes = all + choice.bound();
  }

  std::vector<uint8_t> present(unit_bytes.size(), 0);
  for (size_t i = 0; i < touches.size(); ++i) {
    const auto unit = static_cast<size_t>(touches[i]);
    if (present[unit] == 0) plan.gathers.push_back({touches[i], operator_of[i], operator_of[i]});
    present[unit] = plan.keep[i];
  }
  if (options.prefetch_bytes > 0)
    prefetch(plan, std::move(left), unit_bytes, options.prefetch_bytes);
  return plan;
}

}  // namespace zero::paging
