#include "zero/base/ledger.h"

#include <mutex>
#include <utility>

#include "zero/base/device_limit.h"

namespace zero {

std::string_view name(Category category) {
  static constexpr std::array<std::string_view, kCategories> kNames{
      "parameters",       "gradients",      "optimizer",       "gathered_units",
      "gradient_buckets", "communication",  "offload_buffers", "host_parameters",
      "host_gradients",   "host_optimizer", "host_buffers",    "activations"};
  return kNames[static_cast<size_t>(category)];
}

void Ledger::Counter::add(int64_t bytes) {
  const int64_t now = current.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

void Ledger::count(Category category, int64_t bytes) {
  counters_[static_cast<size_t>(category)].add(bytes);
  total_.add(bytes);
  if (!on_host(category)) device_.add(bytes);
}

void Ledger::add(Category category, int64_t bytes) {
  if (on_host(category) || limit_count_ == 0) return count(category, bytes);
  const std::lock_guard lock(limits_mutex_);
  std::unique_lock<std::mutex> admitted;
  if (!limits_.empty()) admitted = limits_.back()->admit(bytes, name(category));
  count(category, bytes);
}

void Ledger::remove(Category category, int64_t bytes) { count(category, -bytes); }

void Ledger::add_limit(DeviceLimit* limit) {
  const std::lock_guard lock(limits_mutex_);
  limits_.push_back(limit);
  limit_count_ = limits_.size();
}

void Ledger::remove_limit(DeviceLimit* limit) {
  const std::lock_guard lock(limits_mutex_);
  std::erase(limits_, limit);
  limit_count_ = limits_.size();
}

std::string Ledger::refusal(int64_t request, std::string_view what) {
  const std::lock_guard lock(limits_mutex_);
  return limits_.empty() ? std::string() : limits_.back()->refusal(request, what);
}

Usage Ledger::usage(Category category) const {
  const auto& counter = counters_[static_cast<size_t>(category)];
  return {counter.current.load(), counter.peak.load()};
}

Usage Ledger::total() const { return {total_.current.load(), total_.peak.load()}; }
int64_t Ledger::own_memory() const {
  return device().current - usage(Category::communication).current;
}
Usage Ledger::device() const { return {device_.current.load(), device_.peak.load()}; }

void Ledger::reset_peaks() {
  for (auto& counter : counters_) counter.peak.store(counter.current.load());
  total_.peak.store(total_.current.load());
  device_.peak.store(device_.current.load());
}

Charge::Charge(std::shared_ptr<Ledger> ledger, Category category, int64_t bytes)
    : ledger_(std::move(ledger)), category_(category), bytes_(bytes) {
  if (ledger_) ledger_->add(category_, bytes_);
}

Charge::Charge(Charge&& other) noexcept
    : ledger_(std::move(other.ledger_)),
      category_(other.category_),
      bytes_(std::exchange(other.bytes_, 0)) {}

Charge& Charge::operator=(Charge&& other) noexcept {
  if (this != &other) {
    release();
    ledger_ = std::move(other.ledger_);
    category_ = other.category_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Charge::~Charge() { release(); }

void Charge::release() {
  if (ledger_) ledger_->remove(category_, bytes_);
  ledger_.reset();
  bytes_ = 0;
}

}  // namespace zero
