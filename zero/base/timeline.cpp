#include "zero/base/timeline.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>

namespace zero {

namespace {

uint64_t this_thread() { return std::hash<std::thread::id>{}(std::this_thread::get_id()); }

}  // namespace

std::string_view name(Activity activity) {
  static constexpr std::array<std::string_view, kActivities> kNames{
      "forward",         "backward",        "step",          "operator",       "wait for gather",
      "wait for reduce", "wait for update", "wait for disk", "wait for ranks", "gather",
      "reduce",          "control",         "update",        "disk read",      "disk write"};
  return kNames[static_cast<size_t>(activity)];
}

std::string_view Span::label() const { return {text.data(), strnlen(text.data(), text.size())}; }

int64_t Timeline::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Timeline::adopt_thread() {
  const auto thread = this_thread();
  if (thread_.exchange(thread) != thread) top_ = nullptr;
}

void Timeline::set(std::atomic<bool>& what, bool on) {
  what = on;
  on_ = keeps_ || measures_;
}

void Timeline::start(size_t most) {
  adopt_thread();
  {
    const std::lock_guard lock(mutex_);
    most_ = most;
    dropped_ = 0;
    spans_.resize(most);  // touches its pages
    spans_.clear();
    started_ = now();
  }
  set(keeps_, true);
}

void Timeline::stop() {
  set(keeps_, false);
  const std::lock_guard lock(mutex_);
  stopped_ = now();
}

std::vector<Span> Timeline::spans() const {
  const std::lock_guard lock(mutex_);
  return {spans_.begin(), spans_.end()};
}

int64_t Timeline::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

void Timeline::clear() {
  const std::lock_guard lock(mutex_);
  std::exchange(spans_, {});
  most_ = 0;
}

void Timeline::measure(bool on) {
  if (on) adopt_thread();
  set(measures_, on);
  (void)take_breakdown();
}

Breakdown Timeline::take_breakdown() {
  const std::lock_guard lock(mutex_);
  const auto all = std::exchange(nanoseconds_, {});
  const auto ms = [&](Activity activity) {
    return static_cast<double>(all[static_cast<size_t>(activity)]) / 1e6;
  };
  return {.forward = ms(Activity::forward),
          .backward = ms(Activity::backward),
          .step = ms(Activity::step),
          .gather = ms(Activity::wait_gather),
          .reduce = ms(Activity::wait_reduce),
          .update = ms(Activity::wait_update) + ms(Activity::update),
          .disk = ms(Activity::wait_disk),
          .control = ms(Activity::wait_control)};
}

void Timeline::keep(const Span& span) {
  if (most_ == 0 || span.begin < started_ || (!keeps() && span.begin > stopped_)) return;
  if (spans_.size() < most_) {
    spans_.push_back(span);
  } else {
    ++dropped_;
  }
}

namespace {

Span span_of(Activity activity, std::string_view label, int64_t begin, int64_t end, int64_t bytes,
             bool training) {
  Span span{.begin = begin,
            .end = std::max(begin, end),
            .bytes = bytes,
            .activity = activity,
            .training = training};
  std::copy_n(label.begin(), std::min(label.size(), span.text.size()), span.text.begin());
  return span;
}

}  // namespace

void Timeline::add(Activity activity, std::string_view label, int64_t begin, int64_t end,
                   int64_t bytes) {
  const auto span = span_of(activity, label, begin, end, bytes, false);
  const std::lock_guard lock(mutex_);
  keep(span);
}

void Timeline::Scope::begin(Timeline& timeline, Activity activity, std::string_view label,
                            int64_t bytes) {
  training_ = timeline.thread_.load(std::memory_order_relaxed) == this_thread();
  if (!training_ && (is_wait(activity) || is_phase(activity))) return;
  timeline_ = &timeline;
  activity_ = activity;
  label_ = label;
  bytes_ = bytes;
  if (training_) outer_ = std::exchange(timeline.top_, this);
  begin_ = now();
}

void Timeline::Scope::end() {
  const int64_t end = now();
  auto& timeline = *timeline_;
  const int64_t all = end - begin_;
  const bool phase = is_phase(activity_);
  bool in_phase = phase;
  if (training_) {
    timeline.top_ = outer_;
    for (const auto* scope = outer_; scope != nullptr && !in_phase; scope = scope->outer_)
      in_phase = is_phase(scope->activity_);
    if (outer_ != nullptr) {
      outer_->inner_waits_ += phase ? 0 : all;
      outer_->inner_phases_ += phase ? all : inner_phases_;
    }
  }
  const auto span = span_of(activity_, label_, begin_, end, bytes_, training_);
  const std::lock_guard lock(timeline.mutex_);
  if (training_ && in_phase && timeline.measures_) {
    timeline.nanoseconds_[static_cast<size_t>(activity_)] +=
        all - (phase ? inner_phases_ : inner_waits_);
  }
  timeline.keep(span);
}

}  // namespace zero
