#include "zero/engine/plain.h"

#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "zero/base/error.h"
#include "zero/engine/flat.h"
#include "zero/optim/sweeps.h"
#include "zero/partition/formulas.h"

namespace zero {

namespace {

// A parameter of stage 3 stays the same tensor for ever, with its sizes and its place in autograd's
// graph. Only the bytes behind its storage come and go by these two functions.
void make_bytes(const at::Tensor& array) {
  at::native::resize_bytes_nocuda(array.storage(), array.nbytes());
}
void drop_bytes(const at::Tensor& array) { at::native::resize_bytes_nocuda(array.storage(), 0); }

}  // namespace

// Data parallelism. Every rank holds everything and makes the same update.
void PlainZero::stage_0(const std::vector<Pass>& passes) {
  for (const auto& pass : passes) {
    pass();
    for (auto& unit : units_) add(unit, take_gradients(unit));
  }
  for (auto& unit : units_) group_->all_reduce(unit.gradients).wait();
  update_all();
}

// P_os, section 5.1: a rank keeps the optimizer states of its slice. So it needs the sum of that
// slice only, and the other ranks need the parameters that it makes.
void PlainZero::stage_1(const std::vector<Pass>& passes) {
  for (const auto& pass : passes) {
    pass();
    for (auto& unit : units_) add(unit, take_gradients(unit));
  }
  for (auto& unit : units_) unit.gradients = reduce_scatter(unit.gradients, sum_dtype(unit));
  update_all();
  for (auto& unit : units_) all_gather(unit);
}

// P_os+g, section 5.2: each pass's gradients are reduced, and a rank keeps its slice of the sum.
void PlainZero::stage_2(const std::vector<Pass>& passes) {
  for (const auto& pass : passes) {
    pass();
    for (auto& unit : units_) add(unit, reduce_scatter(take_gradients(unit), next_dtype(unit)));
  }
  update_all();
  for (auto& unit : units_) all_gather(unit);
}

// P_os+g+p, section 5.3: a rank keeps its slice of the parameters too, and the whole ones exist
// while they are used. After an update nobody needs them, so there is no all-gather at the end.
void PlainZero::stage_3(const std::vector<Pass>& passes) {
  for (const auto& pass : passes) {
    for (auto& unit : units_) all_gather(unit);
    pass();
    for (auto& unit : units_) {
      add(unit, reduce_scatter(take_gradients(unit), next_dtype(unit)));
      drop_bytes(unit.parameters);
    }
  }
  update_all();
}

PlainZero::StepResult PlainZero::step(const std::vector<Pass>& passes) {
  constexpr std::array kStages{&PlainZero::stage_0, &PlainZero::stage_1, &PlainZero::stage_2,
                               &PlainZero::stage_3};
  (this->*kStages.at(static_cast<size_t>(options_.stage)))(passes);
  for (auto& unit : units_) unit.gradients = at::Tensor();
  present_.zero_();
  return result_;
}

// Lays the parameters out in units, and makes the arrays that a rank keeps.
PlainZero::PlainZero(const NamedTensors& model, Optimizer optimizer, Options options,
                     std::shared_ptr<comm::Group> group)
    : optimizer_(optimizer),
      options_(options),
      group_(std::move(group)),
      lr_(optim::lr(optimizer)) {
  const c10::NoGradGuard no_grad;
  const auto sharded = partition::sharding_of_stage(options_.stage);
  const auto reach = optim::reach(optimizer_);
  if (reach != optim::Reach::element && (reach != optim::Reach::parameter || options_.stage > 0)) {
    throw ConfigError(fmt::format(
        "PlainZero was given {} at stage {}, whose update of an element needs more than that "
        "element. Use an optimizer that updates elements by themselves (AdamW).",
        optim::name(optimizer_), options_.stage));
  }
  const auto dtype_of = [&](const at::Tensor& parameter) {
    return options_.bf16 ? at::kBFloat16 : parameter.scalar_type();
  };
  std::vector<partition::Parameter> described;
  for (const auto& [name, tensor] : model.parameters) {
    const auto is_it = [&](const auto& known) { return known.is_same(tensor); };
    if (std::any_of(parameters_.begin(), parameters_.end(), is_it)) continue;
    group_->broadcast(flat_view(tensor), 0, name).wait();
    const auto dtype = dtype_of(tensor);
    if (!tensor.requires_grad()) {
      tensor.set_data(tensor.to(dtype));
      continue;
    }
    parameters_.push_back(tensor);
    const auto kind = static_cast<int64_t>(dtype);  // parameters of a unit have one dtype
    described.push_back(
        {name, tensor.numel(), static_cast<int64_t>(c10::elementSize(dtype)), kind});
  }
  present_ = at::zeros({static_cast<int64_t>(parameters_.size())}, at::kInt);
  updates_.resize(parameters_.size());
  const partition::Layout layout(std::move(described), group_->size(), options_.unit_bytes);
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    auto& unit = units_.emplace_back();
    unit.shape = layout.unit(u);
    unit.owned = partition::owned_range(layout, u, sharded, group_->rank());
    const auto first = static_cast<size_t>(unit.shape.segments.front().parameter);
    unit.parameters = at::zeros({unit.shape.numel}, dtype_of(parameters_[first]));
    const auto values = at::zeros({unit.shape.numel}, at::kFloat);
    for (const auto& segment : unit.shape.segments) {
      const auto& parameter = parameters_[static_cast<size_t>(segment.parameter)];
      values.narrow(0, segment.offset, segment.numel).copy_(flat_view(parameter));
      parameter.set_data(
          unit.parameters.as_strided(parameter.sizes(), parameter.strides(), segment.offset));
    }
    unit.parameters.copy_(values);
    unit.slice = unit.parameters.narrow(0, unit.owned.begin, unit.owned.size());
    if (unit.parameters.scalar_type() != at::kFloat)
      unit.master = values.narrow(0, unit.owned.begin, unit.owned.size()).clone();
    for (size_t i = 0; i < optim::state_names(optimizer_).size(); ++i)
      unit.moments.at(i) = at::zeros({unit.owned.size()}, at::kFloat);
    if (!sharded.parameters) continue;
    unit.slice = unit.slice.clone();
    drop_bytes(unit.parameters);
  }
}

