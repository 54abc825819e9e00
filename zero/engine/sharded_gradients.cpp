// Stages 2 and 3: every rank keeps its slice of the sum of each unit's gradients.
//
// Note [Sharded gradients]
// The gradients of a unit are collected in a bucket. When the unit is complete, a reduce-scatter
// sums the bucket over the ranks, in every backward pass. The slice of the sum that this rank gets
// is the gradient storage of the formula. Micro-batches add up in it, wherever it lies: on the
// device, on the host or on disk (gradient_sums.h).
//
// Units are reduced in one order (Note [Order of reductions]). When the pass ends, a unit that this
// rank has not touched is reduced with zeros. A pass may leave a unit out (a layer that is skipped
// at random), and the complete units behind it would keep their buckets. So when kWaiting of them
// wait, the unit is reduced with the gradients that have come (`may_be_incomplete` says when it may
// not). A gradient that comes for a unit that this pass has reduced (recomputation, several uses)
// waits in a new bucket for the next pass, or for the end of the step.
//
// Engine::accumulate passes all micro-batches through one layer before the next one. Their
// gradients add up in the bucket, in the dtype of the storage, and the unit is reduced once a step:
// `reduce_ready` says that the gradients of the layers so far are complete. The unit of a weight
// that several layers share waits until all of them are complete.
//
// If updates run in backward, a slice is handed over when it is reduced, and is not stored. Only a
// complete unit is handed over. A unit with a parameter that had no gradient on this rank stays
// until all ranks have told which gradients they had.
//
// With replicas (Note [Hybrid sharding]) a reduction has three phases; each one that starts moves
// those before it on by one phase. If several passes add up on the device, they do so in the
// shard group, and the sums over replicas are made once, when the step ends.
//
// A bucket of one pass has the dtype in which gradients are reduced from the start, unless it is
// divided before that (Note [Dtypes of gradients] in form.h).
//
// The rows of a weight that are looked up may be reduced alone, when a pass ends, and the unit of a
// tied weight before all others, while its gradient is made: Note [Gradients by rows] and Note
// [Tied gradient in tiles] in look_up_gradient.h.
//
// On a device a unit is reduced on a stream of its own, behind the work that the hook has enqueued
// and beside the rest of backward. Memory of sums is taken on that stream too. When the step is
// over (`clear`), the stream waits for the work that uses them.
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "zero/base/error.h"
#include "zero/device/memory.h"
#include "zero/engine/gradient_reduction.h"
#include "zero/engine/gradient_sums.h"
#include "zero/engine/look_up_gradient.h"
#include "zero/engine/reduction_queue.h"

namespace zero {

class ShardedGradients final : public GradientReduction, private HandOver {
 public:
  explicit ShardedGradients(const ReductionContext& context)
      : GradientReduction(context),
        sums_(context, context.settings.hands_over ? this : nullptr),
        units_(static_cast<size_t>(context.layout.unit_count())),
        under_way_(context, ReductionQueue::Arrays::own),
        look_ups_(context_, sums_, under_way_, [this](int64_t unit) {
          if (observer_ != nullptr) observer_->reduction_starts(unit);
        }) {
    make_residuals();
  }

  void begin_pass(const Pass& pass) override {
    layer_major_ = pass.layer_major;
    waiting_ = 0;
    context_.order.restart();
    context_.arrivals.restart_counts();
    for (auto& unit : units_) unit.turn = Turn::awaited;
    for (const int64_t p : pass.shared)
      bookkeeping(context_.layout.unit_of(p)).turn = Turn::at_the_end;
    context_.order.move_back(
        [&](int64_t unit) { return bookkeeping(unit).turn == Turn::at_the_end; });
    const auto units = look_ups_.begin_pass(
        pass, [&](int64_t unit) { return bookkeeping(unit).sum != Sum::none; });
    for (const int64_t unit : units) {
      bookkeeping(unit).turn = Turn::over;
      bookkeeping(unit).sum = Sum::started;
    }
  }

