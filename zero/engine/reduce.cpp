#include "zero/engine/reduce.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/flat.h"

namespace zero {

namespace {

std::vector<int64_t> trained_units(const StateTable& table, const partition::Layout& layout) {
  std::vector<int64_t> units;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    if (table.trainable(u)) units.push_back(u);
  }
  return units;
}

ReductionSettings settings_of(const EnginePlan& plan) {
  const auto& config = plan.config();
  const auto& placement = plan.placement();
  ReductionSettings settings{
      .unit_bytes = config.unit_bytes,
      .predivisor = config.gradient_predivisor(placement.ranks(), placement.sharded.gradients),
      .doubled = plan.timing().delayed_after.has_value(),
      .hands_over = plan.timing().in_backward};
  if (const auto& chosen = config.quantised.feedback)
    settings.feedback = static_cast<float>(chosen->beta);
  return settings;
}

}  // namespace

ReduceFlow::ReduceFlow(const EnginePlan& plan, StateTable& table)
    : layout_(plan.layout()),
      table_(table),
      placement_(plan.placement()),
      settings_(settings_of(plan)),
      side_(side_stream(table.device())),
      labels_(unit_labels(layout_, "gradients of ")),
      unit_norms_(layout_.unit_count(), table.device()),
      arrivals_(layout_, plan.model().parameters()),
      presence_(layout_),
      order_(trained_units(table, layout_)),
      pool_(make_pool()),
      reduction_(make_reduction()) {}

BucketPool ReduceFlow::make_pool() const {
  int64_t bucket_bytes = 0;
  int64_t slice_bytes = 0;
  for (const int64_t u : order_.units()) {
    const auto& unit = layout_.unit(u);
    if (unit.bytes() > settings_.unit_bytes && unit.segments.size() == 1) continue;
    const auto& form = table_.plan(u).gradients;
    bucket_bytes = std::max(bucket_bytes, unit.numel * form.bucket_element_bytes());
    slice_bytes = std::max(slice_bytes, layout_.slice_numel(u) * form.slice_element_bytes());
  }
  return {*placement_.shards, side_, bucket_bytes, slice_bytes};
}

std::unique_ptr<GradientReduction> ReduceFlow::make_reduction() {
  const ReductionContext context{layout_, table_, placement_, settings_, arrivals_, presence_,
                                 order_,  pool_,  labels_,    side_,     mark_};
  return placement_.sharded.gradients ? sharded_gradients(context) : replicated_gradients(context);
}

void ReduceFlow::begin_pass(const GradientReduction::Pass& pass) {
  const std::lock_guard lock(mutex_);
  if (handed_over()) {
    throw Error(
        "A second backward pass in a step with update_in_backward: the first has already updated "
        "weights. Call Engine::step after each; where a pass failed, load a checkpoint. (Layers "
        "that are recomputed by reentrant checkpoints are passes of their own in loss.backward(): "
        "call Engine::backward.)");
  }
  if (completed_ && reduction_->sums_once_a_step()) {
    throw Error(
        "Engine::backward after the gradients of this step were completed by Engine::gradient or "
        "set_gradient: with replicas (mics_shard_size) or delayed sums between hosts, read and "
        "write gradients between the last backward and Engine::step; to leave a pass out of the "
        "step, call Engine::zero_grad before the next.");
  }
  completed_ = false;
  brought_ = Brought::gradients;
  arrivals_.begin_pass();
  reduction_->begin_pass(pass);
}

at::Tensor ReduceFlow::place(int64_t parameter) {
  const std::lock_guard lock(mutex_);
  const auto& plan = table_.plan(layout_.unit_of(parameter));
  if (!arrivals_.await(parameter) || plan.gradients.collected != plan.dtype) return {};
  return arrivals_.give_place(parameter, reduction_->array(layout_.unit_of(parameter)));
}

bool ReduceFlow::announce_rows(int64_t parameter, const at::Tensor& indices) {
  const std::lock_guard lock(mutex_);
  return reduction_->announce_rows(parameter, indices);
}

c10::intrusive_ptr<AnnouncedLookUp> ReduceFlow::announce_look_up(int64_t parameter,
                                                                 const at::Tensor& indices) {
  const std::lock_guard lock(mutex_);
  return reduction_->announce_look_up(parameter, indices);
}

