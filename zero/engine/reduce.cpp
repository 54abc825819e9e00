#include "zero/engine/reduce.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/reduce_kernels.h"
#include "zero/device/memory.h"
#include "zero/engine/flat.h"
#include "zero/optim/operators.h"

namespace zero {

namespace {

// Complete buckets that may wait for a unit before them: Note [Order of reductions].
constexpr int64_t kWaiting = 8;

int64_t bytes_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

}  // namespace

ReduceFlow::ReduceFlow(const partition::Layout& layout, std::vector<at::Tensor> parameters,
                       StateTable& table, const Placement& placement, Options options)
    : layout_(layout),
      parameters_(std::move(parameters)),
      table_(table),
      placement_(placement),
      group_(*placement.shards),
      side_(side_stream(table.device())),
      options_(std::move(options)),
      states_(static_cast<size_t>(layout.unit_count())),
      in_bucket_(parameters_.size(), 0),
      came_(parameters_.size(), 0),
      promised_(parameters_.size(), 0),
      places_(parameters_.size(), WeakTensor(at::Tensor().getIntrusivePtr())),
      local_(parameters_.size(), 0),
      present_(parameters_.size(), 0),
      before_(parameters_.size(), 0) {
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    labels_.push_back("gradients of " + unit_label(layout_, u));
    // Backward meets the last first; corrected after the first pass.
    if (table_.trainable(u)) order_.insert(order_.begin(), u);
  }
  if (side_) {
    norms_ = at::zeros({layout_.unit_count(), 2},
                       at::TensorOptions(at::kDouble).device(table_.device()));
  }
  make_pool();
  if (sharded()) {
    make_sums();
    make_losses();
  } else {
    make_whole();
    reserve_buckets();
    // A hook must not wait for other ranks, as these would: for their bucket, or a phase.
    const bool waits = replicas() != nullptr || std::any_of(order_.begin(), order_.end(),
                                                            [&](int64_t u) { return converts(u); });
    early_ = placement_.ranks() > 1 && !waits && (placement_.all->topology().hosts > 1 || side_);
  }
}

void ReduceFlow::make_pool() {
  int64_t buckets = 0;
  int64_t slices = 0;
  for (const int64_t u : order_) {
    if (layout_.unit(u).bytes() > options_.unit_bytes && layout_.unit(u).segments.size() == 1)
      continue;
    buckets = std::max(buckets, bucket_bytes(u));
    slices = std::max(slices, layout_.slice_numel(u) *
                                  std::max(bytes_of(wire_dtype(u)), bytes_of(sum_dtype(u, false))));
  }
  pool_ = std::make_unique<BucketPool>(group_, side_, buckets, slices);
}

// One class a place, of those that units use.
void ReduceFlow::make_sums() {
  const GradientSums::Context context{layout_, table_, placement_, *pool_};
  const auto complete = [this](int64_t unit) { return this->complete(unit); };
  HandOver hand_over;
  if (options_.hand_over) {
    hand_over = [this](int64_t unit, at::Tensor sum) {
      state(unit).updated = true;
      options_.hand_over(unit, std::move(sum));
    };
  }
  const auto make = [&](Tier tier) -> std::unique_ptr<GradientSums> {
    if (tier == Tier::disk) return std::make_unique<DiskSums>(context, options_.doubled);
    if (tier == Tier::host)
      return std::make_unique<HostSums>(context, options_.doubled, complete, hand_over);
    if (hand_over) return std::make_unique<HandedSums>(context, complete, hand_over);
    return std::make_unique<KeptSums>(context, options_.doubled);
  };
  for (const auto tier : {Tier::device, Tier::host, Tier::disk}) {
    GradientSums* made = nullptr;
    for (const int64_t u : order_) {
      if (table_.plan(u).gradients_at != tier) continue;
      if (made == nullptr) made = sums_.emplace_back(make(tier)).get();
      state(u).sums = made;
    }
  }
}

void ReduceFlow::make_losses() {
  if (!options_.wire || !options_.feedback) return;
  for (const int64_t u : order_) {
    const int64_t bytes = group_.feedback_bytes(*options_.wire, layout_.slice_numel(u));
    if (bytes > 0 && comm::can_quantise(wire_dtype(u)))
      state(u).losses = group_.empty(bytes, at::kByte, Category::gradients).zero_();
  }
}

