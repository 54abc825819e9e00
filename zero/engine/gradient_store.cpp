#include "zero/engine/gradient_store.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_memory.h"
#include "zero/engine/flat.h"

namespace zero {

namespace {

// Reductions under way at a time: one runs while the next bucket fills.
constexpr size_t kInFlight = 1;
// Sums that are written at a time.
constexpr size_t kWrites = 1;
// Elements of a block that comes down to be added.
constexpr int64_t kArrivingNumel = 1 << 18;

}  // namespace

GradientStore::GradientStore(const partition::Layout& layout, std::vector<at::Tensor> parameters,
                             std::vector<bool> trainable, comm::Group& group, Options options)
    : layout_(layout),
      parameters_(std::move(parameters)),
      group_(group),
      options_(std::move(options)),
      states_(static_cast<size_t>(layout.unit_count())),
      in_bucket_(parameters_.size(), 0),
      promised_(parameters_.size(), 0),
      places_(parameters_.size(), WeakTensor(at::Tensor().getIntrusivePtr())),
      local_(parameters_.size(), 0),
      present_(parameters_.size(), 0) {
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    auto& unit = state(u);
    const auto first = layout_.unit(u).segments.front().parameter;
    labels_.push_back(fmt::format("gradients of unit {} ({})", u,
                                  layout_.parameters()[static_cast<size_t>(first)].name));
    unit.trainable = trainable[static_cast<size_t>(u)];
    if (!unit.trainable) continue;
    order_.push_back(u);
    unit.dtype = options_.dtypes[static_cast<size_t>(u)];
    if (layout_.unit(u).bytes() <= options_.unit_bytes || layout_.unit(u).segments.size() > 1) {
      bucket_bytes_ = std::max(bucket_bytes_, bucket_bytes(u));
      const auto widest = static_cast<int64_t>(
          std::max(c10::elementSize(wire_dtype(u)), c10::elementSize(sum_dtype(u, false))));
      slice_bytes_ = std::max(slice_bytes_, layout_.slice_numel(u) * widest);
    }
    if ((streams() || passing()) && !on_host(u)) continue;
    const bool there = on_host(u);
    const bool sharded = options_.placement.gradients;
    const auto owned = partition::owned_range(layout_, u, options_.placement, group_.rank());
    const auto own = [&](Category category) {
      return host_zeros(owned.size(), storage_dtype(u), group_.ledger(), category);
    };
    const auto whole = [&](Category category) {
      return group_.empty(layout_.unit(u).numel, storage_dtype(u), category).zero_();
    };
    unit.storage = !sharded ? whole(Category::gradients)
                            : own(there ? Category::host_gradients : Category::gradients);
    if (there && !sharded) unit.below = own(Category::host_gradients);
    if (options_.doubled) {
      unit.other = there     ? own(Category::host_buffers)
                   : sharded ? own(Category::offload_buffers)
                             : whole(Category::offload_buffers);
    }
  }
  slice_bytes_ = std::min(slice_bytes_, bucket_bytes_);
  int64_t most = 0;
  for (const int64_t u : order_) {
    if (on_host(u) && options_.placement.gradients) most = std::max(most, layout_.slice_numel(u));
  }
  if (most > 0) {
    arriving_ = host_zeros(std::min(most, kArrivingNumel), at::kFloat, group_.ledger(),
                           Category::host_buffers);
  }
  std::reverse(order_.begin(),
               order_.end());  // backward meets the last first; corrected after the first pass
}

GradientStore::~GradientStore() {
  for (auto& reduction : in_flight_) {
    try {
      reduction.work.wait();
    } catch (const std::exception&) {  // the group has failed, and said so elsewhere
    }
  }
  sums_.clear();  // waits for writes
}

at::ScalarType GradientStore::storage_dtype(int64_t unit) const {
  return options_.accumulate_fp32 ? at::kFloat : state(unit).dtype;
}

// What goes down of a rank that is alone is its bucket: the sum needs no more bits than it has.
bool GradientStore::is_sum(int64_t unit) const { return on_host(unit) && group_.size() == 1; }

