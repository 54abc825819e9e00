// Sums of sharded gradients on disk. Each sum is written as soon as it is reduced, and the update
// reads it with the other states. For a later micro-batch the sum is read, added to and written
// again.
//
// From a device with memory of its own a reduced slice comes down to pinned memory first (Note
// [Sums that come down] in host_sums.cpp), while backward goes on. The host waits for it when the
// next slice but one comes, and when the step ends.
#include <ATen/ceil_div.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <utility>
#include <vector>

#include "zero/device/memory.h"
#include "zero/engine/gradient_sums.h"
#include "zero/store/disk_tier.h"
#include "zero/store/file.h"

namespace zero {

namespace {

class DiskSums : public GradientSums {
 public:
  explicit DiskSums(const ReductionContext& context) : GradientSums(context, true) {}
  ~DiskSums() override { writes_.clear(); }  // waits for them

  void prepare(Reduction& reduction) override {
    const int64_t unit = reduction.unit;
    if (reduction.accumulates) reduction.output = take_output(reduction);
    reduction.sum = disk_memory(unit);
    if (!reduction.accumulates) reduction.output = reduction.sum;
  }

  void store_or_add(Reduction reduction) override {
    const int64_t unit = reduction.unit;
    auto sum = std::move(reduction.sum);
    if (reduction.accumulates) {
      read_back(unit, sum);
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

  void wait() override { end_writes(); }

  at::Tensor slice(int64_t unit) override { return table().read(unit, State::gradients); }

  void store(int64_t unit, const at::Tensor& sum) override {
    auto copy = disk_memory(unit);
    copy.copy_(sum);
    write(unit, std::move(copy));
    wait();
  }

  at::Tensor detach(int64_t unit) override {
    if (context_.settings.doubled) table().exchange_copies(unit, State::gradients);
    return {};
  }

 protected:
  StateTable& table() const { return context_.table; }

  // Takes memory for a unit's sum that a disk can read and write, and gives it back.
  virtual at::Tensor disk_memory(int64_t unit) {
    return context_.pool.take(numel(unit), dtype(unit));
  }
  virtual void give(at::Tensor sum) { context_.pool.give(std::move(sum)); }

  // Reads the sum of earlier micro-batches, which may be among those being written.
  void read_back(int64_t unit, const at::Tensor& sum) {
    end_writes();
    auto read = table().start_read(unit, State::gradients, sum.mutable_data_ptr());
    table().wait(read);
  }

  // Takes the norm too, while the sum is in memory.
  void write(int64_t unit, at::Tensor sum) {
    take_norm(unit, sum);
    while (writes_.size() >= kWrites) end_oldest_write();
    auto transfer = table().start_write(unit, State::gradients, sum.const_data_ptr());
    writes_.push_back({std::move(sum), std::move(transfer)});
  }

  void end_writes() {
    while (!writes_.empty()) end_oldest_write();
  }

 private:
  static constexpr size_t kWrites = 1;  // the most that run at a time
  struct Write {
    at::Tensor memory;
    store::Transfer transfer;
  };

  void end_oldest_write() {
    auto write = std::move(writes_.front());
    writes_.pop_front();
    table().wait(write.transfer);
    give(std::move(write.memory));
  }

  std::deque<Write> writes_;
};

// Sums that are reduced on a device with memory of its own.
class LandingDiskSums final : public DiskSums {
 public:
  using DiskSums::DiskSums;
  ~LandingDiskSums() override {
    try {
      if (!landing_.empty()) landing_.back().copied.wait_on_host();
    } catch (const std::exception&) {  // the device has failed, which others report
    }
  }

  void prepare(Reduction& reduction) override { reduction.output = take_output(reduction); }

  void store_or_add(Reduction reduction) override {
    const int64_t unit = reduction.unit;
    const auto& output = reduction.output;
    Landing landing{.unit = unit,
                    .sum = disk_memory(unit),
                    .buffer = {},
                    .accumulates = reduction.accumulates,
                    .copied = {}};
    const bool apart = reduction.accumulates || output.scalar_type() != dtype(unit);
    if (apart) landing.buffer = memory(numel(unit), output.scalar_type());
    auto& to = apart ? landing.buffer : landing.sum;
    table().copier().down(to.data_ptr(), output.const_data_ptr(),
                          static_cast<int64_t>(output.nbytes()), landing.copied);
    landing_.push_back(std::move(landing));
    drop(std::move(reduction));
    while (landing_.size() > kLanding) land();
  }

  void drop(Reduction reduction) override {
    context_.pool.give(std::move(reduction.output));
    reduction.output = at::Tensor();
    give_bucket(reduction);
  }

  void wait() override {
    while (!landing_.empty()) land();
    end_writes();
  }

 protected:
  at::Tensor disk_memory(int64_t unit) override { return memory(numel(unit), dtype(unit)); }
  void give(at::Tensor sum) override {
    const auto bytes = static_cast<int64_t>(sum.storage().nbytes());
    free_.push_back(sum.view(at::kByte).as_strided({bytes}, {1}, 0));
  }

 private:
  static constexpr size_t kLanding = 1;  // the most that are on their way when the host goes on

  // A slice on its way from the device.
  struct Landing {
    int64_t unit = 0;
    at::Tensor sum;     // what is written to the disk
    at::Tensor buffer;  // undefined if the copy goes straight to the sum
    bool accumulates = false;
    StreamMark copied;
  };

  // Takes pinned memory that begins where a disk wants it. Slices of one size share it.
  at::Tensor memory(int64_t numel, at::ScalarType dtype) {
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t whole = at::round_up(bytes, store::kAlignment) + store::kAlignment;
    const auto found = std::find_if(free_.begin(), free_.end(), [&](const at::Tensor& array) {
      return array.numel() == whole;
    });
    at::Tensor array;
    if (found != free_.end()) {
      array = std::move(*found);
      free_.erase(found);
    } else {
      array = pinned_zeros(whole, at::kByte, table().device(), table().ledger(),
                           Category::host_buffers);
    }
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(array.data_ptr()));
    return array.narrow(0, at::round_up(address, store::kAlignment) - address, bytes).view(dtype);
  }

  void land() {
    auto landing = std::move(landing_.front());
    landing_.pop_front();
    landing.copied.wait_on_host();
    if (landing.accumulates) {
      read_back(landing.unit, landing.sum);
      add(landing.sum, landing.buffer);
    } else if (landing.buffer.defined()) {
      landing.sum.copy_(landing.buffer);
    }
    if (landing.buffer.defined()) give(std::move(landing.buffer));
    write(landing.unit, std::move(landing.sum));
  }

  std::deque<Landing> landing_;
  std::vector<at::Tensor> free_;
};

}  // namespace

std::unique_ptr<GradientSums> disk_sums(const ReductionContext& context) {
  if (is_asynchronous(context.table.device())) return std::make_unique<LandingDiskSums>(context);
  return std::make_unique<DiskSums>(context);
}

}  // namespace zero
