#include "zero/paging/pager.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_memory.h"

namespace zero::paging {

namespace {

constexpr size_t kPlans = 4;                   // the known steps that are remembered
constexpr size_t kMostOperators = 1UL << 20U;  // the most operators of a step that is planned
constexpr int64_t kNoUnit = -1;
// Gathers that start before the rows of a look-up are sent have one in so many of its unit's bytes,
// and the rest of the last of them.
constexpr int64_t kMeanwhile = 8;

// Returns a number that tells orders of units apart (FNV-1a).
uint64_t number_of(const std::vector<int64_t>& order) {
  uint64_t number = 0xCBF29CE484222325;
  for (const int64_t unit : order) number = (number ^ static_cast<uint64_t>(unit)) * 0x100000001B3;
  return number;
}

}  // namespace

Pager::Pin::Pin(Pin&& other) noexcept
    : pager_(std::exchange(other.pager_, nullptr)),
      units_(std::move(other.units_)),
      position_(other.position_),
      thread_(other.thread_) {}

Pager::Pin& Pager::Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    release();
    pager_ = std::exchange(other.pager_, nullptr);
    units_ = std::move(other.units_);
    position_ = other.position_;
    thread_ = other.thread_;
  }
  return *this;
}

void Pager::Pin::release() {
  if (pager_ != nullptr) std::exchange(pager_, nullptr)->unpin(units_, position_, thread_);
}

Pager::Pager(const partition::Layout& layout, std::vector<at::Tensor> parameters,
             UnitSource& source, std::shared_ptr<Ledger> ledger, PagerOptions options)
    : layout_(layout),
      parameters_(std::move(parameters)),
      source_(source),
      ledger_(std::move(ledger)),
      options_(options),
      pages_(parameters_.size()),
      side_(side_stream(options_.device)),
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
    take_over(pages_[i]);
    tag(parameters_[i]);
  }
}

Pager::~Pager() {
  try {
    evict_all();  // waits for gathers ahead of their use
    while (!free_frames_.empty()) drop_oldest_frame();
    settle_gathers();
  } catch (const std::exception&) {  // the device has failed, which other calls report
  }
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
  return {this, {unit}, Plan::kNever};
}

Pager::Pin Pager::touch(std::span<const int64_t> units, bool differentiable) {
  try {
    return touched(units, differentiable, {});
  } catch (const Error&) {
    if (options_.rethrow) options_.rethrow();
    throw;
  }
}

Pager::Pin Pager::touch(int64_t unit, bool differentiable, const UsePart& early) {
  try {
    return touched({&unit, 1}, differentiable, early);
  } catch (const Error&) {
    if (options_.rethrow) options_.rethrow();
    throw;
  }
}

Pager::Pin Pager::touched(std::span<const int64_t> units, bool differentiable,
                          const UsePart& early) {
  std::unique_lock lock(mutex_);
  counts_.touches += static_cast<int64_t>(units.size());
  if (!units.empty()) source_.touched(units.front());
  Pin pin(this, {}, Plan::kNever);
  in_step_ = in_step_ || differentiable;
  try {
    if (in_step_) pin.position_ = advance(lock, units);
    for (const int64_t unit : units) {
      if (early) {
        acquire_early(lock, unit, early);
      } else {
        acquire(lock, unit);
      }
      pin.units_.push_back(unit);
    }
  } catch (...) {
    lock.unlock();  // `pin` takes the lock to release the units that it has pinned before
    throw;
  }
  lock.unlock();
  return pin;
}