GradientTaker* ReduceFlow::taker(int64_t parameter) {
  const std::lock_guard lock(mutex_);
  return arrivals_.in_pass() ? reduction_->taker(parameter) : nullptr;
}

void ReduceFlow::returns_whole(int64_t parameter, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  reduction_->returns_whole(parameter, gradient);
}

void ReduceFlow::arrive(int64_t parameter, const at::Tensor& variable) {
  const auto gradient = GradientArrivals::remove_gradient(variable);
  if (!gradient.defined()) return;
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  if (!arrivals_.in_pass()) {
    if (brought_ == Brought::nothing) brought_ = Brought::foreign;
    return;
  }
  const int64_t unit = layout_.unit_of(parameter);
  arrivals_.arrive(parameter, gradient);
  reduction_->brought(parameter, gradient);
  if (!reduction_->adopt(unit, gradient, variable))
    arrivals_.collect(parameter, variable, gradient, reduction_->array(unit));
  completed_ = false;
  presence_.note(parameter);
  placement_.shards->activity()->use(labels_[static_cast<size_t>(unit)]);
  reduction_->arrived(parameter, arrivals_.note_in_array(parameter));
}

void ReduceFlow::reduce_ready() {
  const std::lock_guard lock(mutex_);
  reduction_->reduce_ready();
}

void ReduceFlow::end_pass() {
  const std::lock_guard lock(mutex_);
  arrivals_.end_pass();
  reduction_->end_pass();
}

void ReduceFlow::drop_pass() {
  const std::lock_guard lock(mutex_);
  arrivals_.end_pass();
  reduction_->drop_pass();
}

void ReduceFlow::complete() {
  const std::lock_guard lock(mutex_);
  if (completed_) return;
  const at::NoGradGuard no_grad;
  GradientPresence::Agreement agreed;
  if (!dropped_by_some_) {
    agreed = presence_.agree(placement_, order_, reduction_->report());
    if (agreed.dropped_by_some) reduction_->join_begun();
    dropped_by_some_ = agreed.dropped_by_some;
  }
  if (dropped_by_some_) {
    throw Error(
        "Engine::step after a pass that has thrown on some ranks: the other ranks have already "
        "added the gradients of that pass to their own. Call Engine::zero_grad on all ranks, and "
        "make the step again.");
  }
  reduction_->reduce_late(agreed);
  completed_ = true;  // a failure from here on is final
  {
    const SideScope on(side_, mark_);
    reduction_->complete(agreed);
  }
  wait_for(side_, mark_);
}

std::vector<optim::SquaredNorm> ReduceFlow::norms() {
  return unit_norms_.of(order_.units(), presence_, *reduction_);
}

void ReduceFlow::detach() {
  const std::lock_guard lock(mutex_);
  reduction_->detach();
}

void ReduceFlow::join_begun() {
  const std::lock_guard lock(mutex_);
  if (!drops_together() || completed_) return;
  if (comm::any_rank(*placement_.all, has_begun(), "gradients dropped")) reduction_->join_begun();
}

void ReduceFlow::clear() {
  const std::lock_guard lock(mutex_);
  reduction_->clear(completed_);
  arrivals_.clear();
  presence_.clear(completed_);
  brought_ = Brought::nothing;
  completed_ = false;
  dropped_by_some_ = false;
}

void ReduceFlow::forget_residuals() {
  const std::lock_guard lock(mutex_);
  reduction_->forget_residuals();
}

void ReduceFlow::set(int64_t parameter, const at::Tensor& values) {
  complete();
  const std::lock_guard lock(mutex_);
  const int64_t unit = layout_.unit_of(parameter);
  const auto sum = reduction_->open_sum(unit);
  const auto& segment = layout_.segment_of(parameter);
  const auto& owned = table_.plan(unit).owned;
  const auto mine = partition::intersect(segment.range(), owned);
  if (!mine.empty()) {
    sum.narrow(0, mine.begin - owned.begin, mine.size())
        .copy_(values.narrow(0, mine.begin - segment.offset, mine.size()));
  }
  reduction_->store_sum(unit, sum);
  presence_.note_everywhere(parameter);
  brought_ = Brought::gradients;
}

void ReduceFlow::drop(int64_t parameter) {
  complete();
  if (present()[static_cast<size_t>(parameter)] == 0) return;
  set(parameter, at::zeros({layout_.segment_of(parameter).numel}, at::kFloat));
  presence_.forget(parameter);
}

}  // namespace zero
