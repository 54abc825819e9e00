// Stages 0 and 1: every rank has the gradients of all units, whole.
//
// Note [Replicated gradients]
// The gradients of a unit are collected in one array, the gradient storage of the formula, in which
// the micro-batches of a step add up. Once a step the array is summed over the ranks: by an
// all-reduce at stage 0, where each rank updates all elements, and by a reduce-scatter at stage 1,
// where each rank updates its slice. This happens when the step ends, or as soon as the step's last
// pass has completed the unit (Note [Early reductions]).
//
// If gradients are reduced in another dtype than they are added up in (Note [Dtypes of gradients]
// in form.h), the array is copied to a bucket of that dtype. If that dtype has fewer bits, the sum
// is rounded to it at stage 1 too, since an all-reduce gives no other sum.
//
// A pass may throw after it has begun reductions that the other ranks have not begun. This rank
// must not wait for them, since the others may wait for this rank. It begins those that are left,
// so that its calls are those of a rank whose pass has ended. If the passes of all ranks have
// thrown, the step may be made again, and its units are reduced when it ends. Otherwise all ranks
// must drop the gradients of the step (Engine::zero_grad), and Engine::step refuses it: the ranks
// tell each other whether one has begun reductions, all take part in the same ones, and then all
// wait for them.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "zero/base/error.h"
#include "zero/device/memory.h"
#include "zero/engine/early_reductions.h"
#include "zero/engine/gradient_reduction.h"
#include "zero/engine/reduction_queue.h"

namespace zero {

// The gradient of one unit. It is whole on the device, in the gradient storage of the formula. The
// update reads the elements of this rank there. If the update runs on the host, it reads a copy of
// them in the host's memory.
class WholeGradient {
 public:
  WholeGradient(const ReductionContext& context, int64_t unit)
      : context_(context), unit_(unit), whole_(make_whole(Category::gradients)) {
    cell() = on_host() ? make_on_host(Category::host_gradients) : owned();
    if (context_.settings.doubled)
      other_ =
          on_host() ? make_on_host(Category::host_buffers) : make_whole(Category::offload_buffers);
  }

  const at::Tensor& whole() const { return whole_; }
  // Returns the elements that this rank updates.
  at::Tensor owned() const {
    const auto& range = plan().owned;
    return whole_.narrow(0, range.begin, range.size());
  }

  // The gradient is complete: if the update runs on the host, a copy comes down. The host waits for
  // the norm, which is read behind this copy, before it updates.
  void bring_down() {
    if (!on_host()) return;
    const auto& to = cell();
    context_.table.copier().down(to.data_ptr(), owned().const_data_ptr(),
                                 static_cast<int64_t>(to.nbytes()), context_.mark);
  }

  // Gives the elements to an update, as GradientReduction::detach does.
  at::Tensor detach() {
    auto detached = cell();
    if (!other_.defined()) return detached;
    std::swap(on_host() ? cell() : whole_, other_);
    if (!on_host()) cell() = owned();
    return detached;
  }

 private:
  const UnitPlan& plan() const { return context_.table.plan(unit_); }
  bool on_host() const { return plan().gradients_come_down(); }
  at::Tensor make_whole(Category category) const {
    return context_.placement.shards
        ->empty(context_.layout.unit(unit_).numel, plan().gradient_dtype, category)
        .zero_();
  }
  at::Tensor make_on_host(Category category) const {
    return pinned_zeros(plan().owned.size(), plan().gradient_dtype, context_.table.device(),
                        context_.table.ledger(), category);
  }
  // The memory that the update reads.
  at::Tensor& cell() const { return context_.table.memory(unit_, State::gradients); }

  ReductionContext context_;
  int64_t unit_;
  at::Tensor whole_;
  at::Tensor other_;  // if gradients are doubled: takes turns with the memory that is read
};

class ReplicatedGradients final : public GradientReduction {
 public:
  explicit ReplicatedGradients(const ReductionContext& context)
      : GradientReduction(context),
        units_(static_cast<size_t>(context.layout.unit_count())),
        arrived_(context.layout.parameters().size(), 0),
        under_way_(context, ReductionQueue::Arrays::callers) {
    for (int64_t u = 0; u < context_.layout.unit_count(); ++u) {
      if (context_.table.trainable(u)) bookkeeping(u).gradient.emplace(context_, u);
    }
    reserve_buckets();
    early_ = EarlyReductions(reduces_early());
  }

  void begin_pass(const Pass& pass) override {
    const bool again = has_dropped();
    if (again) under_way_.drop();  // this pass writes to their arrays
    early_.begin_pass(pass.last, pass.layer_major || again);
    if (!early_.in_last_pass()) return;
    std::ranges::fill(arrived_, uint8_t{0});
    context_.arrivals.restart_counts();
    context_.order.restart();
  }

  const at::Tensor& array(int64_t unit) override {
    auto& u = bookkeeping(unit);
    if (u.sum != Sum::started) return u.gradient->whole();
    auto& late = u.late.array;
    if (!late.defined())
      late = context_.pool.take(context_.layout.unit(unit).numel,
                                context_.gradient_form(unit).collected);
    return late;
  }