// Returns the units that the plan gathers next, each once, within the budget. If ranks ask once,
// these are all up to `unit`, or none. Otherwise they are those that start before the rows are
// sent.
std::vector<int64_t> Pager::gathers_behind(int64_t unit) const {
  const Plan* plan = following_;
  if (plan == nullptr && trace_.empty() && !plans_.empty()) plan = plans_.front().get();
  if (plan == nullptr) return {};
  const bool once = source_.asks(unit) == UnitSource::Asks::once;
  std::vector<int64_t> order;
  std::vector<uint8_t> seen(units_.size(), 0);
  int64_t bytes = 0;
  for (size_t i = following_ != nullptr ? next_gather_ : 0; i < plan->gathers.size(); ++i) {
    if (!once && bytes >= std::min(meanwhile_bytes(unit), options_.prefetch_bytes)) break;
    const int64_t next = plan->gathers[i].unit;
    if (next == unit && !once) continue;  // the plan is that of a step without the look-up
    if (next != unit && source_.asks(next) != UnitSource::Asks::never) break;
    if (std::exchange(seen[static_cast<size_t>(next)], 1) != 0) break;
    if (state(next).presence != Presence::absent) continue;  // it fits, so it stays until then
    bytes += layout_.unit(next).bytes();
    if (live_ + bytes > options_.budget_bytes) break;
    order.push_back(next);
    if (next == unit) return order;
  }
  return once ? std::vector<int64_t>() : order;
}

// Before the rows are sent, gathers start until they have this many bytes.
int64_t Pager::meanwhile_bytes(int64_t unit) const {
  return layout_.unit(unit).bytes() / kMeanwhile;
}

// Agrees with the other ranks on the gather of an absent unit. Returns this rank's rows, if all
// ranks look up.
at::Tensor Pager::agree(std::unique_lock<std::mutex>& lock, int64_t unit, const at::Tensor& indices,
                        const std::vector<int64_t>& order) {
  const auto thread = std::this_thread::get_id();
  auto& s = state(unit);
  add_pin(lock, unit);
  const auto asks = source_.asks(unit);
  if (asks == UnitSource::Asks::never || s.presence != Presence::absent) {  // another thread came
    drop_pin(s, thread);
    return {};
  }
  s.presence = Presence::gathering;
  if (asks == UnitSource::Asks::once) agreed_ = unit;
  const auto done = [&] {
    if (!lock.owns_lock()) lock.lock();
    s.presence = Presence::absent;
    gathered_.notify_all();
    drop_pin(s, thread);
  };
  const auto meanwhile = [&] {
    lock.lock();
    owed_.assign(order.begin(), order.end());
    for (int64_t bytes = 0;
         bytes < meanwhile_bytes(unit) && !owed_.empty() && owed_.front() != unit;) {
      const int64_t next = owed_.front();
      bytes += layout_.unit(next).bytes();
      start(lock, next);
    }
    lock.unlock();
  };
  at::Tensor rows;
  try {
    lock.unlock();
    rows = source_.look_up(unit,
                           {.indices = indices, .order = number_of(order), .meanwhile = meanwhile});
  } catch (...) {
    done();
    throw;
  }
  done();
  return rows;
}

at::Tensor Pager::look_up(int64_t unit, const at::Tensor& indices, bool differentiable) {
  using Asks = UnitSource::Asks;
  std::unique_lock lock(mutex_);
  const auto asks = source_.asks(unit);
  if (asks == Asks::never || state(unit).presence != Presence::absent) return {};
  // A rank may evaluate alone, with gradients off, before the others compute.
  if (asks == Asks::always && !differentiable) return {};
  try {
    source_.touched(unit);
    const auto order = gathers_behind(unit);
    const bool may = asks == Asks::always || !order.empty();
    auto rows = agree(lock, unit, may ? indices : at::Tensor(), order);
    if (rows.defined() && differentiable) {
      in_step_ = true;
      advance(lock, {});
    } else if (!rows.defined() && state(unit).presence == Presence::absent) {
      start_agreed(lock, unit);
    }
    return rows;
  } catch (const Error&) {
    lock.unlock();
    if (options_.rethrow) options_.rethrow();
    throw;
  }
}

void Pager::start_owed() {
  std::unique_lock lock(mutex_);
  start_owed(lock, kNoUnit);
}

// Starts the gathers that all ranks issue before that of `until`.
void Pager::start_owed(std::unique_lock<std::mutex>& lock, int64_t until) {
  while (!owed_.empty()) {
    const int64_t next = owed_.front();
    owed_.pop_front();
    if (next == until) return;
    if (state(next).presence == Presence::absent) gather(lock, next);
  }
}

