#include "zero/engine/update_schedule.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "zero/base/host_allocator.h"
#include "zero/comm/wait_clock.h"
#include "zero/engine/work_memory.h"

namespace zero {

UpdateSchedule::UpdateSchedule(const EnginePlan& plan, const StepProgress& progress,
                               StateTable& table, UpdateFlow& update, ReduceFlow& reduce,
                               ParameterWrites& writes)
    : layout_(plan.layout()),
      table_(table),
      update_(update),
      reduce_(reduce),
      timing_(plan.timing()),
      progress_(progress),
      writes_(writes),
      pending_(plan.units().size(), 0),
      left_(plan.units().size()) {
  if (timing_.in_backward) all_present_.assign(plan.model().names().size(), 1);
  if (!timing_.any_beside(plan.units())) return;
  queue_ = std::make_unique<UpdateQueue>([this] {
    table_.wait_for_written_states();
    table_.end_updates();
  });
  table_.run_updates_beside([this](int64_t index) { return queue_->upcoming(index); });
}

template <class Wait>
void UpdateSchedule::counted(const Wait& wait) {
  const Timeline::Scope waiting(update_.timeline(), Activity::wait_update);
  std::optional<comm::ClockedScope> scope;
  if (auto* clock = table_.wait_clock()) scope.emplace(*clock);
  wait();
}

void UpdateSchedule::begin_pass(bool layer_major) {
  // Completes updates of units that this forward pass has not used. If that pass is still to come,
  // `end_pass` does so.
  if (!delayed_ && (!layer_major || timing_.in_backward)) finish();
}

void UpdateSchedule::end_pass() {
  if (!delayed_) finish();
}

void UpdateSchedule::update_in_backward(int64_t unit, at::Tensor sum) {
  const auto bytes = static_cast<int64_t>(sum.nbytes());
  const double scale = progress_.mean_scale() * progress_.clipping_factor_in_backward();
  queue_->push(unit, [this, unit, scale, sum = std::move(sum)] {
    if (update_.two_sweeps(unit)) {
      update_.first_sweep(unit, sum, scale, all_present_);
    } else {
      update_.update(unit, sum, scale, all_present_);
    }
  });
  const auto held = HostAllocator::instance().held();
  if (!held_before_updates_) held_before_updates_ = held.peak;
  if (timing_.may_stay_pending(table_.plan(unit)) && *held_before_updates_ - held.current > bytes)
    return;
  counted([&] {
    queue_->wait_for_fewer(std::max(static_cast<int64_t>(kUpdatesUnderWay), queue_->size()));
  });
}

void UpdateSchedule::start(double scale, int64_t steps) {
  reduce_.detach();
  if (!timing_.in_backward) update_.begin();
  present_ = reduce_.present();
  delayed_ = timing_.delayed_after && steps >= *timing_.delayed_after;
  if (timing_.delayed_after)
    table_.wait_for_copies();  // those of the step before have just been put into force
  if (!queue_) {
    update_now(scale);
    return;
  }
  for (size_t i = 0; i < update_.sweeps().batches().size(); ++i) sweep_first(i, scale);
  // The queue runs the last one first, so they run in the order in which the next forward pass
  // needs them.
  for (const int64_t u : reduce_.order()) {
    const bool begun = reduce_.handed_over(u);
    if (begun && !update_.two_sweeps(u)) continue;
    const auto& present = begun ? all_present_ : present_;
    queue_->push(u, [this, u, scale, &present, gradient = reduce_.detached(u),
                     stream = current_stream(table_.device())] {
      const StreamScope on(stream);
      update_.update(u, gradient, scale, present);
    });
  }
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    if (table_.trainable(u)) {
      pending_[static_cast<size_t>(u)] = 1;
      if (!delayed_ && !timing_.may_stay_pending(table_.plan(u))) finish_unit(u);
    }
    writes_.publish(u);
  }
}

// Makes the first sweeps of a batch that backward has not made, and the exchange that follows.
void UpdateSchedule::sweep_first(size_t batch, double scale) {
  for (const int64_t u : update_.sweeps().batches()[batch].units) {
    if (reduce_.handed_over(u)) continue;
    const auto sweep = [this, u, scale, gradient = reduce_.detached(u)] {
      update_.first_sweep(u, gradient, scale, present_);
    };
    if (queue_) {
      queue_->push(u, sweep);
    } else {
      sweep();
    }
  }
  if (queue_) counted([&] { queue_->wait_all(); });
  update_.sweeps().exchange(batch);
}