// Of what a pass reduces. What is added to other sums is not rounded before.
at::ScalarType GradientStore::sum_dtype(int64_t unit, bool first) const {
  if (is_sum(unit)) return wire_dtype(unit);
  return first ? storage_dtype(unit) : at::kFloat;
}

int64_t GradientStore::bytes_down(int64_t unit, int64_t passes) const {
  if (!on_host(unit)) return 0;
  const auto bytes = [](at::ScalarType dtype) {
    return static_cast<int64_t>(c10::elementSize(dtype));
  };
  const int64_t numel =
      partition::owned_range(layout_, unit, options_.placement, group_.rank()).size();
  if (!options_.placement.gradients) return numel * bytes(storage_dtype(unit));
  return numel * (bytes(sum_dtype(unit, true)) + (passes - 1) * bytes(sum_dtype(unit, false)));
}

at::ScalarType GradientStore::wire_dtype(int64_t unit) const {
  return options_.placement.gradients && !options_.add_in_buckets ? state(unit).dtype
                                                                  : storage_dtype(unit);
}

int64_t GradientStore::bucket_bytes(int64_t unit) const {
  return layout_.unit(unit).numel * static_cast<int64_t>(c10::elementSize(wire_dtype(unit)));
}

void GradientStore::begin_backward(bool holds, const std::vector<int64_t>& shared) {
  const std::lock_guard lock(mutex_);
  if (used()) {
    throw Error(
        "A second backward pass in a step with update_in_backward: the first has already updated "
        "weights. Call Engine::step after each; where a pass failed, load a checkpoint.");
  }
  if (finished_ && !options_.placement.gradients) {
    throw Error(
        "Engine::backward after the gradients of this step were completed by Engine::gradient or "
        "set_gradient: at stages 0 and 1 read "
        "and write gradients between the last backward and Engine::step.");
  }
  finished_ = false;
  in_pass_ = true;
  passed_ = true;
  holds_ = holds;
  std::fill(promised_.begin(), promised_.end(), uint8_t{0});
  if (!options_.placement.gradients) return;
  next_ = 0;
  for (auto& unit : states_) {
    unit.queued = false;
    unit.last = false;
    unit.arrived = 0;
  }
  for (const int64_t p : shared) state(layout_.unit_of(p)).last = true;
  std::stable_partition(order_.begin(), order_.end(), [&](int64_t u) { return !state(u).last; });
}

// The array that the gradients of this pass go to.
const at::Tensor& GradientStore::array_of(int64_t unit) {
  auto& u = state(unit);
  if (!options_.placement.gradients) return u.storage;
  if (!u.bucket.defined()) {
    u.bucket = take(layout_.unit(unit).numel, wire_dtype(unit));
    u.pooled = true;
  }
  return u.bucket;
}

at::Tensor GradientStore::place(int64_t parameter) {
  const std::lock_guard lock(mutex_);
  const auto p = static_cast<size_t>(parameter);
  const int64_t u = layout_.unit_of(parameter);
  // Where a gradient is in place already, the next one is added to it.
  if (!in_pass_ || in_bucket_[p] != 0 || std::exchange(promised_[p], 1) != 0) return {};
  if (wire_dtype(u) != state(u).dtype) return {};
  const auto& array = array_of(u);
  const auto& variable = parameters_[p];
  auto result = array.as_strided(variable.sizes(), variable.strides(),
                                 array.storage_offset() + layout_.segment_of(parameter).offset);
  places_[p] = WeakTensor(result.getIntrusivePtr());
  return result;
}

// `gradient` is not what was promised to be in the place: if that is still on its way, it moves to
// memory of its own.
void GradientStore::evacuate(int64_t parameter, const at::Tensor& gradient) {
  const at::Tensor waiting(places_[static_cast<size_t>(parameter)].lock());
  if (waiting.defined() && waiting.const_data_ptr() != gradient.const_data_ptr())
    waiting.set_data(waiting.clone(at::MemoryFormat::Preserve));
}