// Moves one operator ahead in the trace: compares it with the plan, and starts the gathers that are
// due. Returns the operator's position, or Plan::kNever if no plan is followed.
size_t Pager::advance(std::unique_lock<std::mutex>& lock, std::span<const int64_t> units) {
  const size_t position = trace_.operators();
  if (position >= kMostOperators) {
    following_ = nullptr;
    return Plan::kNever;
  }
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  trace_.record(units, backward);
  position_ = trace_.operators();
  if (position == 0 ||
      (following_ != nullptr && !following_->trace.has(position, units, backward))) {
    if (!choose_plan()) return Plan::kNever;
    forecast(position);
  }
  if (following_ == nullptr) return Plan::kNever;
  const auto& plan = *following_;
  for (size_t i = plan.trace.begin(position); i < plan.trace.begin(position + 1); ++i)
    state(plan.trace.touches()[i]).next_use = plan.next[i];
  if (source_.in_place()) return position;
  // Another thread may come here while the lock is not held, so the cursor moves first.
  while (next_gather_ < plan.gathers.size() && plan.gathers[next_gather_].start <= position) {
    const auto& gather = plan.gathers[next_gather_];
    if (gather.use > position && source_.asks(gather.unit) != UnitSource::Asks::never) break;
    ++next_gather_;
    if (gather.use < position || state(gather.unit).presence != Presence::absent) continue;
    if (gather.use > position) state(gather.unit).next_use = gather.use;
    start(lock, gather.unit);
    if (following_ != &plan) return Plan::kNever;
  }
  tell_source();
  return position;
}

// Names the next gathers to the source, until it can take no more.
void Pager::tell_source() {
  const auto& gathers = following_->gathers;
  next_expected_ = std::max(next_expected_, next_gather_);
  while (next_expected_ < gathers.size() && source_.expect(gathers[next_expected_].unit))
    ++next_expected_;
}

// Finds the first known step that begins as the current step has begun.
bool Pager::choose_plan() {
  following_ = nullptr;
  const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const auto& plan) {
    return trace_.is_prefix_of(plan->trace);
  });
  if (found != plans_.end()) following_ = found->get();
  return following_ != nullptr;
}

// Sets the next use of each unit and the next gather, as seen before operator `position`.
void Pager::forecast(size_t position) {
  for (auto& unit : units_) unit.next_use = Plan::kNever;
  const auto& trace = following_->trace;
  for (size_t op = trace.operators(); op-- > position;) {
    for (const int64_t unit : trace.units(op)) state(unit).next_use = op;
  }
  const auto& gathers = following_->gathers;
  next_gather_ = static_cast<size_t>(
      std::ranges::lower_bound(gathers, position, {}, &Plan::Gather::use) - gathers.begin());
  next_expected_ = next_gather_;
}

// Gathers, and early uses, run without the lock: a Change that begins meanwhile waits for this pin.
void Pager::add_pin(std::unique_lock<std::mutex>& lock, int64_t unit) {
  const auto thread = std::this_thread::get_id();
  changed_.wait(lock, [&] { return !changes_ || changes_ == thread || holds(thread); });
  state(unit).pins.push_back(thread);
}

void Pager::drop_pin(UnitState& state, std::thread::id thread) {
  state.pins.erase(std::find(state.pins.begin(), state.pins.end(), thread));
  if (state.pins.empty()) unpinned_.notify_all();
}

// Lets `early` have the part of a unit that is here, if the others are on their way, and acquires
// the unit. A pin lasts from one to the other, so that nobody changes the unit between.
void Pager::acquire_early(std::unique_lock<std::mutex>& lock, int64_t unit, const UsePart& early) {
  const auto thread = std::this_thread::get_id();
  auto& s = state(unit);
  add_pin(lock, unit);
  try {
    if (s.presence == Presence::absent) start(lock, unit);
    const auto part = s.presence == Presence::started ? source_.here(unit) : UnitPart{};
    if (part.values.defined()) {
      lock.unlock();
      const int64_t rows = early(part);
      lock.lock();
      counts_.early_rows += rows;
    }
    acquire(lock, unit);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    drop_pin(s, thread);
    throw;
  }
  drop_pin(s, thread);
}