  bool announce_rows(int64_t parameter, const at::Tensor& indices) override {
    return look_ups_.announce_rows(parameter, indices);
  }
  c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(int64_t parameter,
                                                       const at::Tensor& indices) override {
    return look_ups_.announce_look_up(parameter, indices);
  }
  GradientTaker* taker(int64_t parameter) override { return look_ups_.taker(parameter); }
  void returns_whole(int64_t parameter, const at::Tensor& gradient) override {
    look_ups_.returns_whole(parameter, gradient);
  }
  void brought(int64_t parameter, const at::Tensor& gradient) override {
    look_ups_.brought(parameter, gradient);
  }
  std::vector<RowMessages> look_ups() const override { return look_ups_.messages(); }
  std::vector<ExpectedLookUp> expected_look_ups() const override { return look_ups_.expected(); }

  const at::Tensor& array(int64_t unit) override {
    auto& bucket = bookkeeping(unit).bucket;
    if (!bucket.array.defined()) {
      const int64_t numel = context_.layout.unit(unit).numel;
      bucket = {.array = context_.pool.take(numel, context_.gradient_form(unit).collected)};
    }
    return bucket.array;
  }

  bool adopt(int64_t unit, const at::Tensor& gradient, const at::Tensor& variable) override {
    auto& bucket = bookkeeping(unit).bucket;
    if (bucket.array.defined() || !stands_alone(unit, gradient, variable)) return false;
    bucket = {.array = gradient.as_strided({context_.layout.unit(unit).numel}, {1}),
              .pooled = false,
              .home = current_stream(gradient.device())};
    return true;
  }

  void arrived(int64_t parameter, bool first) override {
    if (!first) return;
    const int64_t unit = context_.layout.unit_of(parameter);
    const auto turn = bookkeeping(unit).turn;
    if (!context_.arrivals.count_arrival(unit) || turn == Turn::over) return;
    context_.order.became_ready(unit);
    if (turn == Turn::awaited) ++waiting_;
    if (!layer_major_) reduce_ready();
  }

  // Reduces units in order, as long as the next one is complete or keeps too many others waiting.
  void reduce_ready() override {
    if (look_ups_.first()) return;
    while (const auto unit = context_.order.turn()) {
      if (look_ups_.has(*unit)) {
        context_.order.advance();
        continue;
      }
      const bool complete = context_.arrivals.all_arrived(*unit);
      const bool incomplete = waiting_ >= kWaiting && may_be_incomplete(*unit);
      if (bookkeeping(*unit).turn == Turn::at_the_end || (!complete && !incomplete)) return;
      if (complete) --waiting_;
      context_.order.advance();
      reduce(*unit);
    }
  }

  void end_pass() override {
    look_ups_.take_left_over();
    while (const auto unit = context_.order.turn()) {
      context_.order.advance();
      if (!look_ups_.has(*unit)) reduce(*unit);
    }
    look_ups_.end_pass();
  }

  void drop_pass() override {
    under_way_.drop();
    look_ups_.drop_pass();
  }

  GradientPresence::Report report() const override {
    GradientPresence::Report report{.late = std::vector<uint8_t>(units_.size(), 0)};
    report.look_ups.resize(context_.layout.parameters().size());
    look_ups_.report(report.look_ups);
    std::ranges::transform(units_, report.late.begin(), [](const Unit& unit) {
      return static_cast<uint8_t>(unit.bucket.array.defined());
    });
    return report;
  }

  void reduce_late(const GradientPresence::Agreement& agreed) override {
    for (const int64_t u : context_.order.units()) {
      if (agreed.late[static_cast<size_t>(u)] == 0) continue;
      if (context_.settings.hands_over) {
        throw Error(fmt::format(
            "A gradient arrived for {} after that was reduced and, with update_in_backward, used: "
            "one of its parameters is used in several passes. Switch update_in_backward off, or "
            "name it in LayerSequence::shared.",
            context_.label(u)));
      }
      reduce(u);
    }
  }

  void complete(const GradientPresence::Agreement& agreed) override {
    look_ups_.expect(agreed.look_ups);
    under_way_.complete();
    sums_.wait();
    sum_over_replicas();
  }