void GradientStore::arrive(int64_t parameter, const at::Tensor& variable) {
  auto gradient = variable.grad();
  if (!gradient.defined()) return;
  variable.mutable_grad() = at::Tensor();
  const at::NoGradGuard no_grad;
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  const std::lock_guard lock(mutex_);
  if (!in_pass_) {
    foreign_ = true;
    return;
  }
  const auto p = static_cast<size_t>(parameter);
  const int64_t u = layout_.unit_of(parameter);
  auto& unit = state(u);
  const bool sharded = options_.placement.gradients;
  const bool promised = std::exchange(promised_[p], 0) != 0;
  if (promised) evacuate(parameter, gradient);
  if (sharded && !unit.bucket.defined() && stands_alone(u, gradient, variable)) {
    unit.bucket = gradient.as_strided({layout_.unit(u).numel}, {1});
    unit.pooled = false;
  } else {
    const auto& segment = layout_.segment_of(parameter);
    const auto& array = array_of(u);
    auto place = array.as_strided(variable.sizes(), variable.strides(),
                                  array.storage_offset() + segment.offset);
    if (in_bucket_[p] != 0) {
      place.add_(gradient);
    } else if (!promised || place.const_data_ptr() != gradient.const_data_ptr()) {
      place.copy_(gradient);
    }
  }
  finished_ = false;
  local_[p] = 1;
  if (std::exchange(in_bucket_[p], 1) == 0) ++unit.arrived;
  if (!sharded || unit.queued) return;
  if (unit.arrived < static_cast<int64_t>(layout_.unit(u).segments.size())) return;
  if (!order_known_ && std::find(ready_.begin(), ready_.end(), u) == ready_.end())
    ready_.push_back(u);
  if (!holds_) advance();
}

void GradientStore::release() {
  const std::lock_guard lock(mutex_);
  if (options_.placement.gradients) advance();
}

// Reduces units in order as long as the next one is complete.
void GradientStore::advance() {
  while (next_ < order_.size()) {
    const auto& unit = state(order_[next_]);
    if (unit.last ||
        unit.arrived < static_cast<int64_t>(layout_.unit(order_[next_]).segments.size()))
      return;
    reduce(order_[next_++]);
  }
}

bool GradientStore::any_filled() const {
  return std::any_of(states_.begin(), states_.end(), [](const Unit& u) { return u.filled; });
}

void GradientStore::abandon_backward() {
  const std::lock_guard lock(mutex_);
  in_pass_ = false;
  abandon_reductions();
}

void GradientStore::abandon_reductions() {
  for (auto& reduction : in_flight_) {
    try {
      reduction.work.wait();
    } catch (const CommError&) {  // the group has failed, which the next collective says
    }
    if (reduction.pooled) give(std::move(reduction.bucket));
    // What is not of the pool goes with the reduction.
    if (is_sum(reduction.unit) || (options_.update && !on_host(reduction.unit))) continue;
    for (auto* sum : {&reduction.sum, &reduction.addend}) {
      if (sum->defined()) give(std::move(*sum));
    }
  }
  in_flight_.clear();
}

void GradientStore::end_backward() {
  const std::lock_guard lock(mutex_);
  in_pass_ = false;
  if (!options_.placement.gradients) return;
  while (next_ < order_.size()) reduce(order_[next_++]);
}

// The gradient is all of its unit, lies as the unit does, and is nobody else's.
bool GradientStore::stands_alone(int64_t unit, const at::Tensor& gradient,
                                 const at::Tensor& variable) const {
  const auto& shape = layout_.unit(unit);
  return bucket_bytes(unit) > bucket_bytes_ && gradient.numel() == shape.numel &&
         gradient.scalar_type() == wire_dtype(unit) && gradient.strides() == variable.strides() &&
         variable.is_non_overlapping_and_dense() && !gradient.requires_grad() &&
         gradient.use_count() == 1 && gradient.storage().use_count() == 1;
}