// Returns the gradients that a pass left in `.grad` as one array, with zeros for parameters without
// a gradient.
at::Tensor PlainZero::take_gradients(const Unit& unit) {
  const auto dtype = unit.slice.scalar_type();
  auto array = at::zeros({unit.shape.numel}, dtype);
  for (const auto& segment : unit.shape.segments) {
    const auto& parameter = parameters_[static_cast<size_t>(segment.parameter)];
    const auto gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
    if (!gradient.defined()) continue;
    present_[segment.parameter] = 1;
    array.narrow(0, segment.offset, segment.numel).copy_(flattened(gradient, parameter, dtype));
  }
  return array;
}

// Returns the dtype in which gradients add up over passes.
at::ScalarType PlainZero::sum_dtype(const Unit& unit) const {
  return options_.micro_batches > 1 ? at::kFloat : unit.slice.scalar_type();
}

// Returns the dtype of the sum over ranks of one pass. If it is to be added to the sum of earlier
// passes it is not rounded before.
at::ScalarType PlainZero::next_dtype(const Unit& unit) const {
  return unit.gradients.defined() ? at::kFloat : sum_dtype(unit);
}

void PlainZero::add(Unit& unit, const at::Tensor& gradients) const {
  const c10::NoGradGuard no_grad;
  if (unit.gradients.defined()) {
    unit.gradients.add_(gradients);
  } else {
    unit.gradients = gradients.to(sum_dtype(unit));
  }
}

// The sum is made in fp32, in the order of ranks, and rounded to `dtype` once.
at::Tensor PlainZero::reduce_scatter(const at::Tensor& whole, at::ScalarType dtype) const {
  auto slice = at::empty({whole.numel() / group_->size()}, dtype);
  group_->reduce_scatter(slice, whole).wait();
  return slice;
}