// Replicated gradients: on the device the whole unit's; on the host what this rank updates.
void ReduceFlow::make_whole() {
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    if (!table_.trainable(u)) continue;
    const auto& plan = table_.plan(u);
    const bool below = plan.gradients_at == Tier::host;
    const auto owned = [&](Category category) {
      return pinned_zeros(plan.owned.size(), plan.gradient_dtype, table_.device(), table_.ledger(),
                          category);
    };
    const auto whole = [&](Category category) {
      return group_.empty(layout_.unit(u).numel, plan.gradient_dtype, category).zero_();
    };
    auto& unit = state(u);
    unit.whole = whole(Category::gradients);
    table_.memory(u, State::gradients) =
        below ? owned(Category::host_gradients)
              : unit.whole.narrow(0, plan.owned.begin, plan.owned.size());
    if (options_.doubled)
      unit.other = below ? owned(Category::host_buffers) : whole(Category::offload_buffers);
  }
}

// Those of `reduce_whole`, which must not be refused half-way: one that fills, and with slices one
// on its way.
void ReduceFlow::reserve_buckets() {
  at::Tensor under_way;
  for (const int64_t u : order_) {
    if (!converts(u)) continue;
    auto bucket = pool_->take(layout_.unit(u).numel, wire_dtype(u));
    if (under_way.defined()) pool_->give(std::move(under_way));
    under_way = at::Tensor();
    if (placement_.sharded.optimizer) {
      under_way = std::move(bucket);
    } else {
      pool_->give(std::move(bucket));
    }
  }
  if (under_way.defined()) pool_->give(std::move(under_way));
}

ReduceFlow::~ReduceFlow() {
  try {
    const bool whole = !sharded() && !(in_flight_.empty() && sums_of_all_.empty());
    {
      const SideScope on(side_, mark_);  // where memory goes back to
      for (auto& reduction : in_flight_) {
        try {
          reduction.of_ranks.wait();
        } catch (const std::exception&) {  // the group has failed, and said so elsewhere
        }
      }
      for (auto& work : sums_of_all_) {
        try {
          work.wait();
        } catch (const std::exception&) {  // the same
        }
      }
    }
    if (whole) wait_for(side_, mark_);  // the arrays are another stream's
  } catch (const std::exception&) {     // the device has
  }
}

// Of what a pass reduces. What is added to other sums is not rounded before; what goes down of a
// rank that is alone is its bucket, which needs no more bits than it has.
at::ScalarType ReduceFlow::sum_dtype(int64_t unit, bool first) const {
  const auto& plan = table_.plan(unit);
  if (plan.gradients_at == Tier::host && placement_.ranks() == 1) return wire_dtype(unit);
  return first ? plan.gradient_dtype : at::kFloat;
}

// Not what goes on to the host or a disk at once, or to an update.
bool ReduceFlow::defers(int64_t unit) const {
  return replicas() != nullptr && sharded() && !options_.add_in_buckets &&
         options_.micro_batches > 1 && !options_.hand_over &&
         table_.plan(unit).gradients_at == Tier::device;
}

at::ScalarType ReduceFlow::partial_dtype(int64_t unit) const {
  const auto wire = wire_dtype(unit);
  if (defers(unit)) return sum_dtype(unit, true);
  return group_.size() == 1 ? wire : comm::partial_dtype(wire);
}

at::ScalarType ReduceFlow::sent_dtype(int64_t unit, bool first) const {
  const auto wire = wire_dtype(unit);
  if (!placement_.sharded.optimizer) return wire;
  if (replicas() != nullptr && !defers(unit)) return group_.sent_dtype(wire, partial_dtype(unit));
  return group_.sent_dtype(wire,
                           sharded() ? sum_dtype(unit, first) : table_.plan(unit).gradient_dtype);
}

at::ScalarType ReduceFlow::sent_to_replicas(int64_t unit, bool first) const {
  return placement_.replicas->sent_dtype(partial_dtype(unit), sum_dtype(unit, first));
}

int64_t ReduceFlow::bytes_down(int64_t unit, int64_t passes) const {
  const auto& plan = table_.plan(unit);
  if (plan.gradients_at != Tier::host) return 0;
  const int64_t numel = plan.owned.size();
  if (!sharded()) return numel * bytes_of(plan.gradient_dtype);
  return numel *
         (bytes_of(sum_dtype(unit, true)) + (passes - 1) * bytes_of(sum_dtype(unit, false)));
}

// In which gradients are collected, and sent, where nothing says otherwise.
at::ScalarType ReduceFlow::usual_dtype(int64_t unit) const {
  const auto& plan = table_.plan(unit);
  return sharded() && !options_.add_in_buckets ? plan.dtype : plan.gradient_dtype;
}

