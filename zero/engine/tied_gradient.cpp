#include "zero/engine/tied_gradient.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/engine/row_look_ups.h"

namespace zero {

namespace {

constexpr int64_t kLookUps = -1;  // Reduction::begin of the message of the look-ups

}  // namespace

TiedGradient::TiedGradient(const ReductionContext& context, const SumsByTier& sums,
                           ReductionQueue& under_way, std::function<void(int64_t unit)> starts)
    : GradientSums(context, false),
      sums_(sums),
      under_way_(under_way),
      starts_(std::move(starts)) {}

bool TiedGradient::suits(int64_t parameter) const {
  const int64_t unit = context_.layout.unit_of(parameter);
  const auto& plan = context_.table.plan(unit);
  const auto& settings = context_.settings;
  const bool as_they_are = plan.gradients.sends_as_made(plan.dtype) && settings.predivisor == 1;
  return context_.placement.all->topology().hosts > 1 && context_.replicas() == nullptr &&
         !context_.side && as_they_are && !settings.hands_over && !settings.doubled &&
         plan.gradients_at == Tier::device && context_.layout.unit(unit).segments.size() == 1;
}

bool TiedGradient::announce(int64_t parameter, const at::Tensor& indices) {
  if (!suits(parameter) || indices.scalar_type() != at::kLong) return false;
  if (announced_.size() < 2) announced_.push_back({parameter, indices});
  return parameter == expected_;
}

void TiedGradient::returns_whole(int64_t parameter, const at::Tensor& gradient) {
  if (parameter != candidate_) return;
  returned_ = gradient.const_data_ptr();
  returned_version_ = gradient._version();
}

void TiedGradient::brought(int64_t parameter, const at::Tensor& gradient) {
  if (parameter != candidate_) return;
  // Autograd adds another gradient to it in place, or to a copy.
  alone_ = !pass_ && gradient.const_data_ptr() == std::exchange(returned_, nullptr) &&
           gradient._version() == returned_version_;
}

std::optional<int64_t> TiedGradient::begin_pass(const GradientReduction::Pass& pass,
                                                const std::function<bool(int64_t unit)>& has_sum) {
  if (pass_) under_way_.complete();
  pass_.reset();
  const auto announced = std::exchange(announced_, {});
  candidate_ = -1;
  alone_ = false;
  returned_ = nullptr;
  if (!pass.last || pass.layer_major) return {};
  if (announced.size() == 1 && pass.from_start) candidate_ = announced.front().parameter;
  if (expected_ < 0) return {};
  const at::NoGradGuard no_grad;
  const auto& shape = context_.arrivals.parameter(expected_);
  const auto rows = agree_on_rows(
      *context_.placement.all, shape.size(0),
      candidate_ == expected_ ? announced.front().indices : at::Tensor(), 0, "rows of look-ups");
  if (!rows) return {};
  const int64_t unit = context_.layout.unit_of(expected_);
  Pass agreed{
      .parameter = expected_, .unit = unit, .columns = shape.size(1), .accumulates = has_sum(unit)};
  RowShares shares(context_.layout, unit, *rows, agreed.columns);
  if (!shares.few) return {};
  agreed.of_owner = std::move(shares.of_owner);
  agreed.message = shares.message;
  agreed.rows = at::tensor(*rows, at::kLong);
  agreed.values = at::zeros({static_cast<int64_t>(rows->size()), agreed.columns},
                            at::TensorOptions().dtype(context_.table.plan(unit).dtype));
  const int64_t tokens = announced.front().indices.numel();
  const int64_t pieces = numel(unit) / (kTileRows * agreed.columns) + 1;
  agreed.under_way = static_cast<size_t>(
      std::max<int64_t>(1, pieces * (agreed.columns - tokens) / agreed.columns));
  pass_ = std::move(agreed);
  return unit;
}

void TiedGradient::take(const Make& make) {
  if (pass_->taken) {
    throw Error("Two output projections gave the gradient of " + context_.label(pass_->unit) +
                " in tiles in one pass. Leave LinearCrossEntropyOptions::weight_in_backward off.");
  }
  reduce_pieces(make, true);
}

void TiedGradient::take_left_over() {
  if (first()) reduce_pieces([](int64_t, const at::Tensor& tile) { tile.zero_(); }, false);
}

void TiedGradient::reduce_pieces(const Make& make, bool sets_apart) {
  auto& pass = *pass_;
  const int64_t slice = numel(pass.unit);
  const int64_t tile = kTileRows * pass.columns;
  const int64_t owners = context_.layout.shards();
  starts_(pass.unit);
  for (int64_t begin = 0; begin < slice; begin += tile) {
    const int64_t size = std::min(tile, slice - begin);
    auto array = at::empty({owners * size}, pass.values.options());
    for (int64_t owner = 0; owner < owners; ++owner)
      fill(array.narrow(0, owner * size, size), owner * slice + begin, make, sets_apart);
    start({.unit = pass.unit, .begin = begin, .bucket = {.array = array, .pooled = false}},
          pass.under_way);
  }
  pass.taken = true;
}

// Writes the unit's elements from `begin` on.
void TiedGradient::fill(const at::Tensor& to, int64_t begin, const Make& make, bool sets_apart) {
  const int64_t columns = pass_->columns;
  const int64_t whole = kTileRows * columns;
  const int64_t content = context_.layout.unit(pass_->unit).content;
  int64_t done = 0;
  while (done < to.numel() && begin + done < content) {
    const int64_t number = (begin + done) / whole;
    const int64_t first = number * whole;
    const int64_t numel_of_tile = std::min(whole, content - first);
    const int64_t from = begin + done - first;
    const int64_t size = std::min(numel_of_tile - from, to.numel() - done);
    const auto part = to.narrow(0, done, size);
    done += size;
    if (size == numel_of_tile) {
      make_tile(part.view({-1, columns}), first / columns, make, sets_apart);
      continue;
    }
    auto& tile = pass_->tiles[number];
    if (!tile.values.defined()) {
      tile = {.values = at::empty({numel_of_tile}, to.options()), .left = numel_of_tile};
      make_tile(tile.values.view({-1, columns}), first / columns, make, sets_apart);
    }
    part.copy_(tile.values.narrow(0, from, size));
    tile.left -= size;
    if (tile.left == 0) pass_->tiles.erase(number);
  }
  if (done < to.numel()) to.narrow(0, done, to.numel() - done).zero_();
}

// Makes the tile of the rows from `begin` on, and sets its values of rows that are looked up apart.
void TiedGradient::make_tile(const at::Tensor& tile, int64_t begin, const Make& make,
                             bool sets_apart) {
  make(begin, tile);
  if (!sets_apart) return;
  const auto* rows = pass_->rows.const_data_ptr<int64_t>();
  const auto* end = rows + pass_->rows.numel();
  const auto first = std::lower_bound(rows, end, begin) - rows;
  const auto count = std::lower_bound(rows, end, begin + tile.size(0)) - rows - first;
  if (count == 0) return;
  pass_->values.narrow(0, first, count)
      .copy_(tile.index_select(0, pass_->rows.narrow(0, first, count) - begin));
}

void TiedGradient::start(Reduction reduction, size_t newest) {
  reduction.sums = this;
  reduction.accumulates = pass_->accumulates;
  prepare(reduction);
  under_way_.start(std::move(reduction), false, {});
  under_way_.advance(newest);
}

void TiedGradient::add_rows(const at::Tensor& indices, const at::Tensor& rows) {
  auto& pass = *pass_;
  const auto positions =
      at::searchsorted(pass.rows, indices).clamp_max_(std::max<int64_t>(0, pass.rows.numel() - 1));
  if (indices.numel() > 0 && !at::equal(pass.rows.index_select(0, positions), indices)) {
    throw Error(
        "The rows that a look-up in " + context_.label(pass.unit) +
        " gives a gradient to are others than it announced in forward: the tensor of its indices "
        "was changed before backward.");
  }
  pass.values.index_add_(0, positions, rows);
  context_.presence.note(pass.parameter);
  alone_ = pass.taken;
}

void TiedGradient::end_pass() {
  if (!pass_ || pass_->message == 0) return;
  auto& pass = *pass_;
  const auto owners = static_cast<int64_t>(pass.of_owner.size());
  auto array = at::zeros({owners * pass.message}, pass.values.options());
  for (int64_t owner = 0; owner < owners; ++owner) {
    const auto& positions = pass.of_owner[static_cast<size_t>(owner)];
    const auto count = static_cast<int64_t>(positions.size());
    array.narrow(0, owner * pass.message, count * pass.columns)
        .view({count, pass.columns})
        .copy_(pass.values.index_select(0, at::tensor(positions, at::kLong)));
  }
  of_step_ = {.unit = pass.unit, .numel = of_step_.numel + array.numel()};
  start({.unit = pass.unit, .begin = kLookUps, .bucket = {.array = array, .pooled = false}}, 1);
}

void TiedGradient::begin_step(bool completed) {
  pass_.reset();
  of_last_step_ = completed ? of_step_ : LookUpMessages{};
  of_step_ = {};
}

void TiedGradient::prepare(Reduction& reduction) {
  const int64_t owners = context_.layout.shards();
  const int64_t size = reduction.bucket.array.numel() / owners;
  const auto sum = sums_.of(reduction.unit).make(reduction.unit);
  if (reduction.accumulates || reduction.begin == kLookUps) {
    const auto dtype = context_.gradient_form(reduction.unit).sum_dtype(!reduction.accumulates);
    reduction.output = at::empty({size}, sum.options().dtype(dtype));
  } else {
    reduction.output = sum.narrow(0, reduction.begin, size);
  }
}

void TiedGradient::store_or_add(Reduction reduction) {
  const auto& sum = cell(reduction.unit);
  if (reduction.begin == kLookUps) {
    for_each_own_row([&](int64_t in_message, int64_t in_slice, int64_t size) {
      const auto to = sum.narrow(0, in_slice, size);
      const auto from = reduction.output.narrow(0, in_message, size);
      if (!reduction.accumulates) {
        to.copy_(from);
      } else {
        to.copy_(pass_->kept.narrow(0, in_message, size));
        add(to, from);
      }
    });
  } else if (reduction.accumulates) {
    keep_earlier_sums();
    add(sum.narrow(0, reduction.begin, reduction.output.numel()), reduction.output);
  }
  give_bucket(reduction);
}

void TiedGradient::drop(Reduction reduction) { give_bucket(reduction); }

// Calls `f` with the place of each of this rank's rows in the message and in its slice.
void TiedGradient::for_each_own_row(
    const std::function<void(int64_t in_message, int64_t in_slice, int64_t numel)>& f) const {
  const auto& pass = *pass_;
  const int rank = context_.placement.shards->rank();
  const auto owned = context_.layout.slice(pass.unit, rank);
  const auto* rows = pass.rows.const_data_ptr<int64_t>();
  int64_t place = 0;
  for (const int64_t position : pass.of_owner[static_cast<size_t>(rank)]) {
    const int64_t begin = rows[position] * pass.columns;
    const auto mine = partition::intersect({begin, begin + pass.columns}, owned);
    f(place + mine.begin - begin, mine.begin - owned.begin, mine.size());
    place += pass.columns;
  }
}

void TiedGradient::keep_earlier_sums() {
  if (pass_->kept.defined()) return;
  const auto& sum = cell(pass_->unit);
  pass_->kept = at::zeros({pass_->message}, sum.options());
  for_each_own_row([&](int64_t in_message, int64_t in_slice, int64_t size) {
    pass_->kept.narrow(0, in_message, size).copy_(sum.narrow(0, in_slice, size));
  });
}

}  // namespace zero