  void arrived(int64_t parameter, bool /*first*/) override {
    if (!early_.in_last_pass()) return;
    if (std::exchange(arrived_[static_cast<size_t>(parameter)], uint8_t{1}) != 0) {
      early_.arrived_again();
      return;
    }
    const int64_t unit = context_.layout.unit_of(parameter);
    if (!context_.arrivals.count_arrival(unit) || bookkeeping(unit).sum == Sum::started) return;
    context_.order.became_ready(unit);
    if (context_.order.known()) reduce_in_turn();
  }

  void end_pass() override {
    if (!early_.in_last_pass() || !context_.order.known()) return;
    early_.begin();
    const at::NoGradGuard no_grad;
    reduce_expected();
  }

  void drop_pass() override {
    if (early_.in_last_pass() && context_.order.known()) {
      early_.begin();
      const at::NoGradGuard no_grad;
      try {
        reduce_expected();
      } catch (const CommError&) {  // the group has failed, which the next collective reports
      }
    }
    for (auto& unit : units_) {
      if (unit.sum == Sum::started) unit.sum = Sum::dropped;
    }
  }

  GradientPresence::Report report() const override {
    GradientPresence::Report report{.late = std::vector<uint8_t>(units_.size(), 0),
                                    .refuses_early = early_.refuses(),
                                    .began_early = early_.begun(),
                                    .dropped = has_dropped()};
    std::ranges::transform(units_, report.late.begin(), [](const Unit& unit) {
      return static_cast<uint8_t>(unit.late.array.defined());
    });
    return report;
  }

  void complete(const GradientPresence::Agreement& agreed) override {
    early_.agree(agreed.refuses_early);
    for (auto& unit : units_) {
      if (unit.sum == Sum::dropped) unit.sum = Sum::open;
    }
    const auto& order = context_.order.units();
    if (agreed.began_early) reduce_expected();  // if this rank's pass has not begun them
    for (const int64_t u : order) {
      if (context_.presence.wanted(u) && bookkeeping(u).sum != Sum::started) start(u);
    }
    under_way_.complete();
    for (const int64_t u : order) {
      if (agreed.late[static_cast<size_t>(u)] != 0) accumulate_late(u);
    }
    for (const int64_t u : order) {
      if (context_.presence.wanted(u)) bookkeeping(u).gradient->bring_down();
    }
  }

  bool sums_once_a_step() const override { return false; }
  bool drops_together() const override { return early_.on(); }
  bool has_begun() const override { return early_.begun() || has_dropped(); }

