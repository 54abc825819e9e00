// Reduces the gradient of a weight whose rows are looked up: as rows, or in tiles if the weight is
// an output projection, too.
//
// Note [Gradients by rows]
// The gradient of an embedding has values in the rows that a pass has looked up, and zeros
// elsewhere. Between hosts the ranks tell each other these rows when a pass begins, and sum them
// alone when it ends (steps 2, 4 and 5 below, without a projection). The sums of the other rows are
// zeros, as they would be if the whole gradient were reduced, so no bit changes. A look-up is
// announced in forward, and its backward function keeps the announcement, so that only the look-up
// that the ranks agreed on gives rows.
//
// Note [Tied gradient in tiles]
// A tied weight is the output projection, whose backward function is the first to run, and the
// table of a look-up, whose backward function is the last: Note [Tied gradient] in
// models/layers/tied_embedding.h. Its gradient is often the largest of a model. If it waits for the
// look-up, a link between hosts stands still at the begin of a pass and has most to do at its end.
//
// Between hosts it leaves in the last pass of a step as follows. Every sum has the same terms in
// the same order as that of a whole gradient, so no bit changes.
//   1. The model announces the rows of its look-up in forward. The projection then keeps the
//      gradients of its logits: T x V elements for T tokens. It does so only if T is at most C, and
//      makes no array of the weight's gradient, of V x C. With T tokens, the pieces that are under
//      way have at most (C - T) / C of its elements, so that all of it takes no more memory than
//      that array, but for one tile of each slice.
//   2. When the pass begins the ranks tell each other, as bits, which rows they look up
//      (agree_on_rows).
//   3. The projection makes its part in tiles of kTileRows rows. A piece has as many elements of
//      each slice as a tile. It is reduced while the next tiles are made: before all other units,
//      on all ranks. Each rank sets its own values of all ranks' rows apart.
//   4. The look-up adds its rows to those values, one after the other, as it would to the whole.
//   5. When the pass ends one more reduce-scatter sums them, and each owner puts these sums in the
//      place of those that the pieces gave. If passes add up, it adds them to the sum that was
//      there before the pieces. The message has as many rows for each owner as the owner with most
//      of them needs: RowMessages::numel elements, in the formula of the step's bytes
//      (Engine::traffic_formula).
// Either is used if the message has at most an eighth of the weight's elements (kLookUpShare),
// which all ranks know after step 2, and if sums lie on the device and are not handed over, rounded
// for the link, divided before or doubled (`suits`). A rank may have no look-up in a pass, or
// several. So every rank says in step 2 whether it can; if one cannot, the gradient is made whole,
// if need be from the gradients of the logits. Step 2 costs a small message, so it is not sent
// unless all ranks could have done so in the last pass of the step before. That is also when a rank
// sees whether something else uses the weight: then autograd brings another gradient than the
// look-up returned. If such a use first appears in a step by rows or in tiles, its gradient is
// added as a late one, which may round differently.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "zero/base/gradient_place.h"
#include "zero/engine/gradient_reduction.h"
#include "zero/engine/gradient_sums.h"
#include "zero/engine/reduction_queue.h"
#include "zero/engine/row_look_ups.h"

namespace zero {

/// Reduces the gradient of one parameter by rows or in tiles. It is the place of their sums, too.
class LookUpGradient final : public GradientTaker, private GradientSums {
 public:
  /// Reductions go to `under_way`, and `starts` is called with the unit before the first of them.
  /// The arguments outlive this.
  LookUpGradient(const ReductionContext& context, const SumsByTier& sums, ReductionQueue& under_way,
                 std::function<void(int64_t unit)> starts, int64_t parameter);
  /// Returns whether the gradient of the parameter may leave so at all.
  static bool suits(const ReductionContext& context, int64_t parameter);

  // See GradientReduction for these.
  bool announce_rows(const at::Tensor& indices);
  c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(const at::Tensor& indices);
  void returns_whole(const at::Tensor& gradient);
  void brought(const at::Tensor& gradient);
  const RowMessages& messages() const { return of_last_step_; }

  /// Begins a pass. Returns whether it reduces the gradient by rows or in tiles; `has_sum` says
  /// whether the unit has a sum of earlier passes of the step. Collective if all ranks could have
  /// done so in the step before.
  bool begin_pass(const GradientReduction::Pass& pass, bool has_sum);
  /// Returns whether that is so in this pass.
  bool in_pass() const { return pass_.has_value(); }
  /// Returns whether pieces are still to be reduced, before all other units.
  bool first() const { return pass_ && !pass_->taken; }
  /// Reduces pieces of zeros if nothing has given this rank's tiles.
  void take_left_over();
  /// Starts the sum of the look-ups, after all units.
  void end_pass();
  /// The pass has failed; nothing of it is under way.
  void drop_pass() { pass_.reset(); }

  void take(const Make& make) override;
  bool takes(const AnnouncedLookUp& look_up) const override;
  void add_rows(const at::Tensor& indices, const at::Tensor& rows) override;