  bool sums_once_a_step() const override {
    return std::ranges::any_of(context_.order.units(),
                               [&](int64_t unit) { return context_.gradient_form(unit).defers; });
  }

  void clear(bool completed) override {
    under_way_.drop();
    look_ups_.begin_step(completed);
    const SideScope on(context_.side, context_.mark);  // memory goes back to that stream
    sums_.wait();
    for (const int64_t u : context_.order.units()) {
      auto& unit = bookkeeping(u);
      unit.turn = Turn::awaited;
      unit.sum = Sum::none;
      const auto bucket = std::exchange(unit.bucket, {});
      if (bucket.array.defined() && bucket.pooled) context_.pool.give(bucket.array);
      // An update under way has its own sums.
      if (!context_.settings.doubled) unit.detached = at::Tensor();
      sums_.of(u).clear(u);
    }
  }

  at::Tensor sum(int64_t unit) const override { return sums_.of(unit).slice(unit); }

  at::Tensor open_sum(int64_t unit) override {
    at::Tensor opened;
    {
      const SideScope on(context_.side, context_.mark);
      opened = sums_.of(unit).make(unit);
    }
    wait_for(context_.side, context_.mark);
    if (bookkeeping(unit).sum == Sum::none) {
      bookkeeping(unit).sum = Sum::started;
      opened.zero_();
    }
    return opened;
  }

  void store_sum(int64_t unit, const at::Tensor& sum) override { sums_.of(unit).store(unit, sum); }

  void detach() override {
    for (const int64_t u : context_.order.units()) bookkeeping(u).detached = sums_.of(u).detach(u);
  }
  const at::Tensor& detached(int64_t unit) const override { return bookkeeping(unit).detached; }

  at::Tensor norm_part_on_device(int64_t unit) const override {
    return sums_.of(unit).norm_part_on_device(unit);
  }
  optim::SquaredNorm norm(int64_t unit) const override { return sums_.of(unit).norm(unit); }

  void hand_over_to(BackwardUpdates& updates) override { updates_ = &updates; }
  bool handed_over() const override {
    return context_.settings.hands_over &&
           std::ranges::any_of(units_, [](const Unit& unit) { return unit.sum != Sum::none; });
  }
  bool handed_over(int64_t unit) const override {
    return bookkeeping(unit).sum == Sum::handed_over;
  }

  void forget_residuals() override {
    for (auto& unit : units_) {
      if (unit.residuals.defined()) unit.residuals.zero_();
    }
  }

 private:
  enum class Turn : uint8_t {
    awaited,     // the unit is reduced when it is complete and its turn comes
    at_the_end,  // it is reduced when the pass ends: several layers share a parameter of it
    over         // this pass has reduced it
  };
  enum class Sum : uint8_t { none, started, handed_over };  // in this step
  static constexpr int64_t kWaiting = 8;                    // Note [Sharded gradients]
  struct Unit {
    Bucket bucket{};  // the gradients of this pass, or late ones of the pass before
    Turn turn = Turn::awaited;
    Sum sum = Sum::none;
    at::Tensor residuals{};  // rounding errors of quantised sums, with feedback
                             // (comm::LinkWire::error)
    at::Tensor detached{};   // what the update reads
  };

  void make_residuals() {
    if (!context_.settings.feedback) return;
    auto& shards = *context_.placement.shards;
    for (const int64_t u : context_.order.units()) {
      const auto& link = context_.gradient_form(u).link;
      if (!link.quantised()) continue;
      const int64_t bytes =
          shards.feedback_bytes(link.quantisation, context_.layout.slice_numel(u));
      if (bytes == 0) continue;
      // The host makes a device's messages too.
      const bool here = shards.device().is_cpu();
      bookkeeping(u).residuals = here ? shards.empty(bytes, at::kByte, Category::gradients).zero_()
                                      : pinned_zeros(bytes, at::kByte, shards.device(),
                                                     shards.ledger(), Category::host_gradients);
    }
  }