// Division comes before rounding, at every stage.
at::ScalarType ReduceFlow::collected_dtype(int64_t unit) const {
  const auto usual = usual_dtype(unit);
  const bool as_sent = sharded() && !options_.add_in_buckets && options_.predivisor == 1;
  return as_sent ? options_.sent_as.value_or(usual) : usual;
}

at::ScalarType ReduceFlow::wire_dtype(int64_t unit) const {
  return options_.sent_as.value_or(collected_dtype(unit));
}

int64_t ReduceFlow::bucket_bytes(int64_t unit) const {
  return layout_.unit(unit).numel *
         std::max(bytes_of(collected_dtype(unit)), bytes_of(wire_dtype(unit)));
}

// The array as it is sent, in a bucket.
at::Tensor ReduceFlow::converted(int64_t unit, const at::Tensor& array) {
  auto bucket = pool_->take(array.numel(), wire_dtype(unit));
  bucket.copy_(array);
  return bucket;
}

void ReduceFlow::begin_backward(bool holds, const std::vector<int64_t>& shared, bool last) {
  const std::lock_guard lock(mutex_);
  if (used()) {
    throw Error(
        "A second backward pass in a step with update_in_backward: the first has already updated "
        "weights. Call Engine::step after each; where a pass failed, load a checkpoint. (Layers "
        "that are recomputed by reentrant checkpoints are passes of their own in loss.backward(): "
        "call Engine::backward.)");
  }
  const bool adds_once =
      !sharded() || std::any_of(order_.begin(), order_.end(), [&](int64_t u) { return defers(u); });
  if (finished_ && adds_once) {
    throw Error(
        "Engine::backward after the gradients of this step were completed by Engine::gradient or "
        "set_gradient: at stages 0 and 1, and with replicas (mics_shard_size), read "
        "and write gradients between the last backward and Engine::step.");
  }
  finished_ = false;
  in_pass_ = true;
  passed_ = true;
  holds_ = holds;
  std::fill(promised_.begin(), promised_.end(), uint8_t{0});
  if (!sharded()) {
    again_ |= last && began_;
    counts_ = early_ && last && !holds && !began_;
    began_ |= last;
    if (!counts_) return;
    std::fill(came_.begin(), came_.end(), uint8_t{0});
    for (auto& unit : states_) unit.arrived = 0;
    next_ = 0;
    return;
  }
  next_ = 0;
  waiting_ = 0;
  for (auto& unit : states_) {
    unit.queued = false;
    unit.last = false;
    unit.arrived = 0;
  }
  for (const int64_t p : shared) state(layout_.unit_of(p)).last = true;
  std::stable_partition(order_.begin(), order_.end(), [&](int64_t u) { return !state(u).last; });
}

// The array that the gradients of this pass go to.
const at::Tensor& ReduceFlow::array_of(int64_t unit) {
  auto& u = state(unit);
  if (!sharded() && !u.queued) return u.whole;
  if (!u.bucket.defined()) {
    u.bucket = pool_->take(layout_.unit(unit).numel, collected_dtype(unit));
    u.pooled = true;
  }
  return u.bucket;
}

at::Tensor ReduceFlow::place(int64_t parameter) {
  const std::lock_guard lock(mutex_);
  const auto p = static_cast<size_t>(parameter);
  const int64_t u = layout_.unit_of(parameter);
  // Where a gradient is in place already, the next one is added to it.
  if (!in_pass_ || in_bucket_[p] != 0 || std::exchange(promised_[p], 1) != 0) return {};
  if (collected_dtype(u) != table_.plan(u).dtype) return {};
  const auto& array = array_of(u);
  const auto& variable = parameters_[p];
  auto result = array.as_strided(variable.sizes(), variable.strides(),
                                 array.storage_offset() + layout_.segment_of(parameter).offset);
  places_[p] = WeakTensor(result.getIntrusivePtr());
  return result;
}

// `gradient` is not what was promised to be in the place: if that is still on its way, it moves to
// memory of its own.
void ReduceFlow::evacuate(int64_t parameter, const at::Tensor& gradient) {
  const at::Tensor waiting(places_[static_cast<size_t>(parameter)].lock());
  if (waiting.defined() && waiting.const_data_ptr() != gradient.const_data_ptr())
    waiting.set_data(waiting.clone(at::MemoryFormat::Preserve));
}

