#include "zero/engine/gradient_sums.h"

#include <algorithm>
#include <utility>

#include "zero/base/host_memory.h"
#include "zero/device/memory.h"

namespace zero {

namespace {

// Elements of a block that comes down to be added, and how many do at a time from a device.
constexpr int64_t kArrivingNumel = 1 << 18;
constexpr size_t kArriving = 8;
// Of those that an update in backward waits for.
constexpr size_t kHandedLate = 2;
// Sums that are written at a time.
constexpr size_t kWrites = 1;

void add_to(const at::Tensor& to, const at::Tensor& addend) {
  if (to.scalar_type() == at::kFloat && to.device().is_cpu()) {
    optim::accumulate(static_cast<float*>(to.data_ptr()), addend.const_data_ptr(),
                      addend.scalar_type(), to.numel());
  } else {
    to.add_(addend);
  }
}

}  // namespace

optim::SquaredNorm GradientSums::norm_of(const at::Tensor& slice) const {
  const auto values = context_.placement.part_of(slice);
  return optim::squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
}

optim::SquaredNorm GradientSums::norm(int64_t unit) { return norm_of(slice(unit)); }

at::Tensor GradientSums::part_of_bucket(const Reduction& reduction) const {
  const int64_t slice = numel(reduction.unit);
  return reduction.bucket.narrow(0, slice * context_.placement.shards->rank(), slice);
}

void GradientSums::add(const at::Tensor& sum, Reduction& reduction) {
  add_to(sum, reduction.output);
  context_.pool.give(std::move(reduction.output));
}

void GradientSums::give_bucket(Reduction& reduction) const {
  if (reduction.pooled) {
    context_.pool.give(std::move(reduction.bucket));
  } else {
    BucketPool::release(std::move(reduction.bucket), reduction.home);
  }
  reduction.bucket = at::Tensor();
}

at::Tensor GradientSums::host_memory(int64_t numel, at::ScalarType dtype, Category category) const {
  return pinned_zeros(numel, dtype, context_.table.device(), context_.table.ledger(), category);
}

// KeptSums

KeptSums::KeptSums(const Context& context, bool doubled) : GradientSums(context) {
  if (!doubled) return;
  other_.resize(static_cast<size_t>(context_.layout.unit_count()));
  for (int64_t u = 0; u < context_.layout.unit_count(); ++u) {
    const auto& plan = context_.table.plan(u);
    if (!plan.trainable || plan.gradients_at != Tier::device) continue;
    const auto make = [&](Category category) {
      return device_zeros(plan.owned.size(), dtype(u), context_.table.device(),
                          context_.table.ledger(), category);
    };
    memory(u) = make(Category::gradients);
    other_[static_cast<size_t>(u)] = make(Category::offload_buffers);
  }
}

// The sum takes the slice's place in the bucket, which is a gradient itself.
bool KeptSums::in_place(const Reduction& reduction) const {
  return !reduction.adds && !reduction.pooled && other_.empty() &&
         dtype(reduction.unit) == reduction.bucket.scalar_type();
}

at::Tensor KeptSums::make_slice(int64_t unit) const {
  return device_empty(numel(unit), dtype(unit), context_.table.device(), context_.table.ledger(),
                      category());
}

at::Tensor KeptSums::part_kept(Reduction& reduction) const {
  if (is_asynchronous(context_.table.device())) {
    auto kept = make_slice(reduction.unit);
    kept.copy_(part_of_bucket(reduction));
    give_bucket(reduction);
    return kept;
  }
  const int64_t slice = numel(reduction.unit);
  return host_part(std::move(reduction.bucket), slice * context_.placement.shards->rank(), slice,
                   context_.table.ledger(), category());
}

at::Tensor KeptSums::make(int64_t unit) {
  auto& kept = memory(unit);
  if (!kept.defined()) kept = make_slice(unit);
  return kept;
}

void KeptSums::prepare(Reduction& reduction) {
  reduction.output = reduction.adds        ? context_.pool.take(numel(reduction.unit), at::kFloat)
                     : in_place(reduction) ? part_of_bucket(reduction)
                                           : make(reduction.unit);
}

void KeptSums::take(Reduction reduction) {
  auto& kept = memory(reduction.unit);
  if (in_place(reduction)) {
    reduction.output = at::Tensor();
    kept = part_kept(reduction);
    return;
  }
  if (reduction.adds) add(kept, reduction);
  give_bucket(reduction);
}

void KeptSums::drop(Reduction reduction) {
  if (reduction.adds) context_.pool.give(std::move(reduction.output));
  give_bucket(reduction);
}

at::Tensor KeptSums::detach(int64_t unit) {
  auto detached = memory(unit);
  if (!other_.empty()) std::swap(memory(unit), other_[static_cast<size_t>(unit)]);
  return detached;
}

void KeptSums::clear(int64_t unit) {
  if (other_.empty()) memory(unit) = at::Tensor();
}

// HandedSums

HandedSums::HandedSums(const Context& context, std::function<bool(int64_t)> complete,
                       HandOver hand_over)
    : KeptSums(context, false),
      complete_(std::move(complete)),
      hand_over_(std::move(hand_over)),
      norms_(static_cast<size_t>(context.layout.unit_count())) {}

void HandedSums::prepare(Reduction& reduction) {
  if (in_place(reduction)) {
    reduction.output = part_of_bucket(reduction);
  } else {
    reduction.sum = make_slice(reduction.unit);
    reduction.output = reduction.sum;
  }
}

void HandedSums::take(Reduction reduction) {
  auto sum = std::move(reduction.sum);
  reduction.output = at::Tensor();
  if (sum.defined()) {
    give_bucket(reduction);
  } else {
    sum = part_kept(reduction);
  }
  const int64_t unit = reduction.unit;
  const auto& norm = norms_[static_cast<size_t>(unit)] = norm_of(sum);
  if (norm.finite && complete_(unit)) {
    hand_over_(unit, std::move(sum));
  } else {
    memory(unit) = std::move(sum);
  }
}

void HandedSums::drop(Reduction reduction) { give_bucket(reduction); }

// HostSums

HostSums::HostSums(const Context& context, bool doubled, std::function<bool(int64_t)> complete,
                   HandOver hand_over)
    : GradientSums(context),
      complete_(std::move(complete)),
      hand_over_(std::move(hand_over)),
      norms_(static_cast<size_t>(context.layout.unit_count())),
      other_(norms_.size()) {
  int64_t most = 0;
  for (int64_t u = 0; u < context_.layout.unit_count(); ++u) {
    const auto& plan = context_.table.plan(u);
    if (!plan.trainable || plan.gradients_at != Tier::host) continue;
    most = std::max(most, numel(u));
    const auto make = [&](Category category) { return host_memory(numel(u), dtype(u), category); };
    memory(u) = make(Category::host_gradients);
    if (doubled) other_[static_cast<size_t>(u)] = make(Category::host_buffers);
  }
  blocks_.resize(is_asynchronous(context_.table.device()) ? kArriving : 1);
  for (auto& block : blocks_)
    block = host_memory(std::min(most, kArrivingNumel), at::kFloat, Category::host_buffers);
}

// What goes down of a rank that is alone is its bucket: the sum needs no more bits than it has.
void HostSums::prepare(Reduction& reduction) {
  reduction.output = alone()
                         ? reduction.bucket
                         : context_.pool.take(numel(reduction.unit),
                                              reduction.adds ? at::kFloat : dtype(reduction.unit));
}

// What was reduced on the device comes down to the host, where it is stored, or added.
void HostSums::bring_down(const Reduction& reduction) {
  const auto& kept = memory(reduction.unit);
  const auto& sum = reduction.output;
  const bool in_place = !reduction.adds && sum.scalar_type() == kept.scalar_type();
  const int64_t step = in_place ? sum.numel() : kArrivingNumel;
  for (int64_t begin = 0; begin < sum.numel(); begin += step) {
    const int64_t count = std::min(step, sum.numel() - begin);
    const auto bytes = count * sum.element_size();
    Arrival arrival{.unit = reduction.unit,
                    .to = kept.narrow(0, begin, count),
                    .from = {},
                    .adds = reduction.adds,
                    .last = begin + count == sum.numel(),
                    .arrived = {}};
    if (!in_place) {
      while (taken_ == blocks_.size()) land();
      ++taken_;
      const auto& block = blocks_[turn_++ % blocks_.size()];
      arrival.from = block.view(at::kByte).narrow(0, 0, bytes).view(sum.scalar_type());
    }
    const auto& to = in_place ? arrival.to : arrival.from;
    context_.table.link().down(to.data_ptr(), sum.narrow(0, begin, count).const_data_ptr(), bytes,
                               arrival.arrived);
    arrivals_.push_back(std::move(arrival));
  }
}

// The oldest block is here: it goes to its place, and its unit, if that is whole, to its update.
void HostSums::land() {
  const auto arrival = std::move(arrivals_.front());
  arrivals_.pop_front();
  arrival.arrived.wait_on_host();
  if (arrival.from.defined()) {
    --taken_;
    if (arrival.adds) {
      add_to(arrival.to, arrival.from);
    } else {
      arrival.to.copy_(arrival.from);
    }
  }
  if (!arrival.last || !hand_over_) return;
  const int64_t unit = arrival.unit;
  const auto& kept = memory(unit);
  const auto& norm = norms_[static_cast<size_t>(unit)] = norm_of(kept);
  if (norm.finite && complete_(unit)) hand_over_(unit, kept);
}

void HostSums::settle() {
  if (arrivals_.empty()) return;
  arrivals_.back().arrived.wait_on_host();  // those before it have come too
  for (auto& arrival : arrivals_) arrival.arrived = {};
  while (!arrivals_.empty()) land();
}

void HostSums::take(Reduction reduction) {
  bring_down(reduction);
  drop(std::move(reduction));
  if (!is_asynchronous(context_.table.device())) {
    settle();
  } else if (hand_over_) {
    while (arrivals_.size() > kHandedLate) land();
  }
}

void HostSums::drop(Reduction reduction) {
  if (alone()) {
    reduction.output = at::Tensor();
  } else {
    context_.pool.give(std::move(reduction.output));
  }
  give_bucket(reduction);
}

optim::SquaredNorm HostSums::norm(int64_t unit) {
  return hand_over_ ? norms_[static_cast<size_t>(unit)] : GradientSums::norm(unit);
}

at::Tensor HostSums::detach(int64_t unit) {
  auto detached = memory(unit);
  auto& other = other_[static_cast<size_t>(unit)];
  if (other.defined()) std::swap(memory(unit), other);
  return detached;
}

// DiskSums

DiskSums::DiskSums(const Context& context, bool doubled)
    : GradientSums(context),
      doubled_(doubled),
      norms_(static_cast<size_t>(context.layout.unit_count())) {}

DiskSums::~DiskSums() { writes_.clear(); }  // waits for them

int64_t DiskSums::place(int64_t unit) const {
  return *context_.table.place_on_disk(unit, State::gradients);
}

void DiskSums::prepare(Reduction& reduction) {
  const int64_t unit = reduction.unit;
  if (reduction.adds) reduction.output = context_.pool.take(numel(unit), at::kFloat);
  reduction.sum = context_.pool.take(numel(unit), dtype(unit));
  if (!reduction.adds) reduction.output = reduction.sum;
}

void DiskSums::take(Reduction reduction) {
  const int64_t unit = reduction.unit;
  auto sum = std::move(reduction.sum);
  if (reduction.adds) {
    settle();  // this unit's may be among those that are written
    auto& disk = *context_.table.disk();
    auto read = disk.start_read(unit, place(unit), sum.mutable_data_ptr());
    disk.wait(read);
    add(sum, reduction);
  }
  reduction.output = at::Tensor();
  give_bucket(reduction);
  write(unit, std::move(sum));
}

void DiskSums::drop(Reduction reduction) {
  if (reduction.adds) context_.pool.give(std::move(reduction.output));
  reduction.output = at::Tensor();
  context_.pool.give(std::move(reduction.sum));
  give_bucket(reduction);
}

// The norm is taken while the sum is here.
void DiskSums::write(int64_t unit, at::Tensor sum) {
  norms_[static_cast<size_t>(unit)] = norm_of(sum);
  while (writes_.size() >= kWrites) retire_write();
  auto transfer = context_.table.disk()->start_write(unit, place(unit), sum.const_data_ptr());
  writes_.push_back({std::move(sum), std::move(transfer)});
}

void DiskSums::retire_write() {
  auto write = std::move(writes_.front());
  writes_.pop_front();
  context_.table.disk()->wait(write.transfer);
  context_.pool.give(std::move(write.memory));
}

void DiskSums::settle() {
  while (!writes_.empty()) retire_write();
}

at::Tensor DiskSums::slice(int64_t unit) { return context_.table.read(unit, State::gradients); }

void DiskSums::put(int64_t unit, const at::Tensor& sum) {
  auto copy = context_.pool.take(sum.numel(), sum.scalar_type());
  copy.copy_(sum);
  write(unit, std::move(copy));
  settle();
}

at::Tensor DiskSums::detach(int64_t unit) {
  if (doubled_) context_.table.disk()->flip(unit, place(unit));
  return {};
}

}  // namespace zero
