// Sums of sharded gradients on the device.
//
// Note [Slices in activations' memory]
// Unless updates are delayed, sharded gradients do not exist between the update and the next
// reduction, and this is when activations take the most memory. So a slice is made when its unit is
// reduced, in memory that the activations of later layers have left. It is freed when the step is
// over, or, if updates run in backward, when its update is done. A gradient that is a unit by
// itself is reduced in its own memory: the slice stays there, and the rest of the memory is freed.
#include <utility>

#include "zero/base/host_memory.h"
#include "zero/device/memory.h"
#include "zero/engine/gradient_sums.h"

namespace zero {

namespace {

// Sums stay on the device, where micro-batches add up.
class DeviceSums : public GradientSums {
 public:
  DeviceSums(const ReductionContext& context, const std::vector<int64_t>& units,
             bool takes_norms = false)
      : GradientSums(context, takes_norms) {
    if (!context_.settings.doubled) return;
    make_cells(units, Category::gradients, Category::offload_buffers, [&](int64_t u, Category as) {
      return device_zeros(numel(u), dtype(u), context_.table.device(), context_.table.ledger(), as);
    });
  }

  void prepare(Reduction& reduction) override {
    reduction.output = reduction.accumulates ? take_output(reduction)
                       : in_place(reduction) ? part_of_bucket(reduction)
                                             : make(reduction.unit);
  }

  void store_or_add(Reduction reduction) override {
    auto& sum = cell(reduction.unit);
    if (in_place(reduction)) {
      reduction.output = at::Tensor();
      sum = cut_slice(reduction);
      return;
    }
    if (reduction.accumulates) add_output(sum, reduction);
    give_bucket(reduction);
  }

  void drop(Reduction reduction) override {
    if (reduction.accumulates) context_.pool.give(std::move(reduction.output));
    give_bucket(reduction);
  }

  at::Tensor make(int64_t unit) override {
    auto& sum = cell(unit);
    if (!sum.defined()) sum = make_slice(unit);
    return sum;
  }

  at::Tensor norm_part_on_device(int64_t unit) override {
    if (!is_asynchronous(context_.table.device())) return {};
    return context_.placement.part_of(slice(unit));
  }

  void clear(int64_t unit) override {
    if (!context_.settings.doubled) cell(unit) = at::Tensor();
  }

 protected:
  // Returns the category of a slice that is made when it is reduced.
  virtual Category category() const { return Category::gradients; }

  // Returns whether the sum takes the place of the slice in the bucket, which is then a gradient.
  bool in_place(const Reduction& reduction) const {
    return !reduction.accumulates && !reduction.bucket.pooled && !context_.settings.doubled &&
           dtype(reduction.unit) == reduction.bucket.array.scalar_type();
  }

  at::Tensor make_slice(int64_t unit) const {
    return device_empty(numel(unit), dtype(unit), context_.table.device(), context_.table.ledger(),
                        category());
  }

  // Returns the slice of a bucket that was reduced in place, and gives the rest back.
  at::Tensor cut_slice(Reduction& reduction) const {
    if (is_asynchronous(context_.table.device())) {
      auto slice = make_slice(reduction.unit);
      slice.copy_(part_of_bucket(reduction));
      give_bucket(reduction);
      return slice;
    }
    const int64_t slice = numel(reduction.unit);
    return host_part(std::move(reduction.bucket.array), slice * context_.placement.shards->rank(),
                     slice, context_.table.ledger(), category());
  }
};

// Hands sums over for updates in backward. A sum that the update does not want stays.
class HandedSums final : public DeviceSums {
 public:
  HandedSums(const ReductionContext& context, const std::vector<int64_t>& units,
             HandOver& hand_over)
      : DeviceSums(context, units, true), hand_over_(hand_over) {}

  void prepare(Reduction& reduction) override {
    if (!in_place(reduction)) reduction.sum = make_slice(reduction.unit);
    reduction.output = reduction.sum.defined() ? reduction.sum : part_of_bucket(reduction);
  }

  void store_or_add(Reduction reduction) override {
    auto sum = std::move(reduction.sum);
    reduction.output = at::Tensor();
    if (sum.defined()) {
      give_bucket(reduction);
    } else {
      sum = cut_slice(reduction);
    }
    const int64_t unit = reduction.unit;
    if (take_norm(unit, sum).finite && hand_over_.wants(unit)) {
      hand_over_.hand_over(unit, std::move(sum));
    } else {
      cell(unit) = std::move(sum);
    }
  }

  void drop(Reduction reduction) override { give_bucket(reduction); }

 protected:
  Category category() const override { return Category::gradient_buckets; }

 private:
  HandOver& hand_over_;
};

}  // namespace

std::unique_ptr<GradientSums> device_sums(const ReductionContext& context,
                                          const std::vector<int64_t>& units, HandOver* hand_over) {
  if (hand_over != nullptr) return std::make_unique<HandedSums>(context, units, *hand_over);
  return std::make_unique<DeviceSums>(context, units);
}

}  // namespace zero