// An array from the pool; its memory goes back with `give`. Steps after the first two allocate
// nothing.
at::Tensor GradientStore::take(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  // Slices of ordinary units are many times smaller than their buckets.
  const int64_t whole = std::max(bytes, bytes <= slice_bytes_ ? slice_bytes_ : bucket_bytes_);
  at::Tensor memory;
  if (const auto found = free_.find(whole); found != free_.end()) {
    memory = std::move(found->second);
    free_.erase(found);
  } else {
    try {
      memory = group_.empty(whole, at::kByte, Category::gradient_buckets);
    } catch (const OutOfMemory&) {
      if (free_.empty()) throw;
      free_.clear();  // of other sizes
      memory = group_.empty(whole, at::kByte, Category::gradient_buckets);
    }
  }
  return memory.narrow(0, 0, bytes).view(dtype);
}

void GradientStore::give(at::Tensor array) {
  const auto bytes = static_cast<int64_t>(array.storage().nbytes());
  free_.emplace(bytes, array.view(at::kByte).as_strided({bytes}, {1}, 0));
}

// Zeros everything in a unit's array that no gradient of this rank was written to: other
// parameters, and padding.
void GradientStore::zero_missing(int64_t unit, const at::Tensor& array,
                                 const std::vector<uint8_t>& here) {
  int64_t end = 0;
  const auto zero_until = [&](int64_t begin) {
    if (begin > end) array.narrow(0, end, begin - end).zero_();
  };
  for (const auto& segment : layout_.unit(unit).segments) {
    if (here[static_cast<size_t>(segment.parameter)] == 0) continue;
    zero_until(segment.offset);
    end = segment.range().end;
  }
  zero_until(layout_.unit(unit).numel);
}

// Starts the reduce-scatter of a unit's bucket (sharded gradients).
void GradientStore::reduce(int64_t unit) {
  const at::NoGradGuard no_grad;
  auto& u = state(unit);
  u.queued = true;
  u.arrived = 0;
  if (!u.bucket.defined()) u.pooled = true;
  Reduction reduction{.unit = unit,
                      .bucket = u.bucket.defined()
                                    ? std::move(u.bucket)
                                    : take(layout_.unit(unit).numel, wire_dtype(unit)),
                      .pooled = u.pooled,
                      .sum = {},
                      .addend = {},
                      .work = {}};
  u.bucket = at::Tensor();
  zero_missing(unit, reduction.bucket, in_bucket_);
  for (const auto& segment : layout_.unit(unit).segments)
    in_bucket_[static_cast<size_t>(segment.parameter)] = 0;
  const auto slice = layout_.slice_numel(unit);
  if (u.filled) {
    // The sum of this pass, unrounded, is added to that of the earlier ones.
    reduction.addend = is_sum(unit) ? reduction.bucket : take(slice, sum_dtype(unit, false));
  }
  const bool first = !std::exchange(u.filled, true);
  reduction.in_place = first && !u.pooled && !on_disk() && !on_host(unit) && !options_.doubled &&
                       storage_dtype(unit) == reduction.bucket.scalar_type();
  const bool leaves = streams() || (on_host(unit) && !reduction.addend.defined());
  if (leaves && !reduction.in_place) {
    reduction.sum = !on_host(unit) ? take_sum(unit)
                    : is_sum(unit) ? reduction.bucket
                                   : take(slice, sum_dtype(unit, true));
  }
  const auto output = reduction.addend.defined() ? reduction.addend
                      : reduction.in_place
                          ? reduction.bucket.narrow(0, slice * group_.rank(), slice)
                      : leaves ? reduction.sum
                               : ensure_storage(unit);
  reduction.work =
      group_.reduce_scatter(output, reduction.bucket, labels_[static_cast<size_t>(unit)]);
  in_flight_.push_back(std::move(reduction));
  while (in_flight_.size() > kInFlight) retire_one();
}