void UpdateSchedule::update_now(double scale) {
  const auto update = [&](int64_t u) {
    if (table_.trainable(u)) {
      if (timing_.may_stay_pending(table_.plan(u))) {
        leave(u, scale);
      } else {
        update_.update(u, reduce_.detached(u), scale, present_);
      }
    }
    writes_.publish(u);
  };
  const auto& batches = update_.sweeps().batches();
  for (size_t i = 0; i < batches.size(); ++i) {
    sweep_first(i, scale);
    for (const int64_t u : batches[i].units) update(u);
  }
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    if (!update_.two_sweeps(u)) update(u);
  }
  table_.end_updates();
}

// Leaves the update to the thread that completes it, with the sum that it reads.
void UpdateSchedule::leave(int64_t unit, double scale) {
  const std::lock_guard lock(left_mutex_);
  left_[static_cast<size_t>(unit)] = [this, unit, scale, gradient = reduce_.detached(unit)] {
    update_.update(unit, gradient, scale, present_);
  };
  pending_[static_cast<size_t>(unit)] = 1;
}

void UpdateSchedule::take_back_updates() {
  counted([&] {
    queue_->wait_all();
    for (int64_t u = 0; u < layout_.unit_count(); ++u) table_.take_back_update(u);
  });
  update_.take_back();
}

// Returns whether the unit's parameters may be read without completing an update. A delayed update
// leaves the current ones alone.
bool UpdateSchedule::may_read_now(int64_t unit) const {
  return delayed_ || pending_[static_cast<size_t>(unit)] == 0;
}

void UpdateSchedule::complete_before_read(int64_t unit) {
  if (!delayed_) finish_unit(unit);
}

bool UpdateSchedule::try_complete(int64_t unit) {
  if (may_read_now(unit)) return true;
  if (!queue_->done(unit)) return false;
  finish_unit(unit);
  return true;
}

// Runs an update that was left to the thread that completes it.
void UpdateSchedule::run_left(int64_t unit) {
  const std::lock_guard lock(left_mutex_);
  auto& update = left_[static_cast<size_t>(unit)];
  if (!update) return;
  const c10::NoGradGuard no_grad;
  update();
  update = {};  // frees the sum
  pending_[static_cast<size_t>(unit)] = 0;
}

void UpdateSchedule::finish_unit(int64_t unit) {
  if (!queue_) {
    run_left(unit);
    return;
  }
  auto& pending = pending_[static_cast<size_t>(unit)];
  if (pending == 0) return;
  counted([&] {
    queue_->wait(unit);
    table_.use_new_parameters(unit);
  });
  pending = 0;
}

bool UpdateSchedule::pending() const {
  const std::lock_guard lock(left_mutex_);
  return std::find(pending_.begin(), pending_.end(), 1) != pending_.end();
}

void UpdateSchedule::finish() {
  if (!pending()) return;
  if (delayed_) {
    compute_delayed();
  } else if (queue_) {
    counted([&] { queue_->wait_all(); });
  }
  for (int64_t u = 0; u < layout_.unit_count(); ++u) finish_unit(u);
}

void UpdateSchedule::settle() {
  if (delayed()) {
    compute_delayed();
  } else {
    finish();
  }
}

void UpdateSchedule::compute_delayed() {
  writes_.refuse("while its delayed update was under way");
  counted([&] { queue_->wait_all(); });
}

void UpdateSchedule::resume_delayed() {
  delayed_ = true;
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    if (!table_.trainable(u)) continue;
    pending_[static_cast<size_t>(u)] = 1;
    table_.keep_new_parameters(u);
  }
}

void UpdateSchedule::wait() {
  if (queue_) queue_->wait_all();
}

void UpdateSchedule::discard() {
  if (queue_) {
    for (int64_t u = 0; u < layout_.unit_count(); ++u) finish_unit(u);
  } else {
    const std::lock_guard lock(left_mutex_);
    std::ranges::fill(left_, std::function<void()>());
    std::ranges::fill(pending_, uint8_t{0});
  }
  table_.drop_new_parameters();
}

}  // namespace zero
