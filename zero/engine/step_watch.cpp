#include "zero/engine/step_watch.h"

#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "zero/comm/gather_records.h"

namespace zero {

namespace {

std::string name_of(int64_t micro_batch) {
  return micro_batch > 0 ? fmt::format("micro-batch {}", micro_batch)
                         : "micro-batches that passed together";
}

// Returns "NAME has ..." for the first tensor whose values are not finite; an empty text if all
// are.
template <class Values>
std::string first_not_finite(const std::vector<std::string>& names, const Values& values) {
  const at::DisableRecordFunctionGuard unobserved;
  for (const auto& name : names) {
    const at::Tensor full = values(name);
    if (!full.defined()) continue;
    const auto nans = at::isnan(full).sum().item<int64_t>();
    const auto infinities = at::isinf(full).sum().item<int64_t>();
    if (nans + infinities == 0) continue;
    return fmt::format("{} has {} NaN and {} infinite of {} elements", name, nans, infinities,
                       full.numel());
  }
  return "";
}

}  // namespace

StepWatch::StepWatch(Engine& engine, const NamedTensors& tensors)
    : engine_(engine), watch_(tensors) {
  for (const auto& [name, tensor] : tensors.parameters) {
    names_.push_back(name);
    if (tensor.requires_grad()) trainable_.push_back(name);
  }
}

void StepWatch::begin_step() { found_.reset(); }

// The watch is cleared, since an infinity in the micro-batch before has led to nothing, and
// operators of the engine between two micro-batches are not the model's.
void StepWatch::begin_micro_batch(int64_t index) {
  if (!found_) watch_.clear();
  micro_batch_ = index;
}

void StepWatch::add_loss(int64_t index, double loss) {
  if (found_) return;
  if (const auto& first = watch_.first()) {
    const auto& infinity = watch_.first_infinity();
    const bool came_before = first->inputs == Anomaly::Inputs::infinity && infinity.has_value();
    const auto& cause = came_before ? *infinity : *first;
    found_ = {micro_batch_, cause.backward, cause.order, first->inputs == Anomaly::Inputs::absent,
              watch_.report()};
    return;
  }
  if (std::isfinite(loss)) return;
  if (const auto& infinity = watch_.first_infinity()) {
    found_ = {micro_batch_, infinity->backward, infinity->order, false, infinity->text() + "."};
    return;
  }
  found_ = {micro_batch_, false, 0, false,
            fmt::format("the loss of {} is {}, and no operator that can be observed has made it.",
                        name_of(index), loss)};
}

std::string StepWatch::agree() {
  auto& group = engine_.group();
  // A rank tells this to the others. Comparing the members in order finds the earliest.
  struct Told {
    int64_t nothing = 1;
    int64_t micro_batch = 0;
    int64_t backward = 0;
    int64_t order = 0;
    int64_t length = 0;  // of the text
    int64_t absent = 0;  // a parameter must be checked
    auto when() const { return std::tuple(nothing, micro_batch, backward, order); }
  };
  Told mine;
  if (found_) {
    mine = {.nothing = 0,
            .micro_batch = found_->micro_batch,
            .backward = found_->backward ? 1 : 0,
            .order = found_->order,
            .length = static_cast<int64_t>(found_->text.size()),
            .absent = found_->absent ? 1 : 0};
  }
  const auto all = comm::gather_records(group, mine, "numbers that are not finite");
  const auto first = std::ranges::min_element(all, {}, &Told::when);
  if (first->nothing != 0) return "";
  const auto rank = static_cast<size_t>(first - all.begin());
  std::string text(static_cast<size_t>(first->length), ' ');
  if (group.rank() == static_cast<int>(rank)) text = found_->text;
  const auto texts = comm::gather_arrays<char>(group, text, "what is not finite");
  const auto theirs = texts.begin() + static_cast<ptrdiff_t>(rank * text.size());
  auto result = fmt::format("First on rank {}, {}, {}", rank, name_of(first->micro_batch),
                            std::string(theirs, theirs + first->length));
  if (first->absent != 0 && !engine_.config().update_in_backward) {
    const auto damaged =
        first_not_finite(names_, [&](const std::string& name) { return engine_.parameter(name); });
    if (!damaged.empty()) result += fmt::format(" Parameter {}.", damaged);
  }
  return result;
}

std::string StepWatch::check_sums() {
  const auto overflowed =
      first_not_finite(trainable_, [&](const std::string& name) { return engine_.gradient(name); });
  if (overflowed.empty()) return "";
  return fmt::format(
      "Every rank's gradients were finite as they came, but their sum over ranks and micro-batches "
      "is not: that of parameter {}. The sum overflowed.",
      overflowed);
}

}  // namespace zero