void GradientStore::retire_one() {
  auto reduction = std::move(in_flight_.front());
  in_flight_.pop_front();
  reduction.work.wait();
  reduction.work = {};
  if (on_host(reduction.unit)) {
    receive(reduction);
    if (reduction.pooled) give(std::move(reduction.bucket));
    if (options_.update) stream(reduction.unit, state(reduction.unit).storage);
    return;
  }
  if (reduction.in_place) {
    const auto slice = layout_.slice_numel(reduction.unit);
    auto& sum = streams() ? reduction.sum : state(reduction.unit).storage;
    sum = host_part(std::move(reduction.bucket), slice * group_.rank(), slice, group_.ledger(),
                    category_of_sums());
  }
  auto storage = streams() ? std::move(reduction.sum) : state(reduction.unit).storage;
  if (reduction.addend.defined()) {
    if (on_disk()) {
      while (!sums_.empty()) retire_sum();  // this unit's may be among them
      auto read = options_.disk->start_read(reduction.unit, array_on_disk(reduction.unit),
                                            storage.mutable_data_ptr());
      options_.disk->wait(read);
    }
    if (storage.scalar_type() == at::kFloat) {
      optim::accumulate(static_cast<float*>(storage.data_ptr()), reduction.addend.const_data_ptr(),
                        at::kFloat, storage.numel());
    } else {
      storage.add_(reduction.addend);
    }
    give(std::move(reduction.addend));
  }
  if (reduction.pooled) give(std::move(reduction.bucket));
  if (streams()) stream(reduction.unit, std::move(storage));
}

// A slice's memory, uninitialised where it is new.
at::Tensor& GradientStore::ensure_storage(int64_t unit) {
  auto& storage = state(unit).storage;
  if (!storage.defined()) storage = take_sum(unit);
  return storage;
}

// Memory for a slice that will be streamed, or stays until the step is over.
at::Tensor GradientStore::take_sum(int64_t unit) {
  if (on_disk()) return take(layout_.slice_numel(unit), storage_dtype(unit));
  return host_empty(layout_.slice_numel(unit), storage_dtype(unit), group_.ledger(),
                    category_of_sums());
}

Category GradientStore::category_of_sums() const {
  return streams() ? Category::gradient_buckets : Category::gradients;
}

// What was reduced on the device comes down to the host, where it is stored, or added.
void GradientStore::receive(Reduction& reduction) {
  const auto& storage = state(reduction.unit).storage;
  const bool adds = reduction.addend.defined();
  auto sum = adds ? std::move(reduction.addend) : std::move(reduction.sum);
  const bool done = !adds && sum.scalar_type() == storage.scalar_type();
  if (done) {
    options_.host->down(storage.data_ptr(), sum.const_data_ptr(),
                        static_cast<int64_t>(sum.nbytes()));
  }
  for (int64_t begin = 0; !done && begin < sum.numel(); begin += kArrivingNumel) {
    const int64_t numel = std::min(kArrivingNumel, sum.numel() - begin);
    const auto bytes = numel * static_cast<int64_t>(sum.element_size());
    options_.host->down(arriving_.data_ptr(), sum.narrow(0, begin, numel).const_data_ptr(), bytes);
    auto to = storage.narrow(0, begin, numel);
    const auto arrived = arriving_.view(at::kByte).narrow(0, 0, bytes).view(sum.scalar_type());
    if (!adds) {
      to.copy_(arrived);
    } else if (storage.scalar_type() == at::kFloat) {
      optim::accumulate(static_cast<float*>(to.data_ptr()), arrived.const_data_ptr(),
                        arrived.scalar_type(), numel);
    } else {
      to.add_(arrived);
    }
  }
  if (!is_sum(reduction.unit)) give(std::move(sum));
}

// Replicated gradients, complete: those that this rank updates go to the host.
void GradientStore::send_down(int64_t unit) {
  const auto& below = state(unit).below;
  if (!below.defined()) return;
  options_.host->down(below.data_ptr(), reduced(unit).const_data_ptr(),
                      static_cast<int64_t>(below.nbytes()));
}

