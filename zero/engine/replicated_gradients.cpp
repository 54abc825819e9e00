#include "zero/engine/replicated_gradients.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace zero {

ReplicatedGradients::ReplicatedGradients(const ReductionContext& context)
    : GradientReduction(context),
      units_(static_cast<size_t>(context.layout.unit_count())),
      came_(context.layout.parameters().size(), 0),
      under_way_(context, Reductions::Arrays::callers) {
  for (int64_t u = 0; u < context_.layout.unit_count(); ++u) {
    if (context_.table.trainable(u)) state(u).gradient = make_whole_gradient(context_, u);
  }
  reserve_buckets();
  early_ = EarlyReductions(reduces_early());
}

// A hook must not wait for other ranks, and early reductions that need a bucket, or have a second
// phase over replicas, would.
bool ReplicatedGradients::reduces_early() const {
  const auto& placement = context_.placement;
  const bool waits = context_.replicas() != nullptr ||
                     std::ranges::any_of(context_.order.units(), [&](int64_t unit) {
                       return context_.form(unit).converts();
                     });
  return placement.ranks() > 1 && !waits &&
         (placement.all->topology().hosts > 1 || context_.side.has_value());
}

// Takes the buckets that the end of a step needs, which must not be refused half-way: one that
// fills, and at stage 1 one on its way.
void ReplicatedGradients::reserve_buckets() {
  auto& pool = context_.pool;
  at::Tensor under_way;
  for (const int64_t u : context_.order.units()) {
    const auto& form = context_.form(u);
    if (!form.converts()) continue;
    auto bucket = pool.take(context_.layout.unit(u).numel, form.reduced);
    if (under_way.defined()) pool.give(std::move(under_way));
    under_way = at::Tensor();
    if (scattered()) {
      under_way = std::move(bucket);
    } else {
      pool.give(std::move(bucket));
    }
  }
  if (under_way.defined()) pool.give(std::move(under_way));
}

void ReplicatedGradients::begin_pass(const Pass& pass) {
  if (has_dropped()) under_way_.drop();  // this pass writes to their arrays
  early_.begin_pass(pass.last, pass.holds);
  if (!early_.in_last_pass()) return;
  std::ranges::fill(came_, uint8_t{0});
  context_.arrivals.restart_counts();
  context_.order.restart();
}

const at::Tensor& ReplicatedGradients::array(int64_t unit) {
  auto& u = state(unit);
  if (u.sum != Sum::started) return u.gradient->whole();
  auto& late = u.late.array;
  if (!late.defined())
    late = context_.pool.take(context_.layout.unit(unit).numel, context_.form(unit).collected);
  return late;
}

void ReplicatedGradients::arrived(int64_t parameter, bool /*first*/) {
  if (!early_.in_last_pass()) return;
  if (std::exchange(came_[static_cast<size_t>(parameter)], uint8_t{1}) != 0) {
    early_.came_again();
    return;
  }
  const int64_t unit = context_.layout.unit_of(parameter);
  if (!context_.arrivals.count(unit) || state(unit).sum == Sum::started) return;
  context_.order.became_ready(unit);
  if (context_.order.known()) reduce_ready();
}

// Reduces units in order as long as the next one is complete, or is not expected.
void ReplicatedGradients::reduce_ready() {
  while (const auto unit = context_.order.turn()) {
    if (context_.presence.expected(*unit)) {
      if (!context_.arrivals.all_counted(*unit)) return;
      const SideScope on(context_.side, context_.mark);
      start(*unit);
    }
    context_.order.advance();
  }
}

// Reduces the expected units whose turn has not come.
void ReplicatedGradients::reduce_expected() {
  for (const int64_t u : context_.order.units()) {
    if (!context_.presence.expected(u) || state(u).sum == Sum::started) continue;
    const SideScope on(context_.side, context_.mark);
    start(u);
  }
}

void ReplicatedGradients::end_pass() {
  if (!early_.in_last_pass() || !context_.order.known()) return;
  early_.begin();
  const at::NoGradGuard no_grad;
  reduce_expected();
}

void ReplicatedGradients::drop_pass() {
  for (auto& unit : units_) {
    if (unit.sum == Sum::started) unit.sum = Sum::dropped;
  }
}

bool ReplicatedGradients::has_dropped() const {
  return std::ranges::any_of(units_, [](const Unit& unit) { return unit.sum == Sum::dropped; });
}

void ReplicatedGradients::join_begun() {
  for (auto& unit : units_) {
    if (unit.sum == Sum::dropped) unit.sum = Sum::started;
  }
  if (!early_.begun()) {
    early_.begin();  // so that the next steps of all ranks reduce nothing early
    const at::NoGradGuard no_grad;
    reduce_expected();
  }
  under_way_.drop();
}

