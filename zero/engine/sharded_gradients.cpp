#include "zero/engine/sharded_gradients.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"

namespace zero {

namespace {

// The complete buckets that may wait for a unit before them: Note [Sharded gradients].
constexpr int64_t kWaiting = 8;

}  // namespace

ShardedGradients::ShardedGradients(const ReductionContext& context)
    : GradientReduction(context),
      sums_(context, context.settings.hands_over ? this : nullptr),
      units_(static_cast<size_t>(context.layout.unit_count())),
      under_way_(context, Reductions::Arrays::own) {
  make_losses();
}

void ShardedGradients::make_losses() {
  if (!context_.settings.feedback) return;
  auto& shards = *context_.placement.shards;
  for (const int64_t u : context_.order.units()) {
    const auto& link = context_.form(u).link;
    if (!link.quantised()) continue;
    const int64_t bytes = shards.feedback_bytes(link.quantisation, context_.layout.slice_numel(u));
    if (bytes > 0) state(u).losses = shards.empty(bytes, at::kByte, Category::gradients).zero_();
  }
}

void ShardedGradients::begin_pass(const Pass& pass) {
  holds_ = pass.holds;
  waiting_ = 0;
  context_.order.restart();
  context_.arrivals.restart_counts();
  for (auto& unit : units_) unit.turn = Turn::awaited;
  for (const int64_t p : pass.shared) state(context_.layout.unit_of(p)).turn = Turn::at_the_end;
  context_.order.move_back([&](int64_t unit) { return state(unit).turn == Turn::at_the_end; });
}

const at::Tensor& ShardedGradients::array(int64_t unit) {
  auto& bucket = state(unit).bucket;
  if (!bucket.array.defined()) {
    bucket.array =
        context_.pool.take(context_.layout.unit(unit).numel, context_.form(unit).collected);
    bucket.pooled = true;
  }
  return bucket.array;
}

bool ShardedGradients::adopt(int64_t unit, const at::Tensor& gradient, const at::Tensor& variable) {
  auto& bucket = state(unit).bucket;
  if (bucket.array.defined() || !stands_alone(unit, gradient, variable)) return false;
  bucket = {.array = gradient.as_strided({context_.layout.unit(unit).numel}, {1}),
            .pooled = false,
            .home = current_stream(gradient.device())};
  return true;
}

// Returns whether the gradient is all of a unit that is too large for the pool's buckets, lies as
// the unit does, and is nobody else's.
bool ShardedGradients::stands_alone(int64_t unit, const at::Tensor& gradient,
                                    const at::Tensor& variable) const {
  const int64_t numel = context_.layout.unit(unit).numel;
  const auto& form = context_.form(unit);
  return numel * form.bucket_element_bytes() > context_.pool.bucket_bytes() &&
         gradient.numel() == numel && gradient.scalar_type() == form.collected &&
         gradient.strides() == variable.strides() && variable.is_non_overlapping_and_dense() &&
         !gradient.requires_grad() && gradient.use_count() == 1 &&
         gradient.storage().use_count() == 1;
}

void ShardedGradients::arrived(int64_t parameter, bool first) {
  if (!first) return;
  const int64_t unit = context_.layout.unit_of(parameter);
  const auto turn = state(unit).turn;
  if (!context_.arrivals.count(unit) || turn == Turn::over) return;
  context_.order.became_ready(unit);
  if (turn == Turn::awaited) ++waiting_;
  if (!holds_) reduce_ready();
}

// Reduces units in order, as long as the next one is complete or keeps too many others waiting.
void ShardedGradients::reduce_ready() {
  while (const auto unit = context_.order.turn()) {
    const bool complete = context_.arrivals.all_counted(*unit);
    const bool leaves = waiting_ >= kWaiting && may_leave(*unit);
    if (state(*unit).turn == Turn::at_the_end || (!complete && !leaves)) return;
    if (complete) --waiting_;
    context_.order.advance();
    reduce(*unit);
  }
}

// Returns whether a unit may be reduced before its gradients are all here. It may not if a backward
// function has a place in its bucket, if late gradients could not be used any more (updates in
// backward), or if an update of the step before may still read what is there (several layers in one
// pass).
bool ShardedGradients::may_leave(int64_t unit) const {
  return context_.order.known() && !context_.arrivals.awaits(unit) && !holds_ &&
         !context_.settings.hands_over;
}

// Starts the reduce-scatter of a unit's bucket.
void ShardedGradients::reduce(int64_t unit) {
  const at::NoGradGuard no_grad;
  if (observer_ != nullptr) observer_->reduction_starts(unit);
  auto& u = state(unit);
  u.turn = Turn::over;
  context_.arrivals.restart_count(unit);
  array(unit);
  Reduction reduction{.unit = unit,
                      .sums = &sums_.of(unit),
                      .bucket = std::exchange(u.bucket, {}),
                      .adds = u.sum != Sum::none};
  if (u.sum == Sum::none) u.sum = Sum::started;
  close(unit, reduction.bucket.array);
  if (context_.form(unit).converts()) {
    auto bucket = converted(unit, reduction.bucket.array);
    context_.pool.give(std::exchange(reduction.bucket, {std::move(bucket)}));
  }
  const SideScope on(context_.side, context_.mark);
  reduction.sums->prepare(reduction);
  under_way_.start(std::move(reduction), !context_.form(unit).defers, wire(unit));
  under_way_.advance(1);
}

std::optional<comm::LinkWire> ShardedGradients::wire(int64_t unit) const {
  auto wire = context_.form(unit).link.wire();
  if (wire && !wire->packed) {
    wire->error = state(unit).losses;
    wire->beta = context_.settings.feedback.value_or(0);
  }
  return wire;
}

void ShardedGradients::end_pass() {
  while (const auto unit = context_.order.turn()) {
    context_.order.advance();
    reduce(*unit);
  }
}

GradientPresence::Report ShardedGradients::report() const {
  GradientPresence::Report report{.left = std::vector<uint8_t>(units_.size(), 0)};
  std::ranges::transform(units_, report.left.begin(), [](const Unit& unit) {
    return static_cast<uint8_t>(unit.bucket.array.defined());
  });
  return report;
}

void ShardedGradients::reduce_left(const GradientPresence::Agreement& agreed) {
  for (const int64_t u : context_.order.units()) {
    if (agreed.left[static_cast<size_t>(u)] == 0) continue;
    if (context_.settings.hands_over) {
      throw Error(fmt::format(
          "A gradient arrived for {} after that was reduced and, with update_in_backward, used: "
          "one of its parameters is used in several passes. Switch update_in_backward off, or name "
          "it in LayerSequence::shared.",
          context_.label(u)));
    }
    reduce(u);
  }
}

void ShardedGradients::complete(const GradientPresence::Agreement& /*agreed*/) {
  under_way_.complete();
  sums_.wait();
  sum_over_replicas();
}

// Adds up over the replicas what micro-batches have added up in the block.
void ShardedGradients::sum_over_replicas() {
  std::vector<SliceSum> sums;
  for (const int64_t u : context_.order.units()) {
    if (context_.form(u).defers && state(u).sum != Sum::none)
      sums.emplace_back(*context_.replicas(), sum(u), context_.label(u));
  }
  for (int phase = 0; phase < 3; ++phase) {
    for (auto& sum : sums) sum.advance();
  }
}

bool ShardedGradients::sums_once_a_step() const {
  return std::ranges::any_of(context_.order.units(),
                             [&](int64_t unit) { return context_.form(unit).defers; });
}

void ShardedGradients::clear(bool /*finished*/) {
  under_way_.drop();
  const SideScope on(context_.side, context_.mark);  // memory goes back to that stream
  sums_.wait();
  for (const int64_t u : context_.order.units()) {
    auto& unit = state(u);
    unit.turn = Turn::awaited;
    unit.sum = Sum::none;
    const auto bucket = std::exchange(unit.bucket, {});
    if (bucket.array.defined() && bucket.pooled) context_.pool.give(bucket.array);
    // An update under way has its own.
    if (!context_.settings.doubled) unit.detached = at::Tensor();
    sums_.of(u).clear(u);
  }
}

at::Tensor ShardedGradients::open_sum(int64_t unit) {
  at::Tensor sum;
  {
    const SideScope on(context_.side, context_.mark);
    sum = sums_.of(unit).make(unit);
  }
  wait_for(context_.side, context_.mark);
  auto& state_of_sum = state(unit).sum;
  if (state_of_sum == Sum::none) {
    state_of_sum = Sum::started;
    sum.zero_();
  }
  return sum;
}

void ShardedGradients::detach() {
  for (const int64_t u : context_.order.units()) state(u).detached = sums_.of(u).detach(u);
}

bool ShardedGradients::handed_over() const {
  return context_.settings.hands_over &&
         std::ranges::any_of(units_, [](const Unit& unit) { return unit.sum != Sum::none; });
}

void ShardedGradients::give(int64_t unit, at::Tensor sum) {
  state(unit).sum = Sum::handed_over;
  user_->take_up(unit, std::move(sum));
}

void ShardedGradients::forget_losses() {
  for (auto& unit : units_) {
    if (unit.losses.defined()) unit.losses.zero_();
  }
}

}  // namespace zero