void PlainZero::all_gather(Unit& unit) const {
  make_bytes(unit.parameters);  // at stages 1 and 2 they are there
  group_->all_gather(unit.parameters, unit.slice).wait();
}

// Every rank adds up the squares of its slices, and all add these sums in the order of units and
// ranks. The mean over ranks and micro-batches, and the clipping, are one factor, which is applied
// once.
void PlainZero::update_all() {
  const c10::NoGradGuard no_grad;
  const auto units = static_cast<int64_t>(units_.size());
  auto squares = at::zeros({units}, at::kDouble);
  for (int64_t u = 0; u < units; ++u) {
    const auto& unit = units_[static_cast<size_t>(u)];
    const int64_t numel = unit.shape.numel / group_->size();
    const bool whole = unit.gradients.numel() > numel;
    const auto slice = unit.gradients.narrow(0, whole ? group_->rank() * numel : 0, numel);
    squares[u] =
        optim::squared_norm_reference(slice.const_data_ptr(), slice.scalar_type(), numel).sum;
  }
  auto all = at::empty({group_->size() * units}, at::kDouble);
  group_->all_gather_control(all, squares);
  double sum = 0;
  for (int64_t u = 0; u < units; ++u) {
    for (int rank = 0; rank < group_->size(); ++rank) sum += all[rank * units + u].item<double>();
  }
  double scale = 1 / static_cast<double>(group_->size() * options_.micro_batches);
  result_ = {.grad_norm = std::sqrt(sum) * scale, .updated = std::isfinite(sum)};
  const double clip = options_.gradient_clipping;
  if (clip > 0 && result_.grad_norm > clip)
    scale *= std::min(1.0, clip / (result_.grad_norm + 1e-6));
  if (!result_.updated) return;
  group_->all_reduce_control(present_);  // a gradient of any rank counts
  for (auto& unit : units_) update(unit, scale);
}

// A parameter for which no rank has a gradient keeps its weights and moments, as in LibTorch.
void PlainZero::update(Unit& unit, double gradient_scale) {
  for (const auto& segment : unit.shape.segments) {
    const auto p = static_cast<size_t>(segment.parameter);
    if (present_[segment.parameter].item<int32_t>() == 0) continue;
    ++updates_[p];
    const auto owned = partition::intersect(segment.range(), unit.owned);
    if (owned.empty()) continue;
    const auto at = [&](const at::Tensor& array) -> void* {
      return array.narrow(0, owned.begin - unit.owned.begin, owned.size()).mutable_data_ptr();
    };
    const auto& weights = unit.master.defined() ? unit.master : unit.slice;
    optim::Operands operands{.numel = owned.size(),
                             .master = static_cast<float*>(at(weights)),
                             .gradient = at(unit.gradients),
                             .gradient_dtype = unit.gradients.scalar_type()};
    for (size_t i = 0; i < unit.moments.size(); ++i) {
      if (unit.moments[i].defined()) operands.state[i] = static_cast<float*>(at(unit.moments[i]));
    }
    if (unit.master.defined()) {
      operands.parameter = at(unit.slice);
      operands.parameter_dtype = unit.slice.scalar_type();
    }
    optim::update_reference(optimizer_, updates_[p], lr_, gradient_scale, operands);
  }
}

std::vector<at::Tensor> PlainZero::weights() {
  std::vector<at::Tensor> all(parameters_.size());
  for (const auto& unit : units_) {
    const auto& owned = unit.master.defined() ? unit.master : unit.slice;
    auto whole = owned;
    if (options_.stage > 0) {
      whole = at::empty({unit.shape.numel}, at::kFloat);
      group_->all_gather(whole, owned).wait();
    }
    for (const auto& segment : unit.shape.segments) {
      const auto p = static_cast<size_t>(segment.parameter);
      all[p] = unflattened(whole.narrow(0, segment.offset, segment.numel), parameters_[p]);
    }
  }
  return all;
}

}  // namespace zero