void ReduceFlow::arrive(int64_t parameter, const at::Tensor& variable) {
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
  const bool promised = std::exchange(promised_[p], 0) != 0;
  if (promised) evacuate(parameter, gradient);
  if (sharded() && !unit.bucket.defined() && stands_alone(u, gradient, variable)) {
    unit.bucket = gradient.as_strided({layout_.unit(u).numel}, {1});
    unit.pooled = false;
    unit.home = current_stream(gradient.device());
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
  placement_.shards->activity()->use(labels_[static_cast<size_t>(u)]);
  const bool another = std::exchange(in_bucket_[p], 1) != 0;
  if (sharded()) {
    if (another) return;
  } else {
    if (!counts_) return;
    if (std::exchange(came_[p], 1) != 0) {
      again_ = true;
      return;
    }
  }
  ++unit.arrived;
  if (unit.queued) return;
  if (unit.arrived < static_cast<int64_t>(layout_.unit(u).segments.size())) return;
  if (!order_known_ && std::find(ready_.begin(), ready_.end(), u) == ready_.end())
    ready_.push_back(u);
  if (sharded() && !unit.last) ++waiting_;
  if (sharded() ? !holds_ : order_known_) advance();
}

void ReduceFlow::release() {
  const std::lock_guard lock(mutex_);
  if (sharded()) advance();
}

// Reduces units in order as long as the next one is complete, or keeps too many waiting.
void ReduceFlow::advance() {
  while (next_ < order_.size()) {
    if (!sharded() && !expected(order_[next_])) {
      ++next_;
      continue;
    }
    const auto& unit = state(order_[next_]);
    const bool complete =
        unit.arrived >= static_cast<int64_t>(layout_.unit(order_[next_]).segments.size());
    const bool forced = sharded() && waiting_ >= kWaiting && may_leave(order_[next_]);
    if (unit.last || (!complete && !forced)) return;
    if (sharded()) {
      if (complete) --waiting_;
      reduce(order_[next_++]);
    } else {
      const SideScope on(side_, mark_);
      start_whole(order_[next_++]);
    }
  }
}

// Replicated gradients: those whose turn has not come.
void ReduceFlow::start_expected() {
  for (const int64_t u : order_) {
    if (!expected(u) || state(u).queued) continue;
    const SideScope on(side_, mark_);
    start_whole(u);
  }
}

// A unit may be reduced before its gradients are all here: not where a backward function has a
// place in its bucket, nor where late gradients could not be used any more (updates in backward),
// nor where an update of the step before may still read what is there (several layers in one pass).
bool ReduceFlow::may_leave(int64_t unit) const {
  const auto& segments = layout_.unit(unit).segments;
  const bool promised = std::any_of(segments.begin(), segments.end(), [&](const auto& segment) {
    return promised_[static_cast<size_t>(segment.parameter)] != 0;
  });
  return order_known_ && !promised && !holds_ && !options_.hand_over;
}

bool ReduceFlow::any_filled() const {
  return std::any_of(states_.begin(), states_.end(), [](const Unit& u) { return u.filled; });
}

bool ReduceFlow::complete(int64_t unit) const {
  const auto& segments = layout_.unit(unit).segments;
  return std::all_of(segments.begin(), segments.end(), [&](const auto& segment) {
    return local_[static_cast<size_t>(segment.parameter)] != 0;
  });
}

void ReduceFlow::abandon_backward() {
  const std::lock_guard lock(mutex_);
  in_pass_ = false;
  if (counts_) {
    for (auto& unit : states_) unit.abandoned = unit.abandoned || unit.queued;
  }
  abandon_reductions();
}

void ReduceFlow::abandon_reductions() {
  if (in_flight_.empty() && sums_of_all_.empty()) return;
  {
    const SideScope on(side_, mark_);
    for (auto& work : sums_of_all_) {
      try {
        work.wait();
      } catch (const CommError&) {  // as below
      }
    }
    sums_of_all_.clear();
    for (auto& reduction : in_flight_) {
      try {
        reduction.of_ranks.wait();
      } catch (const CommError&) {  // the group has failed, which the next collective says
      }
      reduction.of_ranks = {};
      if (reduction.partial.defined()) pool_->give(std::move(reduction.partial));
      if (auto* sums = state(reduction.unit).sums) {
        sums->drop(std::move(reduction));
      } else if (reduction.pooled) {
        pool_->give(std::move(reduction.bucket));
      }
    }
    in_flight_.clear();
  }
  if (!sharded()) wait_for(side_, mark_);  // the next pass writes to the same arrays
}

void ReduceFlow::end_backward() {
  const std::lock_guard lock(mutex_);
  in_pass_ = false;
  if (sharded()) {
    while (next_ < order_.size()) reduce(order_[next_++]);
    return;
  }
  if (!counts_ || !order_known_) return;
  started_ = true;
  const at::NoGradGuard no_grad;
  start_expected();
}

// The gradient is all of its unit, lies as the unit does, and is nobody else's.
bool ReduceFlow::stands_alone(int64_t unit, const at::Tensor& gradient,
                              const at::Tensor& variable) const {
  const auto& shape = layout_.unit(unit);
  return bucket_bytes(unit) > pool_->bucket_bytes() && gradient.numel() == shape.numel &&
         gradient.scalar_type() == collected_dtype(unit) &&
         gradient.strides() == variable.strides() && variable.is_non_overlapping_and_dense() &&
         !gradient.requires_grad() && gradient.use_count() == 1 &&
         gradient.storage().use_count() == 1;
}

// Zeros everything in a unit's array that no gradient of this rank was written to: other
// parameters, and padding.
void ReduceFlow::zero_missing(int64_t unit, const at::Tensor& array,
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

void ReduceFlow::predivide(const at::Tensor& array) const {
  if (options_.predivisor != 1) array.mul_(1 / options_.predivisor);
}

// No more of this rank's gradients go into a unit's array: it is ready to be added to the others'.
void ReduceFlow::close(int64_t unit, const at::Tensor& array) {
  zero_missing(unit, array, in_bucket_);
  predivide(array);
  for (const auto& segment : layout_.unit(unit).segments)
    in_bucket_[static_cast<size_t>(segment.parameter)] = 0;
}

// Starts the reduce-scatter of a unit's bucket (sharded gradients).
void ReduceFlow::reduce(int64_t unit) {
  const at::NoGradGuard no_grad;
  if (options_.starts) options_.starts(unit);
  auto& u = state(unit);
  u.queued = true;
  u.arrived = 0;
  Reduction reduction{.unit = unit,
                      .bucket = array_of(unit),
                      .pooled = u.pooled,
                      .home = u.home,
                      .adds = std::exchange(u.filled, true),
                      .output = {},
                      .sum = {},
                      .partial = {},
                      .of_ranks = {}};
  u.bucket = at::Tensor();
  close(unit, reduction.bucket);
  if (converts(unit)) {
    auto collected = std::exchange(reduction.bucket, converted(unit, reduction.bucket));
    if (std::exchange(reduction.pooled, true)) {
      pool_->give(std::move(collected));
    } else {
      BucketPool::release(std::move(collected), reduction.home);
    }
  }
  const SideScope on(side_, mark_);
  u.sums->prepare(reduction);
  start(std::move(reduction), !defers(unit));
  progress(1);
}

void ReduceFlow::start(Reduction reduction, bool over_replicas) {
  auto* others = over_replicas ? replicas() : nullptr;
  at::Tensor partial;
  if (others != nullptr) {
    const auto dtype = partial_dtype(reduction.unit);
    if (group_.size() == 1) {
      partial = reduction.bucket;
    } else if (dtype == reduction.output.scalar_type()) {
      partial = reduction.output;
    } else {
      partial = reduction.partial = pool_->take(reduction.output.numel(), dtype);
    }
  }
  reduction.of_ranks =
      SliceSum(group_, others, reduction.bucket, std::move(partial), reduction.output,
               labels_[static_cast<size_t>(reduction.unit)], link_wire(reduction.unit));
  in_flight_.push_back(std::move(reduction));
}

// Moves all reductions but the `newest` on by a phase, the oldest first: while the next bucket
// fills, what was started runs.
void ReduceFlow::progress(size_t newest) {
  size_t done = 0;  // the oldest; one with fewer phases may wait for another before it
  for (size_t i = 0; i + newest < in_flight_.size(); ++i) {
    if (in_flight_[i].of_ranks.advance() && done == i) ++done;
  }
  for (; done > 0; --done) {
    auto reduction = std::move(in_flight_.front());
    in_flight_.pop_front();
    retire(std::move(reduction));
  }
}

void ReduceFlow::retire(Reduction reduction) {
  reduction.of_ranks = {};
  if (reduction.partial.defined()) pool_->give(std::move(reduction.partial));
  reduction.partial = at::Tensor();
  if (rounds(reduction.unit) && reduction.output.scalar_type() != wire_dtype(reduction.unit))
    reduction.output.copy_(reduction.output.to(wire_dtype(reduction.unit)));
  if (auto* sums = state(reduction.unit).sums) {
    sums->take(std::move(reduction));
  } else if (reduction.pooled) {
    pool_->give(std::move(reduction.bucket));
  }
}

std::optional<comm::LinkWire> ReduceFlow::link_wire(int64_t unit) const {
  const auto dtype = wire_dtype(unit);
  if (!options_.wire || !comm::can_quantise(dtype)) {
    if (!options_.packed || !comm::can_pack_exponents(dtype)) return {};
    return comm::LinkWire{.packed = true};
  }
  return comm::LinkWire{.quantisation = *options_.wire,
                        .error = state(unit).losses,
                        .beta = options_.feedback.value_or(0)};
}

// What micro-batches have added up in the block, over the replicas.
void ReduceFlow::add_deferred() {
  std::vector<SliceSum> sums;
  for (const int64_t u : order_) {
    if (defers(u) && state(u).filled)
      sums.emplace_back(*replicas(), state(u).sums->slice(u), labels_[static_cast<size_t>(u)]);
  }
  for (int phase = 0; phase < 3; ++phase) {
    for (auto& sum : sums) sum.advance();
  }
}

// Replicated gradients, complete: those that this rank updates go to the host, which waits for the
// norm behind them before it updates.
void ReduceFlow::send_down(int64_t unit) {
  if (sharded() || table_.plan(unit).gradients_at != Tier::host) return;
  const auto& below = table_.memory(unit, State::gradients);
  table_.link().down(below.data_ptr(), sum(unit).const_data_ptr(),
                     static_cast<int64_t>(below.nbytes()), mark_);
}

// Exchanges, in one small all-gather: which parameters had a gradient, which units have one left in
// their bucket, and the order in which rank 0's became ready.
ReduceFlow::Agreed ReduceFlow::agree() {
  const auto parameters = static_cast<int64_t>(parameters_.size());
  const auto units = layout_.unit_count();
  const auto ordered = static_cast<int64_t>(order_.size());
  auto mine = at::zeros({parameters + units + ordered + 2}, at::kInt);
  auto* values = mine.mutable_data_ptr<int32_t>();
  std::copy(local_.begin(), local_.end(), values);
  for (int64_t u = 0; u < units; ++u) values[parameters + u] = state(u).bucket.defined() ? 1 : 0;
  auto* flags = values + parameters + units + ordered;
  flags[0] = again_ ? 1 : 0;
  flags[1] = started_ ? 1 : 0;
  if (!order_known_) {
    // Units that never became ready by themselves go last, so that none waits for them.
    std::vector<int64_t> order = ready_;
    for (const int64_t u : order_) {
      if (std::find(order.begin(), order.end(), u) == order.end()) order.push_back(u);
    }
    std::copy(order.begin(), order.end(), values + parameters + units);
  }
  auto all = at::zeros({placement_.ranks() * mine.numel()}, at::kInt);
  placement_.all->all_gather_control(all, mine, "gradients present");
  const auto* gathered = all.const_data_ptr<int32_t>();
  Agreed agreed{.left = std::vector<bool>(static_cast<size_t>(units), false)};
  std::fill(present_.begin(), present_.end(), uint8_t{0});
  for (int rank = 0; rank < placement_.ranks(); ++rank) {
    const auto* theirs = gathered + rank * mine.numel();
    for (int64_t p = 0; p < parameters; ++p)
      present_[static_cast<size_t>(p)] |= static_cast<uint8_t>(theirs[p]);
    for (int64_t u = 0; u < units; ++u) {
      if (theirs[parameters + u] != 0) agreed.left[static_cast<size_t>(u)] = true;
    }
    const auto* of_rank = theirs + parameters + units + ordered;
    if (of_rank[0] != 0) early_ = false;
    if (of_rank[1] != 0) agreed.started = true;
  }
  if (!std::exchange(order_known_, true)) {
    const auto* theirs = gathered + parameters + units;
    std::copy(theirs, theirs + ordered, order_.begin());
  }
  for (const int64_t u : order_) {
    if (!sharded() || !agreed.left[static_cast<size_t>(u)]) continue;
    if (options_.hand_over) {
      throw Error(fmt::format(
          "A gradient arrived for {} after that was reduced and, with update_in_backward, used: "
          "one of its parameters is used in several passes. Switch update_in_backward off, or name "
          "it in LayerSequence::shared.",
          labels_[static_cast<size_t>(u)]));
    }
    reduce(u);
  }
  return agreed;
}

void ReduceFlow::finish() {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  const at::NoGradGuard no_grad;
  const auto agreed = agree();
  finished_ = true;  // what fails from here on has failed for good
  for (auto& unit : states_) unit.abandoned = false;
  {
    const SideScope on(side_, mark_);
    while (!in_flight_.empty()) progress(0);
    for (const auto& sums : sums_) sums->settle();
    if (sharded()) {
      add_deferred();
    } else {
      if (agreed.started) start_expected();  // where this rank's pass has not
      reduce_whole();
      add_late(agreed.left);
      for (const int64_t u : order_) {
        if (wanted(u)) send_down(u);
      }
    }
  }
  wait_for(side_, mark_);
}

// One of its parameters is among `parameters`.
bool ReduceFlow::any_of(int64_t unit, const std::vector<uint8_t>& parameters) const {
  const auto& segments = layout_.unit(unit).segments;
  return std::any_of(segments.begin(), segments.end(), [&](const auto& segment) {
    return parameters[static_cast<size_t>(segment.parameter)] != 0;
  });
}

// Replicated gradients: starts the sum over ranks.
void ReduceFlow::start_whole(int64_t u) {
  auto& unit = state(u);
  unit.queued = unit.filled = true;
  close(u, unit.whole);
  const auto& label = labels_[static_cast<size_t>(u)];
  if (converts(u) && !placement_.sharded.optimizer) {
    auto bucket = converted(u, unit.whole);
    placement_.all->all_reduce(bucket, label).wait();
    unit.whole.copy_(bucket);
    pool_->give(std::move(bucket));
    return;
  }
  if (!placement_.sharded.optimizer) {
    sums_of_all_.push_back(placement_.all->all_reduce(unit.whole, label));
    return;
  }
  start({.unit = u,
         .bucket = converts(u) ? converted(u, unit.whole) : unit.whole,
         .pooled = converts(u),
         .output = slice(u),
         .sum = {},
         .partial = {},
         .of_ranks = {}},
        true);
  if (converts(u) || replicas() != nullptr) progress(1);  // which needs memory for each
}

// Replicated gradients: of the units that some rank has a gradient for.
void ReduceFlow::reduce_whole() {
  for (const int64_t u : order_) {
    if (wanted(u) && !state(u).queued) start_whole(u);
  }
  while (!in_flight_.empty()) progress(0);
  for (auto& work : sums_of_all_) work.wait();
  sums_of_all_.clear();
}

// Replicated gradients: what came for units that had been reduced (Note [Early reductions]).
void ReduceFlow::add_late(const std::vector<bool>& left) {
  for (const int64_t u : order_) {
    if (!left[static_cast<size_t>(u)]) continue;
    auto& unit = state(u);
    auto bucket = array_of(u);
    unit.bucket = at::Tensor();
    close(u, bucket);
    if (!placement_.sharded.optimizer) {
      placement_.all->all_reduce(bucket, labels_[static_cast<size_t>(u)]).wait();
      unit.whole.add_(bucket);
      BucketPool::release(std::move(bucket), side_);
      continue;
    }
    const auto sum =
        group_.empty(layout_.slice_numel(u), unit.whole.scalar_type(), Category::gradient_buckets);
    start({.unit = u,
           .bucket = bucket,
           .pooled = false,
           .output = sum,
           .sum = {},
           .partial = {},
           .of_ranks = {}},
          true);
    while (!in_flight_.empty()) progress(0);
    slice(u).add_(sum);
    BucketPool::release(std::move(bucket), side_);
  }
}

// This rank's slice of a sum that is whole.
at::Tensor ReduceFlow::slice(int64_t unit) const {
  const auto range = layout_.slice(unit, group_.rank());
  return state(unit).whole.narrow(0, range.begin, range.size());
}

at::Tensor ReduceFlow::sum(int64_t unit) const {
  if (sharded()) return state(unit).sums->slice(unit);
  const auto& owned = table_.plan(unit).owned;
  return state(unit).whole.narrow(0, owned.begin, owned.size());
}

bool ReduceFlow::on_device(int64_t unit) const {
  return side_.has_value() && (!sharded() || table_.plan(unit).gradients_at == Tier::device);
}

at::Tensor ReduceFlow::part_of_norm(int64_t unit) const {
  return placement_.part_of(sharded() ? state(unit).sums->slice(unit) : slice(unit));
}

std::vector<optim::SquaredNorm> ReduceFlow::norms() {
  std::vector<optim::SquaredNorm> norms(states_.size());
  bool waits = false;
  for (const int64_t u : order_) {
    if (!wanted(u)) continue;
    auto& norm = norms[static_cast<size_t>(u)];
    if (on_device(u)) {
      optim::squared_norm(part_of_norm(u), norms_.select(0, u));
      waits = true;
    } else if (sharded()) {
      norm = state(u).sums->norm(u);
    } else {
      const auto values = part_of_norm(u);
      norm = optim::squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
    }
  }
  if (!waits) return norms;
  const auto come = norms_.to(at::kCPU);
  const auto* const sums = come.const_data_ptr<double>();
  for (const int64_t u : order_) {
    if (!wanted(u) || !on_device(u)) continue;
    norms[static_cast<size_t>(u)] = {.sum = sums[2 * u], .finite = sums[2 * u + 1] == 0};
  }
  return norms;
}

void ReduceFlow::detach() {
  const std::lock_guard lock(mutex_);
  for (const int64_t u : order_) {
    auto& unit = state(u);
    if (sharded()) {
      unit.detached = unit.sums->detach(u);
      continue;
    }
    auto& cell = table_.memory(u, State::gradients);
    unit.detached = cell;
    if (!options_.doubled) continue;
    const auto& plan = table_.plan(u);
    if (plan.gradients_at == Tier::host) {
      std::swap(cell, unit.other);
    } else {
      std::swap(unit.whole, unit.other);
      cell = unit.whole.narrow(0, plan.owned.begin, plan.owned.size());
    }
  }
}

void ReduceFlow::join_started() {
  const std::lock_guard lock(mutex_);
  if (!early_ || finished_) return;
  if (!comm::any_rank(*placement_.all, started_, "gradients dropped")) return;
  const at::NoGradGuard no_grad;
  if (!started_) {
    // Those of a pass that has thrown are over, here and on the other ranks.
    for (const int64_t u : order_) state(u).queued = state(u).queued || state(u).abandoned;
    start_expected();
  }
  for (auto& unit : states_) unit.abandoned = false;
  started_ = true;  // so that no rank begins any from now on
}

void ReduceFlow::clear() {
  const std::lock_guard lock(mutex_);
  if (finished_) {
    before_ = present_;
  } else {
    again_ |= started_;  // they are dropped
  }
  abandon_reductions();
  const SideScope on(side_, mark_);  // sums go back to that stream
  std::fill(in_bucket_.begin(), in_bucket_.end(), uint8_t{0});
  std::fill(local_.begin(), local_.end(), uint8_t{0});
  std::fill(present_.begin(), present_.end(), uint8_t{0});
  for (const auto& sums : sums_) sums->settle();
  for (const int64_t u : order_) {
    auto& unit = state(u);
    unit.filled = unit.updated = unit.queued = false;
    unit.arrived = 0;
    auto bucket = std::exchange(unit.bucket, at::Tensor());
    if (bucket.defined() && unit.pooled) pool_->give(std::move(bucket));
    if (!sharded()) continue;
    // What an update under way reads is its own.
    if (!options_.doubled) unit.detached = at::Tensor();
    unit.sums->clear(u);
  }
  finished_ = passed_ = foreign_ = began_ = started_ = false;
}

void ReduceFlow::forget_losses() {
  const std::lock_guard lock(mutex_);
  for (auto& unit : states_) {
    if (unit.losses.defined()) unit.losses.zero_();
  }
}

void ReduceFlow::set(int64_t parameter, const at::Tensor& values) {
  finish();
  const std::lock_guard lock(mutex_);
  const int64_t u = layout_.unit_of(parameter);
  at::Tensor target;
  if (sharded()) {
    const SideScope on(side_, mark_);
    target = state(u).sums->make(u);
  } else {
    target = sum(u);
  }
  wait_for(side_, mark_);
  if (!std::exchange(state(u).filled, true)) target.zero_();
  const auto& segment = layout_.segment_of(parameter);
  const auto& owned = table_.plan(u).owned;
  const auto mine = partition::intersect(segment.range(), owned);
  if (!mine.empty()) {
    target.narrow(0, mine.begin - owned.begin, mine.size())
        .copy_(values.narrow(0, mine.begin - segment.offset, mine.size()));
  }
  if (sharded()) state(u).sums->put(u, target);
  send_down(u);
  present_[static_cast<size_t>(parameter)] = 1;
  local_[static_cast<size_t>(parameter)] = 1;
  passed_ = true;
}

}  // namespace zero
