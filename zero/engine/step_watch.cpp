#include "zero/engine/step_watch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <tuple>

namespace zero {

namespace {

std::string name_of(int64_t micro_batch) {
  return micro_batch > 0 ? fmt::format("micro-batch {}", micro_batch)
                         : "micro-batches that passed together";
}

// "NAME has ..." of the first whose values are not finite; empty if none.
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

// An infinity of the micro-batch before has led to nothing, and what the engine does between two is
// not of the model.
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
  // A rank tells the others whether it has something, when that was, how long its text is, and
  // whether a parameter is to be looked at.
  constexpr int64_t kNumbers = 6;
  auto mine = at::zeros({kNumbers}, at::kLong);
  if (found_) {
    const std::array<int64_t, kNumbers> numbers{1,
                                                found_->micro_batch,
                                                found_->backward ? 1 : 0,
                                                found_->order,
                                                static_cast<int64_t>(found_->text.size()),
                                                found_->absent ? 1 : 0};
    std::copy(numbers.begin(), numbers.end(), mine.mutable_data_ptr<int64_t>());
  }
  auto all = at::empty({kNumbers * group.size()}, at::kLong);
  group.all_gather_control(all, mine, "numbers that are not finite");
  const auto* numbers = all.const_data_ptr<int64_t>();
  const auto when = [&](int rank) {
    const auto* of = numbers + rank * kNumbers;
    return std::tuple(of[1], of[2], of[3], rank);
  };
  std::optional<int> first;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (numbers[rank * kNumbers] != 0 && (!first || when(rank) < when(*first))) first = rank;
  }
  if (!first) return "";
  const int64_t length = numbers[*first * kNumbers + 4];
  auto text = at::zeros({length}, at::kByte);
  auto* bytes = text.mutable_data_ptr<uint8_t>();
  if (group.rank() == *first) std::copy_n(found_->text.begin(), length, bytes);
  auto texts = at::empty({length * group.size()}, at::kByte);
  group.all_gather_control(texts, text, "what is not finite");
  const auto* theirs = texts.const_data_ptr<uint8_t>() + *first * length;
  auto result =
      fmt::format("First on rank {}, {}, {}", *first, name_of(numbers[*first * kNumbers + 1]),
                  std::string(theirs, theirs + length));
  if (numbers[*first * kNumbers + 5] != 0 && !engine_.config().update_in_backward) {
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