// Pins a unit and makes it present.
void Pager::acquire(std::unique_lock<std::mutex>& lock, int64_t unit) {
  auto& s = state(unit);
  add_pin(lock, unit);
  try {
    while (s.presence != Presence::present) {  // without the lock others may change it
      if (s.presence == Presence::absent) {
        start(lock, unit);
      } else if (s.presence == Presence::started) {
        complete(lock, unit);
      } else {
        gathered_.wait(lock, [&] { return s.presence != Presence::gathering; });
      }
    }
  } catch (...) {
    drop_pin(s, std::this_thread::get_id());
    throw;
  }
  order_after_gather(s);
  recency_.splice(recency_.end(), recency_, s.recency);
}

// Starts the gather of an absent unit when its turn has come: Note [Gathers that ranks agree on].
void Pager::start(std::unique_lock<std::mutex>& lock, int64_t unit) {
  if (source_.asks(unit) != UnitSource::Asks::never) agree(lock, unit, {}, {});
  start_agreed(lock, unit);
}

void Pager::start_agreed(std::unique_lock<std::mutex>& lock, int64_t unit) {
  start_owed(lock, unit);
  if (state(unit).presence == Presence::absent) gather(lock, unit);  // others may have come before
}

void Pager::gather(std::unique_lock<std::mutex>& lock, int64_t unit) {
  auto& s = state(unit);
  const int64_t bytes = layout_.unit(unit).bytes();
  s.presence = Presence::gathering;
  try {
    if (!source_.in_place()) {
      lock.unlock();
      {
        const StreamScope on(side_);
        source_.prepare(unit);
      }
      lock.lock();
    }
    make_room(bytes);
    if (!source_.in_place()) s.frame = take_frame(bytes);
    live_ += bytes;
    ++counts_.gathers;
    counts_.gathered_bytes += bytes;
    if (!source_.in_place()) {
      void* destination = s.frame.tensor().data_ptr();
      lock.unlock();  // no lock is held while this rank may wait for peers
      const StreamScope on(side_);
      s.frame.wait();
      source_.gather(unit, destination);
      if (side_) {
        unsettled_ = true;
        source_.finish(unit);
        s.gathered.record(*side_);
      }
      lock.lock();
      s.data = destination;
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    give_up(unit);
    throw;
  }
  s.presence = Presence::started;
  gathered_.notify_all();
}

// Waits for a gather that has been started.
void Pager::complete(std::unique_lock<std::mutex>& lock, int64_t unit) {
  auto& s = state(unit);
  s.presence = Presence::gathering;
  lock.unlock();
  try {
    if (source_.in_place()) {
      s.data = source_.view(unit);
    } else if (!side_) {
      source_.finish(unit);
    }
  } catch (...) {
    lock.lock();
    give_up(unit);
    throw;
  }
  lock.lock();
  for (const auto& segment : layout_.unit(unit).segments)
    show(pages_[static_cast<size_t>(segment.parameter)], s.data);
  s.recency = recency_.insert(recency_.end(), unit);
  s.presence = Presence::present;
  gathered_.notify_all();
}

// Makes a unit absent again after its gather has failed.
void Pager::give_up(int64_t unit) {
  auto& s = state(unit);
  if (s.frame.tensor().defined() || source_.in_place()) live_ -= layout_.unit(unit).bytes();
  give_frame(s);
  s.data = nullptr;
  s.presence = Presence::absent;
  gathered_.notify_all();
}

void Pager::unpin(std::span<const int64_t> units, size_t position, std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  const bool planned = following_ != nullptr && position < following_->trace.operators() &&
                       following_->trace.has(position, units);
  for (size_t i = 0; i < units.size(); ++i) {
    auto& s = state(units[i]);
    drop_pin(s, thread);
    if (!planned || !s.pins.empty() || s.dirty > 0) continue;
    const size_t touch = following_->trace.begin(position) + i;
    // This is rule 5 of Note [Gathers that ranks agree on].
    const bool stays = units[i] == agreed_ && !following_->trace.has(position, units, true);
    if (following_->keep[touch] == 0 && !stays) evict(units[i]);
  }
  while (live_ > options_.budget_bytes && evict_one()) {
  }
}

void* Pager::data(int64_t unit) const {
  std::lock_guard lock(mutex_);
  const auto& s = state(unit);
  return s.presence == Presence::present ? s.data : nullptr;
}

// Releases units that nobody pins until `bytes` more fit into the budget.
void Pager::make_room(int64_t bytes) {
  while (live_ + bytes > options_.budget_bytes && evict_one()) {
  }
}

// Evicts one unit that may go: by the plan the one whose next use is farthest, otherwise the least
// recently used. Returns false if there is none.
bool Pager::evict_one() {
  const UnitState* best = nullptr;
  int64_t victim = 0;
  for (const int64_t unit : recency_) {
    const auto& s = state(unit);
    if (!s.pins.empty() || s.dirty > 0 || (best != nullptr && s.next_use <= best->next_use))
      continue;
    best = &s;
    victim = unit;
    if (following_ == nullptr) break;
  }
  if (best == nullptr) return false;
  evict(victim);
  return true;
}

void Pager::evict(int64_t unit) {
  auto& s = state(unit);
  for (const auto& segment : layout_.unit(unit).segments)
    hide(pages_[static_cast<size_t>(segment.parameter)]);
  recency_.erase(s.recency);
  live_ -= layout_.unit(unit).bytes();
  s.presence = Presence::absent;
  s.data = nullptr;
  give_frame(s);
}

// Makes the current stream wait for the gather, so that work which this thread enqueues from now on
// runs after it.
void Pager::order_after_gather(UnitState& state) const {
  const auto stream = current_stream(options_.device);
  if (!stream || std::find(state.users.begin(), state.users.end(), *stream) != state.users.end())
    return;
  state.gathered.wait();
  state.users.push_back(*stream);
}

// Takes the frame that was given back first, since its operators have most likely ended.
StreamMemory Pager::take_frame(int64_t bytes) {
  if (!side_) return StreamMemory(host_pages(bytes, ledger_, options_.category));
  const auto found =
      std::find_if(free_frames_.begin(), free_frames_.end(),
                   [&](const StreamMemory& frame) { return frame.tensor().numel() == bytes; });
  if (found != free_frames_.end()) {
    auto frame = std::move(*found);
    free_frames_.erase(found);
    free_bytes_ -= bytes;
    return frame;
  }
  while (!free_frames_.empty() && live_ + free_bytes_ + bytes > options_.budget_bytes)
    drop_oldest_frame();
  const StreamScope on(side_);
  return StreamMemory(device_empty(bytes, at::kByte, options_.device, ledger_, options_.category));
}

void Pager::give_frame(UnitState& state) {
  auto frame = std::exchange(state.frame, {});
  const auto users = std::exchange(state.users, {});
  if (!side_ || !frame.tensor().defined()) return;
  for (const auto& stream : users) frame.used(stream);
  free_bytes_ += frame.tensor().numel();
  free_frames_.push_back(std::move(frame));
}

void Pager::drop_oldest_frame() {
  free_bytes_ -= free_frames_.front().tensor().numel();
  free_frames_.pop_front();
}

void Pager::settle_gathers() {
  if (unsettled_.exchange(false)) wait_for(side_, gathers_);
}

// Evicts every unit that may go, including those whose gather is under way.
void Pager::evict_all() {
  for (int64_t unit = 0; unit < layout_.unit_count(); ++unit) {
    auto& s = state(unit);
    if (s.presence != Presence::started) continue;
    try {
      if (!source_.in_place() && !side_) source_.finish(unit);
    } catch (const Error&) {  // the group's next call throws it again
    }
    give_up(unit);
  }
  while (evict_one()) {
  }
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

std::vector<int64_t> Pager::dirty() const {
  std::lock_guard lock(mutex_);
  return dirty_;
}

void Pager::release_all() {
  std::lock_guard lock(mutex_);
  evict_all();
}

bool Pager::pinned(int64_t unit) const {
  const std::lock_guard lock(mutex_);
  return !state(unit).pins.empty();
}

Pager::Change::Change(Pager& pager) : pager_(pager) {
  std::unique_lock lock(pager.mutex_);
  pager.start_owed(lock, kNoUnit);
  const auto before = std::exchange(pager.changes_, std::this_thread::get_id());
  outermost_ = before != pager.changes_;
  try {
    pager.await_unpinned(lock);
  } catch (...) {
    pager.changes_ = before;
    pager.changed_.notify_all();
    throw;
  }
}

Pager::Change::~Change() {
  if (!outermost_) return;
  const std::lock_guard lock(pager_.mutex_);
  pager_.changes_.reset();
  pager_.changed_.notify_all();
}

bool Pager::holds(std::thread::id thread) const {
  return std::ranges::any_of(units_, [&](const UnitState& unit) {
    return std::find(unit.pins.begin(), unit.pins.end(), thread) != unit.pins.end();
  });
}

void Pager::await_unpinned(std::unique_lock<std::mutex>& lock) {
  const auto until = std::chrono::steady_clock::now() + options_.patience;
  const auto this_thread = std::this_thread::get_id();
  for (;;) {
    int64_t pinned = -1;
    bool own = false;
    for (int64_t u = 0; u < layout_.unit_count(); ++u) {
      const auto& pins = state(u).pins;
      if (pins.empty()) continue;
      own = std::find(pins.begin(), pins.end(), this_thread) != pins.end();
      pinned = u;
      if (own) break;
    }
    if (pinned < 0) return;
    const auto& first = layout_.unit(pinned).segments.front();
    const auto& name = layout_.parameters()[static_cast<size_t>(first.parameter)].name;
    if (own) {
      throw Error(fmt::format(
          "The parameters change while the unit of '{}' is still in use: close "
          "zero::Gathered scopes before Engine::step, and do not step inside an operator.",
          name));
    }
    if (unpinned_.wait_until(lock, until) == std::cv_status::timeout &&
        !state(pinned).pins.empty()) {
      throw Error(fmt::format(
          "The parameters are to change, and another thread has had the unit of '{}' in "
          "use for {} ms: let it close zero::Gathered scopes sooner, or wait for it "
          "before Engine::step.",
          name, options_.patience.count()));
    }
  }
}

void Pager::invalidate() {
  std::unique_lock lock(mutex_);
  await_unpinned(lock);
  ensure(dirty_.empty(), "dirty pages are taken before the units are invalidated");
  evict_all();
  settle_gathers();
}

void Pager::end_step() {
  std::lock_guard lock(mutex_);
  if (!trace_.empty() && trace_.operators() < kMostOperators) {
    auto known = plans_.begin();
    while (known != plans_.end() && !((*known)->trace == trace_)) ++known;
    if (known == plans_.end()) {
      if (plans_.size() == kPlans) plans_.pop_back();
      known = plans_.insert(plans_.end(), make(trace_));
    }
    std::rotate(plans_.begin(), known, known + 1);
  }
  trace_.clear();
  position_ = 0;
  following_ = nullptr;
  in_step_ = false;
  agreed_ = kNoUnit;
}

std::unique_ptr<Plan> Pager::make(Trace trace) const {
  std::vector<int64_t> unit_bytes;
  for (const auto& unit : layout_.units()) unit_bytes.push_back(unit.bytes());
  return std::make_unique<Plan>(make_plan(
      std::move(trace), unit_bytes,
      {.budget_bytes = options_.budget_bytes, .prefetch_bytes = options_.prefetch_bytes}));
}

PagerCounts Pager::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

void Pager::set_budget(int64_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes == std::exchange(options_.budget_bytes, bytes)) return;
  make_plans();
  while (live_ > options_.budget_bytes && evict_one()) {
  }
  while (!free_frames_.empty() && live_ + free_bytes_ > bytes) drop_oldest_frame();
}

void Pager::set_prefetch(int64_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes != std::exchange(options_.prefetch_bytes, bytes)) make_plans();
}

// Plans the known steps again, with the current options.
void Pager::make_plans() {
  following_ = nullptr;
  for (auto& plan : plans_) plan = make(std::move(plan->trace));
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
                    "Engine took it over. Convert the module before constructing the Engine, and "
                    "write values inside zero::Gathered.",
                    layout_.parameters()[i].name));
  }
}

}  // namespace zero::paging