  // Returns whether the gradient can serve as the bucket: it is all of a unit that is too large for
  // the pool's buckets, has the unit's layout, and is used by nobody else.
  bool stands_alone(int64_t unit, const at::Tensor& gradient, const at::Tensor& variable) const {
    const int64_t numel = context_.layout.unit(unit).numel;
    const auto& form = context_.gradient_form(unit);
    return numel * form.bucket_element_bytes() > context_.pool.bucket_bytes() &&
           gradient.numel() == numel && gradient.scalar_type() == form.collected &&
           gradient.strides() == variable.strides() && variable.is_non_overlapping_and_dense() &&
           !gradient.requires_grad() && gradient.use_count() == 1 &&
           gradient.storage().use_count() == 1;
  }

  // Returns whether a unit may be reduced before its gradients are all here. It may not if a
  // backward function has a place in its bucket, if late gradients could not be used any more
  // (updates in backward), or if an update of the step before may still read the sum (several
  // layers in one pass).
  bool may_be_incomplete(int64_t unit) const {
    return context_.order.known() && !context_.arrivals.awaits(unit) && !layer_major_ &&
           !context_.settings.hands_over;
  }

  // Starts the reduce-scatter of a unit's bucket.
  void reduce(int64_t unit) {
    const at::NoGradGuard no_grad;
    if (observer_ != nullptr) observer_->reduction_starts(unit);
    auto& u = bookkeeping(unit);
    u.turn = Turn::over;
    context_.arrivals.restart_count(unit);
    array(unit);
    Reduction reduction{.unit = unit,
                        .sums = &sums_.of(unit),
                        .bucket = std::exchange(u.bucket, {}),
                        .accumulates = u.sum != Sum::none};
    if (u.sum == Sum::none) u.sum = Sum::started;
    close(unit, reduction.bucket.array);
    if (context_.gradient_form(unit).converts()) {
      auto bucket = converted(unit, reduction.bucket.array);
      context_.pool.give(std::exchange(reduction.bucket, {std::move(bucket)}));
    }
    const SideScope on(context_.side, context_.mark);
    reduction.sums->prepare(reduction);
    under_way_.start(std::move(reduction), !context_.gradient_form(unit).defers, wire(unit));
    under_way_.advance(1);
  }

  std::optional<comm::LinkWire> wire(int64_t unit) const {
    auto wire = context_.gradient_form(unit).link.wire();
    if (wire && !wire->packed) {
      wire->error = bookkeeping(unit).residuals;
      wire->beta = context_.settings.feedback.value_or(0);
    }
    return wire;
  }

  // Adds up over the replicas the sums that micro-batches have made in the shard group.
  void sum_over_replicas() {
    std::vector<PhasedReduction> over_replicas;
    for (const int64_t u : context_.order.units()) {
      if (context_.gradient_form(u).defers && bookkeeping(u).sum != Sum::none)
        over_replicas.emplace_back(*context_.replicas(), sum(u), context_.label(u));
    }
    for (int phase = 0; phase < 3; ++phase) {
      for (auto& each : over_replicas) each.advance();
    }
  }

  // The sums give a unit's slice to this, which marks the unit and hands the slice over.
  bool wants(int64_t unit) const override { return context_.presence.complete_here(unit); }
  void hand_over(int64_t unit, at::Tensor sum) override {
    bookkeeping(unit).sum = Sum::handed_over;
    updates_->update_in_backward(unit, std::move(sum));
  }

  // The progress of a unit in this step. Its numbers are in `sums_`.
  Unit& bookkeeping(int64_t unit) { return units_[static_cast<size_t>(unit)]; }
  const Unit& bookkeeping(int64_t unit) const { return units_[static_cast<size_t>(unit)]; }

  SumsByTier sums_;
  std::vector<Unit> units_;
  bool layer_major_ = false;  // the pass under way reduces units in `reduce_ready` only
  int64_t waiting_ = 0;       // complete units whose turn has not come in this pass
  BackwardUpdates* updates_ = nullptr;
  ReductionQueue under_way_;
  LookUpGradients look_ups_;
};

std::unique_ptr<GradientReduction> sharded_gradients(const ReductionContext& context) {
  return std::make_unique<ShardedGradients>(context);
}

}  // namespace zero
