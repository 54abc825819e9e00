// Sums of sharded gradients on disk. Each sum is written as soon as it is reduced, and the update
// reads it with the other states. For a later micro-batch the sum is read, added to and written
// again.
#include <deque>
#include <utility>

#include "zero/engine/gradient_sums.h"
#include "zero/store/disk_tier.h"

namespace zero {

namespace {

class DiskSums final : public GradientSums {
 public:
  explicit DiskSums(const ReductionContext& context) : GradientSums(context, true) {}
  ~DiskSums() override { writes_.clear(); }  // waits for them

  void prepare(Reduction& reduction) override {
    const int64_t unit = reduction.unit;
    if (reduction.accumulates) reduction.output = take_output(reduction);
    reduction.sum = context_.pool.take(numel(unit), dtype(unit));
    if (!reduction.accumulates) reduction.output = reduction.sum;
  }

  void store_or_add(Reduction reduction) override {
    const int64_t unit = reduction.unit;
    auto sum = std::move(reduction.sum);
    if (reduction.accumulates) {
      wait();  // this unit's sum may be among those being written
      auto read = table().start_read(unit, State::gradients, sum.mutable_data_ptr());
      table().wait(read);
      add_output(sum, reduction);
    }
    reduction.output = at::Tensor();
    give_bucket(reduction);
    write(unit, std::move(sum));
  }

  void drop(Reduction reduction) override {
    if (reduction.accumulates) context_.pool.give(std::move(reduction.output));
    reduction.output = at::Tensor();
    context_.pool.give(std::move(reduction.sum));
    give_bucket(reduction);
  }

  void wait() override {
    while (!writes_.empty()) end_oldest_write();
  }

  at::Tensor slice(int64_t unit) override { return table().read(unit, State::gradients); }

  void store(int64_t unit, const at::Tensor& sum) override {
    auto copy = context_.pool.take(sum.numel(), sum.scalar_type());
    copy.copy_(sum);
    write(unit, std::move(copy));
    wait();
  }

  at::Tensor detach(int64_t unit) override {
    if (context_.settings.doubled) table().exchange_copies(unit, State::gradients);
    return {};
  }

 private:
  static constexpr size_t kWrites = 1;  // the most that run at a time
  struct Write {
    at::Tensor memory;
    store::Transfer transfer;
  };

  StateTable& table() const { return context_.table; }

  // Takes the norm too, while the sum is in memory.
  void write(int64_t unit, at::Tensor sum) {
    take_norm(unit, sum);
    while (writes_.size() >= kWrites) end_oldest_write();
    auto transfer = table().start_write(unit, State::gradients, sum.const_data_ptr());
    writes_.push_back({std::move(sum), std::move(transfer)});
  }

  void end_oldest_write() {
    auto write = std::move(writes_.front());
    writes_.pop_front();
    table().wait(write.transfer);
    context_.pool.give(std::move(write.memory));
  }

  std::deque<Write> writes_;
};

}  // namespace

std::unique_ptr<GradientSums> disk_sums(const ReductionContext& context) {
  return std::make_unique<DiskSums>(context);
}

}  // namespace zero
