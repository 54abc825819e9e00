// Sums of sharded gradients in the host's memory.
//
// Note [Sums that come down]
// A slice that was reduced on the device comes down to the host while backward goes on, and
// micro-batches add up there. On a device with memory of its own the copies are enqueued behind the
// reduction. A sum that needs no addition is copied straight to its place. A sum that the host adds
// to another comes in pieces, through a few buffers: the host waits when all of them are in use,
// and when the step ends.
#include <algorithm>
#include <deque>
#include <utility>

#include "zero/device/memory.h"
#include "zero/engine/gradient_sums.h"
#include "zero/engine/work_memory.h"

namespace zero {

namespace {

class HostSums final : public GradientSums {
 public:
  HostSums(const ReductionContext& context, const std::vector<int64_t>& units, HandOver* hand_over)
      : GradientSums(context, hand_over != nullptr), hand_over_(hand_over) {
    make_cells(units, Category::host_gradients, Category::host_buffers,
               [&](int64_t u, Category as) { return host_memory(numel(u), dtype(u), as); });
    int64_t most = 0;
    for (const int64_t u : units) most = std::max(most, numel(u));
    buffers_.resize(is_asynchronous(context_.table.device()) ? kSumPieces : 1);
    for (auto& buffer : buffers_)
      buffer = host_memory(std::min(most, kPieceNumel), at::kFloat, Category::host_buffers);
  }

  // The bucket of a rank that is alone goes down without a conversion, since it has all the bits of
  // the sum.
  void prepare(Reduction& reduction) override {
    reduction.output = alone() ? reduction.bucket.array : take_output(reduction);
  }

  void store_or_add(Reduction reduction) override {
    bring_down(reduction);
    drop(std::move(reduction));
    if (!is_asynchronous(context_.table.device())) {
      wait();
    } else if (hand_over_ != nullptr) {
      while (pieces_.size() > kSlicesToUpdates) land();
    }
  }

  void drop(Reduction reduction) override {
    if (!alone()) context_.pool.give(std::move(reduction.output));
    reduction.output = at::Tensor();
    give_bucket(reduction);
  }

  void wait() override {
    if (pieces_.empty()) return;
    pieces_.back().copied.wait_on_host();  // the earlier ones have been copied too
    for (auto& piece : pieces_) piece.copied = {};
    while (!pieces_.empty()) land();
  }

 private:
  // The most slices that are on their way to updates in backward.
  static constexpr size_t kSlicesToUpdates = 2;

  // A piece of a sum on its way to the host.
  struct Piece {
    int64_t unit = 0;
    at::Tensor to;      // its place in the sum
    at::Tensor buffer;  // undefined if the copy goes straight to its place
    bool accumulates = false;
    bool last = false;  // the last piece of its unit
    StreamMark copied;
  };

  bool alone() const { return context_.placement.ranks() == 1; }

  at::Tensor host_memory(int64_t numel, at::ScalarType dtype, Category category) const {
    return pinned_zeros(numel, dtype, context_.table.device(), context_.table.ledger(), category);
  }

  // Enqueues the copies of a reduced slice from the device to the host.
  void bring_down(const Reduction& reduction) {
    const auto& to = cell(reduction.unit);
    const auto& sum = reduction.output;
    const bool in_place = !reduction.accumulates && sum.scalar_type() == to.scalar_type();
    const int64_t step = in_place ? sum.numel() : kPieceNumel;
    for (int64_t begin = 0; begin < sum.numel(); begin += step) {
      const int64_t count = std::min(step, sum.numel() - begin);
      const auto bytes = count * sum.element_size();
      Piece piece{.unit = reduction.unit,
                  .to = to.narrow(0, begin, count),
                  .buffer = {},
                  .accumulates = reduction.accumulates,
                  .last = begin + count == sum.numel(),
                  .copied = {}};
      if (!in_place) {
        while (buffers_in_use_ == buffers_.size()) land();
        ++buffers_in_use_;
        const auto& buffer = buffers_[turn_++ % buffers_.size()];
        piece.buffer = buffer.view(at::kByte).narrow(0, 0, bytes).view(sum.scalar_type());
      }
      const auto& lands_in = in_place ? piece.to : piece.buffer;
      context_.table.copier().down(
          lands_in.data_ptr(), sum.narrow(0, begin, count).const_data_ptr(), bytes, piece.copied);
      pieces_.push_back(std::move(piece));
    }
  }

  // Waits for the oldest piece and puts it in its place. A unit whose pieces are all there goes to
  // its update in backward.
  void land() {
    const auto piece = std::move(pieces_.front());
    pieces_.pop_front();
    piece.copied.wait_on_host();
    if (piece.buffer.defined()) {
      --buffers_in_use_;
      if (piece.accumulates) {
        add(piece.to, piece.buffer);
      } else {
        piece.to.copy_(piece.buffer);
      }
    }
    if (!piece.last || hand_over_ == nullptr) return;
    const int64_t unit = piece.unit;
    const auto& sum = cell(unit);
    if (take_norm(unit, sum).finite && hand_over_->wants(unit)) hand_over_->hand_over(unit, sum);
  }

  HandOver* hand_over_;
  std::vector<at::Tensor> buffers_;  // for pieces that the host adds; they take turns
  size_t turn_ = 0;
  size_t buffers_in_use_ = 0;
  std::deque<Piece> pieces_;
};

}  // namespace

std::unique_ptr<GradientSums> host_sums(const ReductionContext& context,
                                        const std::vector<int64_t>& units, HandOver* hand_over) {
  return std::make_unique<HostSums>(context, units, hand_over);
}

}  // namespace zero