int64_t GradientStore::array_on_disk(int64_t unit) const {
  return options_.disk->array_count(unit) - 1;
}

// Starts to write, or to use, a slice that is complete for now; its norm is taken while it is here.
void GradientStore::stream(int64_t unit, at::Tensor sum) {
  auto& u = state(unit);
  u.norm = optim::squared_norm(sum.const_data_ptr(), sum.scalar_type(), sum.numel());
  if (on_disk()) {
    while (sums_.size() >= kWrites) retire_sum();
    auto write = options_.disk->start_write(unit, array_on_disk(unit), sum.const_data_ptr());
    sums_.push_back({std::move(sum), std::move(write)});
    return;
  }
  const auto& segments = layout_.unit(unit).segments;
  u.updated = u.norm.finite && std::all_of(segments.begin(), segments.end(), [&](const auto& s) {
                return local_[static_cast<size_t>(s.parameter)] != 0;
              });
  if (u.updated) {
    options_.update(unit, std::move(sum));
  } else {
    u.storage = std::move(sum);
  }
}

void GradientStore::retire_sum() {
  auto sum = std::move(sums_.front());
  sums_.pop_front();
  options_.disk->wait(sum.write);
  give(std::move(sum.memory));
}

// Exchanges, in one small all-gather: which parameters had a gradient, which units have one left in
// their bucket, and the order in which rank 0's became ready.
void GradientStore::agree() {
  const auto parameters = static_cast<int64_t>(parameters_.size());
  const auto units = layout_.unit_count();
  const auto ordered = static_cast<int64_t>(order_.size());
  auto mine = at::zeros({parameters + units + ordered}, at::kInt);
  auto* values = mine.mutable_data_ptr<int32_t>();
  std::copy(local_.begin(), local_.end(), values);
  for (int64_t u = 0; u < units; ++u) values[parameters + u] = state(u).bucket.defined() ? 1 : 0;
  if (!order_known_) {
    // Units that never became ready by themselves go last, so that none waits for them.
    std::vector<int64_t> order = ready_;
    for (const int64_t u : order_) {
      if (std::find(order.begin(), order.end(), u) == order.end()) order.push_back(u);
    }
    std::copy(order.begin(), order.end(), values + parameters + units);
  }
  auto all = at::zeros({group_.size() * mine.numel()}, at::kInt);
  group_.all_gather_control(all, mine, "gradients present");
  const auto* gathered = all.const_data_ptr<int32_t>();
  std::vector<bool> left(static_cast<size_t>(units), false);
  std::fill(present_.begin(), present_.end(), uint8_t{0});
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto* theirs = gathered + rank * mine.numel();
    for (int64_t p = 0; p < parameters; ++p)
      present_[static_cast<size_t>(p)] |= static_cast<uint8_t>(theirs[p]);
    for (int64_t u = 0; u < units; ++u) {
      if (theirs[parameters + u] != 0) left[static_cast<size_t>(u)] = true;
    }
  }
  if (!std::exchange(order_known_, true)) {
    const auto* theirs = gathered + parameters + units;
    std::copy(theirs, theirs + ordered, order_.begin());
  }
  if (!options_.placement.gradients) return;
  for (const int64_t u : order_) {
    if (!left[static_cast<size_t>(u)]) continue;
    if (options_.update) {
      throw Error(fmt::format(
          "A gradient arrived for {} after that was reduced and, with update_in_backward, used: "
          "one of its parameters is used in several passes. Switch update_in_backward off, or name "
          "it in LayerSequence::shared.",
          labels_[static_cast<size_t>(u)]));
    }
    reduce(u);
  }
}