  /// Returns how this rank could have given the gradient in the pass before.
  LookUpUse possible() const { return as_announced_ ? announced_use_ : LookUpUse::none; }
  /// All ranks could: they agree on the rows in the next step. LookUpUse::none: they do not.
  void expect(LookUpUse use) { expected_ = use; }
  ExpectedLookUp expected() const;
  /// Begins a step; the one before was completed, or dropped. Nothing is under way.
  void begin_step(bool completed);

 private:
  struct Tile {
    at::Tensor values{};
    int64_t left = 0;  // elements that no piece has got
  };
  // The look-up of a pass.
  struct LookUp {
    LookUpUse use = LookUpUse::none;
    at::Tensor indices{};
    const AnnouncedLookUp* announced = nullptr;  // null for a tied weight; it is only compared
  };
  struct Pass {
    LookUpUse use = LookUpUse::none;
    const AnnouncedLookUp* announced = nullptr;
    RowShares shares;
    at::Tensor rows{};     // (R) all ranks' rows
    at::Tensor values{};   // (R, C) this rank's values of the rows
    size_t under_way = 1;  // pieces at a time
    bool accumulates = false;
    bool taken = false;  // the projection's part, or there is none
    at::Tensor kept{};   // the sums of this rank's rows before the pieces, if passes add up
    std::map<int64_t, Tile> tiles{};
  };

  at::Tensor array(int64_t numel, at::ScalarType dtype) const;
  void drop_old_look_ups();
  LookUp only_look_up(const GradientReduction::Pass& pass);
  void reduce_pieces(const Make& make, bool sets_apart);
  void fill(const at::Tensor& to, int64_t begin, const Make& make, bool sets_apart);
  void make_tile(const at::Tensor& tile, int64_t begin, const Make& make, bool sets_apart);
  void start(Reduction reduction, size_t newest);
  void for_each_own_row(
      const std::function<void(int64_t in_message, int64_t in_slice, int64_t numel)>& f) const;
  void keep_earlier_sums();
  void begin_sum();

  void prepare(Reduction& reduction) override;
  void store_or_add(Reduction reduction) override;
  void drop(Reduction reduction) override;

  const SumsByTier& sums_;
  ReductionQueue& under_way_;
  std::function<void(int64_t unit)> starts_;
  int64_t parameter_;
  int64_t unit_;
  std::vector<at::Tensor> tied_;  // indices of look-ups of tied weights since the last pass
  std::vector<c10::weak_intrusive_ptr<AnnouncedLookUp>> look_ups_;  // their graphs may end
  static constexpr size_t kManyLookUps = 1024;
  size_t many_look_ups_ = kManyLookUps;        // so many are looked through for old ones
  LookUpUse announced_use_ = LookUpUse::none;  // that of the only look-up of this pass, or none
  LookUpUse expected_ = LookUpUse::none;
  bool as_announced_ = false;  // the gradient came as announced
  const void* returned_ = nullptr;
  uint32_t returned_version_ = 0;
  std::optional<Pass> pass_;
  RowMessages of_step_;
  RowMessages of_last_step_;
};

/// Has one LookUpGradient for each parameter. Its functions do what those of LookUpGradient do.
class LookUpGradients {
 public:
  /// The arguments are those of LookUpGradient.
  LookUpGradients(const ReductionContext& context, const SumsByTier& sums,
                  ReductionQueue& under_way, std::function<void(int64_t unit)> starts)
      : context_(context), sums_(sums), under_way_(under_way), starts_(std::move(starts)) {}

  bool announce_rows(int64_t parameter, const at::Tensor& indices);
  c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(int64_t parameter,
                                                       const at::Tensor& indices);
  void returns_whole(int64_t parameter, const at::Tensor& gradient);
  void brought(int64_t parameter, const at::Tensor& gradient);
  std::vector<RowMessages> messages() const;

  /// Returns the units that the pass reduces so.
  std::vector<int64_t> begin_pass(const GradientReduction::Pass& pass,
                                  const std::function<bool(int64_t unit)>& has_sum);
  bool first() const;
  bool has(int64_t unit) const;
  void take_left_over();
  void end_pass();
  void drop_pass();
  /// Returns the taker of the parameter's gradient in this pass, or null.
  GradientTaker* taker(int64_t parameter);

  /// Sets `possible` of each parameter.
  void report(std::vector<LookUpUse>& uses) const;
  /// Tells each parameter's use.
  void expect(const std::vector<LookUpUse>& uses);
  std::vector<ExpectedLookUp> expected() const;
  void begin_step(bool completed);

 private:
  LookUpGradient* find(int64_t parameter);
  // Makes it if there is none. Returns null if the gradient never leaves so.
  LookUpGradient* made(int64_t parameter, const at::Tensor& indices);

  const ReductionContext& context_;
  const SumsByTier& sums_;
  ReductionQueue& under_way_;
  std::function<void(int64_t unit)> starts_;
  std::map<int64_t, LookUpGradient> all_;  // by parameter, the same order on all ranks
};

}  // namespace zero