  void join_begun() override {
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

  // No reduction is under way, unless a pass has thrown: then the next pass or `join_begun` waits
  // for it.
  void clear(bool completed) override {
    early_.clear(completed);
    for (auto& unit : units_) {
      if (unit.sum == Sum::started) unit.sum = Sum::open;
      unit.filled = false;
      if (!unit.late.array.defined()) continue;
      const SideScope on(context_.side, context_.mark);  // memory goes back to that stream
      context_.pool.give(std::exchange(unit.late, {}));
    }
  }

  at::Tensor sum(int64_t unit) const override { return bookkeeping(unit).gradient->owned(); }

  at::Tensor open_sum(int64_t unit) override {
    auto target = sum(unit);
    wait_for(context_.side, context_.mark);
    if (!std::exchange(bookkeeping(unit).filled, true)) target.zero_();
    bookkeeping(unit).sum = Sum::started;  // gradients that come later are not summed over ranks
    return target;
  }

  void store_sum(int64_t unit, const at::Tensor& /*sum*/) override {
    bookkeeping(unit).gradient->bring_down();
  }

  void detach() override {
    for (const int64_t u : context_.order.units())
      bookkeeping(u).detached = bookkeeping(u).gradient->detach();
  }
  const at::Tensor& detached(int64_t unit) const override { return bookkeeping(unit).detached; }

  at::Tensor norm_part_on_device(int64_t unit) const override {
    return context_.side ? context_.placement.part_of(slice(unit)) : at::Tensor();
  }
  optim::SquaredNorm norm(int64_t unit) const override {
    const auto values = context_.placement.part_of(slice(unit));
    return optim::squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
  }

 private:
  // The array of a unit goes through these phases in a step.
  enum class Sum : uint8_t {
    open,     // gradients are added to the array
    started,  // its sum over ranks has been started, or is there
    dropped   // as `started`, but the pass has thrown: no other rank may have started it
  };
  struct Unit {
    std::optional<WholeGradient> gradient{};  // none if the unit is frozen
    Sum sum = Sum::open;
    bool filled = false;    // the array has values of this step
    Bucket late{};          // gradients that came after the sum was started
    at::Tensor detached{};  // what the update reads
  };

  // Takes the buckets that the end of a step needs, since memory must not run out half-way: one
  // that fills, and at stage 1 one that is being reduced.
  void reserve_buckets() {
    at::Tensor under_way;
    for (const int64_t u : context_.order.units()) {
      const auto& form = context_.gradient_form(u);
      if (!form.converts()) continue;
      auto bucket = context_.pool.take(context_.layout.unit(u).numel, form.reduced);
      if (under_way.defined()) context_.pool.give(std::exchange(under_way, {}));
      if (scattered()) {
        under_way = std::move(bucket);
      } else {
        context_.pool.give(std::move(bucket));
      }
    }
    if (under_way.defined()) context_.pool.give(std::move(under_way));
  }

  // A hook must not wait for other ranks. Early reductions would wait if they need a bucket, or
  // have a second phase over replicas.
  bool reduces_early() const {
    const auto& placement = context_.placement;
    const bool waits = context_.replicas() != nullptr ||
                       std::ranges::any_of(context_.order.units(), [&](int64_t unit) {
                         return context_.gradient_form(unit).converts();
                       });
    return placement.ranks() > 1 && !waits &&
           (placement.all->topology().hosts > 1 || context_.side.has_value());
  }

  // Reduces units in order as long as the next one is complete, or is not expected.
  void reduce_in_turn() {
    while (const auto unit = context_.order.turn()) {
      if (context_.presence.expected(*unit)) {
        if (!context_.arrivals.all_arrived(*unit)) return;
        const SideScope on(context_.side, context_.mark);
        start(*unit);
      }
      context_.order.advance();
    }
  }

  // Reduces the expected units whose turn has not come.
  void reduce_expected() {
    for (const int64_t u : context_.order.units()) {
      if (!context_.presence.expected(u) || bookkeeping(u).sum == Sum::started) continue;
      const SideScope on(context_.side, context_.mark);
      start(u);
    }
  }

  // Starts the sum over ranks. The caller is on the side stream.
  void start(int64_t unit) {
    auto& u = bookkeeping(unit);
    u.sum = Sum::started;
    u.filled = true;
    const auto& whole = u.gradient->whole();
    const auto& label = context_.label(unit);
    auto& all = *context_.placement.all;
    close(unit, whole);
    const bool converts = context_.gradient_form(unit).converts();
    if (scattered()) {
      under_way_.start({.unit = unit,
                        .bucket = Bucket{converts ? converted(unit, whole) : whole, converts},
                        .output = slice(unit)},
                       true, context_.gradient_form(unit).link.wire());
      // Each reduction under way needs memory of its own.
      if (converts || context_.replicas() != nullptr) under_way_.advance(1);
    } else if (converts) {
      auto bucket = converted(unit, whole);
      all.all_reduce(bucket, label).wait();
      whole.copy_(bucket);
      context_.pool.give(std::move(bucket));
    } else {
      // The all-reduce throws if the group has failed. Then g++ 12 destroys a member twice that
      // nested braces without a type have initialised.
      under_way_.add({.unit = unit,
                      .bucket = Bucket{whole, false},
                      .collectives = PhasedReduction(all.all_reduce(whole, label))});
    }
  }

  // Adds the sum over ranks of gradients that came after the unit had been reduced: Note [Early
  // reductions].
  void accumulate_late(int64_t unit) {
    const auto& whole = bookkeeping(unit).gradient->whole();
    auto bucket = array(unit);
    bookkeeping(unit).late = {};
    close(unit, bucket);
    if (scattered()) {
      const auto sum = context_.placement.shards->empty(
          context_.layout.slice_numel(unit), whole.scalar_type(), Category::gradient_buckets);
      under_way_.start({.unit = unit, .bucket = Bucket{bucket, false}, .output = sum}, true,
                       context_.gradient_form(unit).link.wire());
      under_way_.complete();
      slice(unit).add_(sum);
    } else {
      context_.placement.all->all_reduce(bucket, context_.label(unit)).wait();
      whole.add_(bucket);
    }
    BucketPool::release(std::move(bucket), context_.side);
  }

  // Returns the slice that stage 1 gives this rank. This rank's part of the norm is that of the
  // slice.
  at::Tensor slice(int64_t unit) const {
    const auto range = context_.layout.slice(unit, context_.placement.shards->rank());
    return bookkeeping(unit).gradient->whole().narrow(0, range.begin, range.size());
  }

  bool scattered() const { return context_.placement.sharded.optimizer; }
  bool has_dropped() const {
    return std::ranges::any_of(units_, [](const Unit& unit) { return unit.sum == Sum::dropped; });
  }
  Unit& bookkeeping(int64_t unit) { return units_[static_cast<size_t>(unit)]; }
  const Unit& bookkeeping(int64_t unit) const { return units_[static_cast<size_t>(unit)]; }

  std::vector<Unit> units_;
  EarlyReductions early_{false};
  std::vector<uint8_t> arrived_;  // by parameter: its gradient has come in the step's last pass
  ReductionQueue under_way_;
};

std::unique_ptr<GradientReduction> replicated_gradients(const ReductionContext& context) {
  return std::make_unique<ReplicatedGradients>(context);
}

}  // namespace zero
