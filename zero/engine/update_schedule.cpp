#include "zero/engine/update_schedule.h"

#include <algorithm>
#include <utility>

#include "zero/base/host_allocator.h"
#include "zero/comm/wait_clock.h"

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
      left_(plan.units().size(), 0) {
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

void UpdateSchedule::begin_pass(bool holds) {
  // Completes updates of units that this forward pass has not used. If that pass is still to come,
  // `end_pass` does so.
  if (!delayed_ && (!holds || timing_.in_backward)) finish();
}

void UpdateSchedule::end_pass() {
  if (!delayed_) finish();
}

void UpdateSchedule::take_up(int64_t unit, at::Tensor sum) {
  // The most updates under way while activations have freed no memory for their gradients.
  constexpr int64_t kUpdates = 4;
  const auto bytes = static_cast<int64_t>(sum.nbytes());
  queue_->push(unit, [this, unit, scale = progress_.mean_scale(), sum = std::move(sum)] {
    if (update_.two_passes(unit)) {
      update_.first_pass(unit, sum, scale, all_present_);
    } else {
      update_.update(unit, sum, scale, all_present_);
    }
  });
  const auto held = HostAllocator::instance().held();
  if (!held_before_updates_) held_before_updates_ = held.peak;
  if (timing_.late(table_.plan(unit)) && *held_before_updates_ - held.current > bytes) return;
  counted([&] { queue_->wait_for_fewer(std::max(kUpdates, queue_->size())); });
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
  for (size_t i = 0; i < update_.passes().batches().size(); ++i) pass_first(i, scale);
  // The queue runs the last one first, so they run in the order in which the next forward pass
  // needs them.
  for (const int64_t u : reduce_.order()) {
    const bool begun = reduce_.handed_over(u);
    if (begun && !update_.two_passes(u)) continue;
    const auto& present = begun ? all_present_ : present_;
    queue_->push(u, [this, u, scale, &present, gradient = reduce_.detached(u),
                     stream = current_stream(table_.device())] {
      const StreamScope on(stream);
      update_.update(u, gradient, scale, present);
    });
  }
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    if (!table_.trainable(u)) continue;
    left_[static_cast<size_t>(u)] = 1;
    if (!delayed_ && !timing_.late(table_.plan(u))) finish(u);
  }
}

// Makes the first passes of a batch that backward has not made, and the exchange that follows.
void UpdateSchedule::pass_first(size_t batch, double scale) {
  for (const int64_t u : update_.passes().batches()[batch].units) {
    if (reduce_.handed_over(u)) continue;
    const auto pass = [this, u, scale, gradient = reduce_.detached(u)] {
      update_.first_pass(u, gradient, scale, present_);
    };
    if (queue_) {
      queue_->push(u, pass);
    } else {
      pass();
    }
  }
  if (queue_) counted([&] { queue_->wait_all(); });
  update_.passes().exchange(batch);
}

void UpdateSchedule::update_now(double scale) {
  const auto update = [&](int64_t u) {
    if (table_.trainable(u)) update_.update(u, reduce_.detached(u), scale, present_);
    writes_.publish(u);
  };
  const auto& batches = update_.passes().batches();
  for (size_t i = 0; i < batches.size(); ++i) {
    pass_first(i, scale);
    for (const int64_t u : batches[i].units) update(u);
  }
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    if (!update_.two_passes(u)) update(u);
  }
  table_.end_updates();
}

void UpdateSchedule::take_back_updates() {
  counted([&] {
    queue_->wait_all();
    for (int64_t u = 0; u < layout_.unit_count(); ++u) table_.take_back_update(u);
  });
  update_.take_back();
}

// Returns whether no update of the unit is left that changes the current parameters.
bool UpdateSchedule::reads_old(int64_t unit) const {
  return delayed_ || left_[static_cast<size_t>(unit)] == 0;
}

void UpdateSchedule::complete(int64_t unit) {
  if (!reads_old(unit)) finish(unit);
}

bool UpdateSchedule::try_complete(int64_t unit) {
  if (reads_old(unit)) return true;
  if (!queue_->done(unit)) return false;
  finish(unit);
  return true;
}

void UpdateSchedule::finish(int64_t unit) {
  auto& left = left_[static_cast<size_t>(unit)];
  if (left == 0) return;
  counted([&] {
    queue_->wait(unit);
    table_.use_new_parameters(unit);
  });
  left = 0;
}

bool UpdateSchedule::left() const {
  return std::find(left_.begin(), left_.end(), 1) != left_.end();
}

void UpdateSchedule::finish() {
  if (!left()) return;
  if (delayed_) {
    compute_delayed();
  } else {
    counted([&] { queue_->wait_all(); });
  }
  for (int64_t u = 0; u < layout_.unit_count(); ++u) finish(u);
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
    left_[static_cast<size_t>(u)] = 1;
    table_.keep_new_parameters(u);
  }
}

void UpdateSchedule::wait() {
  if (queue_) queue_->wait_all();
}

void UpdateSchedule::discard() {
  for (int64_t u = 0; u < layout_.unit_count(); ++u) finish(u);
  table_.drop_new_parameters();
}

}  // namespace zero
