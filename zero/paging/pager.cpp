#include "zero/paging/pager.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_memory.h"

namespace zero::paging {

Pager::Pin::Pin(Pin&& other) noexcept
    : pager_(std::exchange(other.pager_, nullptr)), unit_(other.unit_) {}

Pager::Pin& Pager::Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    release();
    pager_ = std::exchange(other.pager_, nullptr);
    unit_ = other.unit_;
  }
  return *this;
}

void Pager::Pin::release() {
  if (pager_ != nullptr) std::exchange(pager_, nullptr)->unpin(unit_);
}

Pager::Pager(const partition::Layout& layout, std::vector<at::Tensor> parameters,
             UnitSource& source, std::shared_ptr<Ledger> ledger, PagerOptions options)
    : layout_(layout),
      parameters_(std::move(parameters)),
      source_(source),
      ledger_(std::move(ledger)),
      options_(options),
      pages_(parameters_.size()),
      units_(static_cast<size_t>(layout.unit_count())) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const int64_t unit = layout_.unit_of(index);
    storages_.push_back(parameters_[i].storage());
    auto* storage = storages_.back().unsafeGetStorageImpl();
    pages_[i] = {.pager = this,
                 .parameter = index,
                 .unit = unit,
                 .byte_offset = layout_.segment_of(index).offset * layout_.unit(unit).element_bytes,
                 .storage = storage};
    set_absent_message(*storage,
                       fmt::format("Parameter '{}' is sharded (ZeRO stage 3) and its bytes are "
                                   "absent, yet something reached for them without an "
                                   "operator (data_ptr, an accessor, torch::save). Do so inside a "
                                   "zero::Gathered scope, or use "
                                   "Engine::parameter(\"{}\"), Engine::save or Engine::save_full.",
                                   layout_.parameters()[i].name, layout_.parameters()[i].name));
    hide(pages_[i]);
    tag(parameters_[i]);
  }
}

Pager::~Pager() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    untag(parameters_[i]);
    orphan(*pages_[i].storage, fmt::format("Parameter '{}' was sharded (ZeRO stage 3) by an Engine "
                                           "that no longer exists, and its bytes went with it. "
                                           "Export the parameters (Engine::visit_parameters, "
                                           "Engine::save_full) before the Engine ends.",
                                           layout_.parameters()[i].name));
  }
}

Pager::Pin Pager::pin(int64_t unit) {
  std::unique_lock lock(mutex_);
  acquire(lock, unit);
  return {this, unit};
}

Pager::Pin Pager::touch(int64_t unit) {
  std::unique_lock lock(mutex_);
  trace_.record(unit);
  ++counts_.touches;
  acquire(lock, unit);
  return {this, unit};
}

void Pager::acquire(std::unique_lock<std::mutex>& lock, int64_t unit) {
  auto& s = state(unit);
  ++s.pins;
  gathered_.wait(lock, [&] { return s.presence != Presence::gathering; });
  if (s.presence == Presence::present) {
    recency_.splice(recency_.end(), recency_, s.recency);
    return;
  }
  const int64_t bytes = layout_.unit(unit).bytes();
  const auto give_up = [&] {
    s.presence = Presence::absent;
    --s.pins;
    gathered_.notify_all();
  };
  s.presence = Presence::gathering;
  try {
    make_room(bytes);
    s.frame = take_frame(bytes);
  } catch (...) {
    give_up();
    throw;
  }
  live_ += bytes;
  ++counts_.gathers;
  counts_.gathered_bytes += bytes;
  void* data = s.frame.data_ptr();
  lock.unlock();  // a gather may wait for peers: no lock is held meanwhile
  try {
    source_.gather(unit, data);
  } catch (...) {
    lock.lock();
    live_ -= bytes;
    free_ += bytes;
    free_frames_.emplace(bytes, std::move(s.frame));
    give_up();
    throw;
  }
  lock.lock();
  for (const auto& segment : layout_.unit(unit).segments)
    show(pages_[static_cast<size_t>(segment.parameter)], data);
  s.recency = recency_.insert(recency_.end(), unit);
  s.presence = Presence::present;
  gathered_.notify_all();
}

void Pager::unpin(int64_t unit) {
  std::lock_guard lock(mutex_);
  --state(unit).pins;
  while (live_ > options_.budget_bytes && evict_one()) {
  }
}