GradientPresence::Report ReplicatedGradients::report() const {
  GradientPresence::Report report{.left = std::vector<uint8_t>(units_.size(), 0),
                                  .refuses_early = early_.refuses(),
                                  .began_early = early_.begun()};
  std::ranges::transform(units_, report.left.begin(), [](const Unit& unit) {
    return static_cast<uint8_t>(unit.late.array.defined());
  });
  return report;
}

void ReplicatedGradients::complete(const GradientPresence::Agreement& agreed) {
  early_.agree(agreed.refuses_early);
  for (auto& unit : units_) {
    if (unit.sum == Sum::dropped) unit.sum = Sum::open;
  }
  const auto& order = context_.order.units();
  if (agreed.began_early) reduce_expected();  // where this rank's pass has not
  for (const int64_t u : order) {
    if (context_.presence.wanted(u) && state(u).sum != Sum::started) start(u);
  }
  under_way_.complete();
  for (const int64_t u : order) {
    if (agreed.left[static_cast<size_t>(u)] != 0) add_late(u);
  }
  for (const int64_t u : order) {
    if (context_.presence.wanted(u)) state(u).gradient->bring_down();
  }
}

// Starts the sum over ranks. The caller is on the side stream.
void ReplicatedGradients::start(int64_t unit) {
  auto& u = state(unit);
  u.sum = Sum::started;
  u.filled = true;
  const auto& whole = u.gradient->whole();
  const auto& label = context_.label(unit);
  auto& all = *context_.placement.all;
  close(unit, whole);
  const bool converts = context_.form(unit).converts();
  if (scattered()) {
    under_way_.start({.unit = unit,
                      .bucket = {converts ? converted(unit, whole) : whole, converts},
                      .output = slice(unit)},
                     true, context_.form(unit).link.wire());
    // Each that is under way needs memory of its own.
    if (converts || context_.replicas() != nullptr) under_way_.advance(1);
  } else if (converts) {
    auto bucket = converted(unit, whole);
    all.all_reduce(bucket, label).wait();
    whole.copy_(bucket);
    context_.pool.give(std::move(bucket));
  } else {
    under_way_.add({.unit = unit,
                    .bucket = {whole, false},
                    .over_ranks = SliceSum(all.all_reduce(whole, label))});
  }
}

// Adds the sum over ranks of what came after the unit had been reduced: Note [Early reductions].
void ReplicatedGradients::add_late(int64_t unit) {
  const auto& gradient = *state(unit).gradient;
  auto bucket = array(unit);
  state(unit).late = {};
  close(unit, bucket);
  if (scattered()) {
    const auto sum = context_.placement.shards->empty(context_.layout.slice_numel(unit),
                                                      gradient.whole().scalar_type(),
                                                      Category::gradient_buckets);
    under_way_.start({.unit = unit, .bucket = {bucket, false}, .output = sum}, true,
                     context_.form(unit).link.wire());
    under_way_.complete();
    slice(unit).add_(sum);
  } else {
    context_.placement.all->all_reduce(bucket, context_.label(unit)).wait();
    gradient.whole().add_(bucket);
  }
  BucketPool::release(std::move(bucket), context_.side);
}

// Nothing is under way, unless a pass has thrown: then the next pass waits, or `join_begun`.
void ReplicatedGradients::clear(bool finished) {
  early_.clear(finished);
  const SideScope on(context_.side, context_.mark);  // memory goes back to that stream
  for (auto& unit : units_) {
    if (unit.sum == Sum::started) unit.sum = Sum::open;
    unit.filled = false;
    if (unit.late.array.defined()) context_.pool.give(std::exchange(unit.late, {}));
  }
}

at::Tensor ReplicatedGradients::open_sum(int64_t unit) {
  auto target = sum(unit);
  wait_for(context_.side, context_.mark);
  if (!std::exchange(state(unit).filled, true)) target.zero_();
  return target;
}

void ReplicatedGradients::store_sum(int64_t unit, const at::Tensor& /*sum*/) {
  state(unit).gradient->bring_down();
}

void ReplicatedGradients::detach() {
  for (const int64_t u : context_.order.units()) state(u).detached = state(u).gradient->detach();
}

// Returns the slice that stage 1 gives this rank, which is also what its part of the norm is of.
at::Tensor ReplicatedGradients::slice(int64_t unit) const {
  const auto range = context_.layout.slice(unit, context_.placement.shards->rank());
  return state(unit).gradient->whole().narrow(0, range.begin, range.size());
}

at::Tensor ReplicatedGradients::norm_part_on_device(int64_t unit) const {
  return context_.side ? context_.placement.part_of(slice(unit)) : at::Tensor();
}

optim::SquaredNorm ReplicatedGradients::norm(int64_t unit) const {
  const auto values = context_.placement.part_of(slice(unit));
  return optim::squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
}

}  // namespace zero