void GradientStore::finish() {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  const at::NoGradGuard no_grad;
  agree();
  finished_ = true;  // what fails from here on has failed for good
  while (!in_flight_.empty()) retire_one();
  while (!sums_.empty()) retire_sum();
  if (options_.placement.gradients) return;
  const auto wanted = [&](int64_t unit) {
    const auto& segments = layout_.unit(unit).segments;
    return std::any_of(segments.begin(), segments.end(), [&](const auto& segment) {
      return present_[static_cast<size_t>(segment.parameter)] != 0;
    });
  };
  std::vector<comm::Work> works;
  for (const int64_t u : order_) {
    if (!wanted(u)) continue;
    auto& unit = state(u);
    zero_missing(u, unit.storage, in_bucket_);
    unit.filled = true;
    const auto& label = labels_[static_cast<size_t>(u)];
    works.push_back(options_.placement.optimizer
                        ? group_.reduce_scatter(slice(u), unit.storage, label)
                        : group_.all_reduce(unit.storage, label));
  }
  for (auto& work : works) work.wait();
  for (const int64_t u : order_) {
    if (wanted(u)) send_down(u);
  }
}

at::Tensor GradientStore::slice(int64_t unit) const {
  if (on_disk()) return options_.disk->read(unit, array_on_disk(unit));
  const auto& storage = state(unit).storage;
  if (options_.placement.gradients) return storage;
  const auto range = layout_.slice(unit, group_.rank());
  return storage.narrow(0, range.begin, range.size());
}

at::Tensor GradientStore::reduced(int64_t unit) const {
  return options_.placement.optimizer ? slice(unit) : state(unit).storage;
}

void GradientStore::detach() {
  const std::lock_guard lock(mutex_);
  for (const int64_t u : order_) {
    auto& unit = state(u);
    if (!on_disk()) {
      unit.detached = unit.below.defined() ? unit.below : reduced(u);
      if (options_.doubled) std::swap(read_by_update(unit), unit.other);
    } else if (options_.doubled) {
      options_.disk->flip(u, array_on_disk(u));
    }
  }
}

const at::Tensor& GradientStore::detached(int64_t unit) const { return state(unit).detached; }

optim::SquaredNorm GradientStore::norm(int64_t unit) const {
  if (streams()) return state(unit).norm;
  const auto values = slice(unit);
  return optim::squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
}

void GradientStore::clear() {
  const std::lock_guard lock(mutex_);
  std::fill(in_bucket_.begin(), in_bucket_.end(), uint8_t{0});
  std::fill(local_.begin(), local_.end(), uint8_t{0});
  std::fill(present_.begin(), present_.end(), uint8_t{0});
  abandon_reductions();
  while (!sums_.empty()) retire_sum();
  for (auto& unit : states_) {
    unit.filled = unit.updated = false;
    unit.arrived = 0;
    if ((passing() || options_.update) && !on_host(&unit - states_.data()))
      unit.storage = unit.detached = at::Tensor();
    auto bucket = std::exchange(unit.bucket, at::Tensor());
    if (bucket.defined() && unit.pooled) give(std::move(bucket));
  }
  finished_ = passed_ = foreign_ = false;
}

void GradientStore::set(int64_t parameter, const at::Tensor& values) {
  finish();
  const std::lock_guard lock(mutex_);
  const int64_t u = layout_.unit_of(parameter);
  if (options_.placement.gradients && !on_disk()) ensure_storage(u);
  auto target = reduced(u);
  if (!state(u).filled) target.zero_();
  state(u).filled = true;
  const auto& segment = layout_.segment_of(parameter);
  const auto owned = partition::owned_range(layout_, u, options_.placement, group_.rank());
  const auto mine = partition::intersect(segment.range(), owned);
  if (!mine.empty()) {
    target.narrow(0, mine.begin - owned.begin, mine.size())
        .copy_(values.narrow(0, mine.begin - segment.offset, mine.size()));
  }
  if (on_disk()) {
    auto sum = take(target.numel(), target.scalar_type());
    sum.copy_(target);
    stream(u, std::move(sum));
    while (!sums_.empty()) retire_sum();
  }
  send_down(u);
  present_[static_cast<size_t>(parameter)] = 1;
  local_[static_cast<size_t>(parameter)] = 1;
}

}  // namespace zero
