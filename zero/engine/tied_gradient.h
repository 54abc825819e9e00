// The gradient of a tied weight, which leaves while it is made.
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
//   2. When the pass begins the ranks tell each other, as bits, which rows they look up.
//   3. The projection makes its part in tiles of kTileRows rows. A piece has as many elements of
//      each slice as a tile. It is reduced while the next tiles are made: before all other units,
//      on all ranks. Each rank sets its own values of all ranks' rows apart.
//   4. The look-up adds its rows to those values, one after the other, as it would to the whole.
//   5. When the pass ends one more reduce-scatter sums them, and each owner puts these sums in the
//      place of those that the pieces gave. If passes add up, it adds them to the sum that was
//      there before the pieces. The message has as many rows for each owner as the owner with most
//      of them needs: LookUpMessages::numel elements, in the formula of the step's bytes
//      (Engine::traffic_formula).
// This is used if the message has at most an eighth of the weight's elements (kLookUpShare), which
// all ranks know after step 2, and if sums lie on the device and are not handed over, rounded for
// the link, divided before or doubled (`suits`). A rank may have no look-up in a pass, or several.
// So every rank says in step 2 whether it can; if one cannot, the gradient is made whole, from the
// gradients of the logits. Step 2 costs a small message, so it is not sent unless all ranks could
// have used tiles in the step before. That is also when a rank sees whether something else uses the
// weight: then autograd brings another gradient than the look-up returned. If such a use first
// appears in a step in tiles, its gradient is added as a late one, which may round differently.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "zero/base/gradient_place.h"
#include "zero/engine/gradient_reduction.h"
#include "zero/engine/gradient_sums.h"
#include "zero/engine/reduction_queue.h"

namespace zero {

/// Reduces the gradient of one tied weight of a pass in pieces. It is the place of their sums, too.
class TiedGradient final : public GradientTiles, private GradientSums {
 public:
  /// Reductions go to `under_way`, and `starts` is called with the unit before the first of them.
  /// The arguments outlive this.
  TiedGradient(const ReductionContext& context, const SumsByTier& sums, ReductionQueue& under_way,
               std::function<void(int64_t unit)> starts);

  // See GradientReduction for these.
  bool announce(int64_t parameter, const at::Tensor& indices);
  void returns_whole(int64_t parameter, const at::Tensor& gradient);
  void brought(int64_t parameter, const at::Tensor& gradient);
  LookUpMessages messages() const { return of_last_step_; }

  /// Begins a pass. Returns the unit that is reduced in pieces in it, if there is one; `has_sum`
  /// says whether a unit has a sum of earlier passes of the step. Collective if all ranks could
  /// have used tiles in the step before.
  std::optional<int64_t> begin_pass(const GradientReduction::Pass& pass,
                                    const std::function<bool(int64_t unit)>& has_sum);
  /// Returns whether pieces are still to be reduced, before all other units.
  bool first() const { return pass_ && !pass_->taken; }
  /// Returns whether the unit is reduced in pieces in this pass.
  bool has(int64_t unit) const { return pass_ && pass_->unit == unit; }
  /// Reduces pieces of zeros if nothing has given this rank's tiles.
  void take_left_over();
  /// Starts the sum of the look-ups, after all units.
  void end_pass();
  /// The pass has failed; nothing of it is under way.
  void drop_pass() { pass_.reset(); }

  /// Returns this if the gradient of the parameter is taken in tiles in this pass, or null.
  GradientTiles* tiles(int64_t parameter) {
    return pass_ && pass_->parameter == parameter ? this : nullptr;
  }
  void take(const Make& make) override;
  void add_rows(const at::Tensor& indices, const at::Tensor& rows) override;

  /// Returns the parameter whose gradient this rank could have given in tiles in the pass before;
  /// -1 if there is none.
  int64_t possible() const { return alone_ ? candidate_ : -1; }
  /// All ranks could: they agree on the rows in the next step. -1: they do not.
  void expect(int64_t parameter) { expected_ = parameter; }
  int64_t expected() const { return expected_; }
  /// Begins a step; the one before was completed, or dropped. Nothing is under way.
  void begin_step(bool completed);

 private:
  struct Announced {
    int64_t parameter = -1;
    at::Tensor indices{};
  };
  struct Tile {
    at::Tensor values{};
    int64_t left = 0;  // elements that no piece has got
  };
  struct Pass {
    int64_t parameter = -1;
    int64_t unit = -1;
    int64_t columns = 0;
    at::Tensor rows{};  // (R) all ranks' rows, ascending
    std::vector<std::vector<int64_t>>
        of_owner{};        // by rank, positions in `rows`: those in its slice
    at::Tensor values{};   // (R, C) this rank's values of the rows
    int64_t message = 0;   // elements of one owner's rows in the message
    size_t under_way = 1;  // pieces at a time
    bool accumulates = false;
    bool taken = false;
    at::Tensor kept{};  // the sums of this rank's rows before the pieces, if passes add up
    std::map<int64_t, Tile> tiles{};
  };

  bool suits(int64_t parameter) const;
  void reduce_pieces(const Make& make, bool sets_apart);
  void fill(const at::Tensor& to, int64_t begin, const Make& make, bool sets_apart);
  void make_tile(const at::Tensor& tile, int64_t begin, const Make& make, bool sets_apart);
  void start(Reduction reduction, size_t newest);
  void for_each_own_row(
      const std::function<void(int64_t in_message, int64_t in_slice, int64_t numel)>& f) const;
  void keep_earlier_sums();

  void prepare(Reduction& reduction) override;
  void store_or_add(Reduction reduction) override;
  void drop(Reduction reduction) override;

  const SumsByTier& sums_;
  ReductionQueue& under_way_;
  std::function<void(int64_t unit)> starts_;
  std::vector<Announced> announced_;  // since the last pass
  int64_t expected_ = -1;
  int64_t candidate_ = -1;  // the parameter that was announced for this pass
  bool alone_ = false;      // its gradient came as announced
  const void* returned_ = nullptr;
  uint32_t returned_version_ = 0;
  std::optional<Pass> pass_;
  LookUpMessages of_step_;
  LookUpMessages of_last_step_;
};

}  // namespace zero