void* Pager::data(int64_t unit) const {
  std::lock_guard lock(mutex_);
  const auto& s = state(unit);
  return s.presence == Presence::present ? s.frame.data_ptr() : nullptr;
}

// Frees memory until `bytes` more fit into the budget: frames that nobody uses first, then units
// that nobody pins.
void Pager::make_room(int64_t bytes) {
  while (live_ + bytes > options_.budget_bytes && evict_one()) {
  }
}

at::Tensor Pager::take_frame(int64_t bytes) {
  if (const auto found = free_frames_.find(bytes); found != free_frames_.end()) {
    auto frame = std::move(found->second);
    free_frames_.erase(found);
    free_ -= bytes;
    return frame;
  }
  while (!free_frames_.empty() && live_ + free_ + bytes > options_.budget_bytes) {
    const auto largest = std::prev(free_frames_.end());
    free_ -= largest->first;
    free_frames_.erase(largest);
  }
  return host_zeros(bytes, at::kByte, ledger_, options_.category);
}

// Evicts the least recently used unit that may go; false if there is none.
bool Pager::evict_one() {
  for (const int64_t unit : recency_) {
    if (state(unit).pins == 0 && state(unit).dirty == 0) {
      evict(unit);
      return true;
    }
  }
  return false;
}

void Pager::evict(int64_t unit) {
  auto& s = state(unit);
  for (const auto& segment : layout_.unit(unit).segments)
    hide(pages_[static_cast<size_t>(segment.parameter)]);
  recency_.erase(s.recency);
  const int64_t bytes = layout_.unit(unit).bytes();
  live_ -= bytes;
  s.presence = Presence::absent;
  if (live_ + free_ + bytes > options_.budget_bytes) {
    // Kept all the same if it is the only one, so that a budget of zero does not allocate at every
    // operator.
    for (auto& [size, frame] : free_frames_) frame.reset();
    free_frames_.clear();
    free_ = 0;
  }
  free_ += bytes;
  free_frames_.emplace(bytes, std::move(s.frame));
}

void Pager::mark_dirty(const Page& page) {
  std::lock_guard lock(mutex_);
  if (std::find(dirty_.begin(), dirty_.end(), page.parameter) != dirty_.end()) return;
  dirty_.push_back(page.parameter);
  ++state(page.unit).dirty;
}

std::vector<int64_t> Pager::take_dirty() {
  std::lock_guard lock(mutex_);
  for (const int64_t parameter : dirty_) --state(layout_.unit_of(parameter)).dirty;
  return std::exchange(dirty_, {});
}

void Pager::release_all() {
  std::lock_guard lock(mutex_);
  while (evict_one()) {
  }
}

void Pager::invalidate() {
  std::lock_guard lock(mutex_);
  for (const int64_t unit : recency_) {
    if (state(unit).pins == 0) continue;
    const auto& first = layout_.unit(unit).segments.front();
    throw Error(
        fmt::format("The parameters change while the unit of '{}' is still in use: close "
                    "zero::Gathered scopes before "
                    "Engine::step, and do not step inside an operator.",
                    layout_.parameters()[static_cast<size_t>(first.parameter)].name));
  }
  ensure(dirty_.empty(), "dirty pages are taken before the units are invalidated");
  while (evict_one()) {
  }
}

void Pager::end_step() {
  std::lock_guard lock(mutex_);
  trace_.end_step();
}

PagerCounts Pager::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

void Pager::set_budget(int64_t bytes) {
  std::lock_guard lock(mutex_);
  options_.budget_bytes = bytes;
  while (live_ > options_.budget_bytes && evict_one()) {
  }
}

int64_t Pager::live_bytes() const {
  std::lock_guard lock(mutex_);
  return live_;
}

void Pager::check_storages() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].storage().unsafeGetStorageImpl() == pages_[i].storage) continue;
    throw Error(
        fmt::format("The storage of parameter '{}' was replaced (set_data, Module::to) after the "
                    "Engine took it over. "
                    "Convert the module before constructing the Engine, and write values inside "
                    "zero::Gathered.",
                    layout_.parameters()[i].name));
  }
}

}  // namespace zero::paging
