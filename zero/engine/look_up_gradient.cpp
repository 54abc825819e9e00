#include "zero/engine/look_up_gradient.h"

#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"

namespace zero {

namespace {

constexpr int64_t kLookUps = -1;  // Reduction::begin of the message of the look-ups

}  // namespace

LookUpGradient::LookUpGradient(const ReductionContext& context, const SumsByTier& sums,
                               ReductionQueue& under_way, std::function<void(int64_t unit)> starts,
                               int64_t parameter)
    : GradientSums(context, false),
      sums_(sums),
      under_way_(under_way),
      starts_(std::move(starts)),
      parameter_(parameter),
      unit_(context.layout.unit_of(parameter)) {}

bool LookUpGradient::suits(const ReductionContext& context, int64_t parameter) {
  const int64_t unit = context.layout.unit_of(parameter);
  const auto& plan = context.table.plan(unit);
  const auto& settings = context.settings;
  const bool as_they_are = plan.gradients.sends_as_made(plan.dtype) && settings.predivisor == 1;
  return context.placement.all->topology().hosts > 1 && context.replicas() == nullptr &&
         !context.side && as_they_are && !settings.hands_over && !settings.doubled &&
         plan.gradients_at == Tier::device && context.layout.unit(unit).segments.size() == 1;
}

bool LookUpGradient::announce_rows(const at::Tensor& indices) {
  if (tied_.size() < 2) tied_.push_back(indices);
  return expected_ == LookUpUse::tied;
}

c10::intrusive_ptr<AnnouncedLookUp> LookUpGradient::announce_look_up(const at::Tensor& indices) {
  if (look_ups_.size() >= many_look_ups_) {
    drop_old_look_ups();
    many_look_ups_ = std::max(kManyLookUps, 2 * look_ups_.size());
  }
  auto announced = c10::make_intrusive<AnnouncedLookUp>(indices);
  look_ups_.emplace_back(announced);
  return announced;
}

// Forgets those that have given their gradient, or never will, since their graph is gone.
void LookUpGradient::drop_old_look_ups() {
  std::erase_if(look_ups_, [](const auto& each) {
    const auto announced = each.lock();
    return !announced || announced->given;
  });
}

// Returns the look-up of the pass if there is one alone, with LookUpUse::none if not. A look-up
// whose backward function runs in a later pass counts, too.
LookUpGradient::LookUp LookUpGradient::only_look_up(const GradientReduction::Pass& pass) {
  drop_old_look_ups();
  const auto tied = std::exchange(tied_, {});
  const bool shown = shows_gradient(context_.arrivals.parameter(parameter_));  // since forward
  if (pass.layer_major || shown || tied.size() + look_ups_.size() != 1) return {};
  if (!tied.empty()) {
    if (!pass.last || !pass.from_start) return {};
    return {.use = LookUpUse::tied, .indices = tied.front()};
  }
  const auto announced = look_ups_.front().lock();
  if (!announced) return {};
  return {LookUpUse::alone, announced->indices, announced.get()};
}

void LookUpGradient::returns_whole(const at::Tensor& gradient) {
  if (announced_use_ == LookUpUse::none) return;
  returned_ = gradient.const_data_ptr();
  returned_version_ = gradient._version();
}

void LookUpGradient::brought(const at::Tensor& gradient) {
  if (announced_use_ == LookUpUse::none) return;
  // Autograd adds another gradient to it in place, or to a copy.
  as_announced_ = !pass_ && gradient.const_data_ptr() == std::exchange(returned_, nullptr) &&
                  gradient._version() == returned_version_;
}

bool LookUpGradient::begin_pass(const GradientReduction::Pass& pass, bool has_sum) {
  if (pass_) under_way_.complete();
  pass_.reset();
  const auto mine = only_look_up(pass);
  announced_use_ = mine.use;
  as_announced_ = false;
  returned_ = nullptr;
  if (pass.layer_major) return false;
  if (expected_ == LookUpUse::none || (expected_ == LookUpUse::tied && !pass.last)) return false;
  const at::NoGradGuard no_grad;
  const auto& shape = context_.arrivals.parameter(parameter_);
  const auto agreed =
      agree_on_rows(*context_.placement.all, shape.size(0),
                    mine.use == expected_ ? mine.indices : at::Tensor(), 0, "rows of look-ups");
  if (!agreed) return false;
  const int64_t columns = shape.size(1);
  if (has_sum) under_way_.complete();  // that sum of an earlier pass
  Pass begun{.use = expected_,
             .announced = mine.announced,
             .shares = RowShares(context_.layout, unit_, agreed->rows, columns)};
  if (!are_few(begun.shares.all(), context_.layout.unit(unit_).numel)) return false;
  begun.accumulates = has_sum;
  begun.rows = at::tensor(agreed->rows, at::kLong);
  const int64_t rows = begun.rows.numel();
  begun.values =
      array(rows * columns, context_.table.plan(unit_).dtype).zero_().view({rows, columns});
  begun.taken = expected_ == LookUpUse::alone;
  const int64_t tokens = mine.indices.numel();
  const int64_t pieces = numel(unit_) / (kTileRows * columns) + 1;
  begun.under_way =
      static_cast<size_t>(std::max<int64_t>(1, pieces * (columns - tokens) / columns));
  pass_ = std::move(begun);
  return true;
}

// Returns memory for a part of the gradient, in the ledger.
at::Tensor LookUpGradient::array(int64_t numel, at::ScalarType dtype) const {
  return context_.placement.shards->empty(numel, dtype, Category::gradient_buckets);
}

void LookUpGradient::take(const Make& make) {
  if (pass_->taken) {
    throw Error("Two output projections gave the gradient of " + context_.label(unit_) +
                " in tiles in one pass. Leave LinearCrossEntropyOptions::weight_in_backward off.");
  }
  reduce_pieces(make, true);
}

void LookUpGradient::take_left_over() {
  if (first()) reduce_pieces([](int64_t, const at::Tensor& tile) { tile.zero_(); }, false);
}

void LookUpGradient::reduce_pieces(const Make& make, bool sets_apart) {
  auto& pass = *pass_;
  const int64_t slice = numel(unit_);
  const int64_t tile = kTileRows * pass.shares.columns;
  const int64_t owners = context_.layout.shards();
  starts_(unit_);
  for (int64_t begin = 0; begin < slice; begin += tile) {
    const int64_t size = std::min(tile, slice - begin);
    const auto piece = array(owners * size, pass.values.scalar_type());
    for (int64_t owner = 0; owner < owners; ++owner)
      fill(piece.narrow(0, owner * size, size), owner * slice + begin, make, sets_apart);
    start({.unit = unit_, .begin = begin, .bucket = Bucket{.array = piece, .pooled = false}},
          pass.under_way);
  }
  pass.taken = true;
}

// Writes the unit's elements from `begin` on.
void LookUpGradient::fill(const at::Tensor& to, int64_t begin, const Make& make, bool sets_apart) {
  const int64_t columns = pass_->shares.columns;
  const int64_t whole = kTileRows * columns;
  const int64_t content = context_.layout.unit(unit_).content;
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
      tile = {.values = array(numel_of_tile, to.scalar_type()), .left = numel_of_tile};
      make_tile(tile.values.view({-1, columns}), first / columns, make, sets_apart);
    }
    part.copy_(tile.values.narrow(0, from, size));
    tile.left -= size;
    if (tile.left == 0) pass_->tiles.erase(number);
  }
  if (done < to.numel()) to.narrow(0, done, to.numel() - done).zero_();
}

// Makes the tile of the rows from `begin` on, and sets its values of rows that are looked up apart.
void LookUpGradient::make_tile(const at::Tensor& tile, int64_t begin, const Make& make,
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

void LookUpGradient::start(Reduction reduction, size_t newest) {
  reduction.sums = this;
  reduction.accumulates = pass_->accumulates;
  prepare(reduction);
  under_way_.start(std::move(reduction), false, {});
  under_way_.advance(newest);
}

bool LookUpGradient::takes(const AnnouncedLookUp& look_up) const {
  return pass_->announced == &look_up && !look_up.given;
}

void LookUpGradient::add_rows(const at::Tensor& indices, const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  auto& pass = *pass_;
  const auto positions =
      at::searchsorted(pass.rows, indices).clamp_max_(std::max<int64_t>(0, pass.rows.numel() - 1));
  if (indices.numel() > 0 && !at::equal(pass.rows.index_select(0, positions), indices)) {
    throw Error(
        "The rows that a look-up in " + context_.label(unit_) +
        " gives a gradient to are others than it announced in forward: the tensor of its indices "
        "was changed before backward.");
  }
  if (pass.use == LookUpUse::alone) {  // the operator that makes the whole gradient
    pass.values.copy_(
        at::embedding_dense_backward(rows, positions, pass.values.size(0), -1, false));
  } else {
    pass.values.index_add_(0, positions, rows);
  }
  context_.presence.note(parameter_);
  as_announced_ = pass.taken;
}

void LookUpGradient::end_pass() {
  if (!pass_) return;
  const at::NoGradGuard no_grad;
  auto& pass = *pass_;
  const bool by_rows = pass.use == LookUpUse::alone;
  if (by_rows) begin_sum();
  of_step_.unit = unit_;
  of_step_.replaces += by_rows ? 1 : 0;
  if (pass.shares.message == 0) return;
  const auto owners = static_cast<int64_t>(pass.shares.of_owner.size());
  const auto message = array(owners * pass.shares.message, pass.values.scalar_type()).zero_();
  for (int64_t owner = 0; owner < owners; ++owner) {
    const auto& positions = pass.shares.of_owner[static_cast<size_t>(owner)];
    const auto count = static_cast<int64_t>(positions.size());
    message.narrow(0, owner * pass.shares.message, count * pass.shares.columns)
        .view({count, pass.shares.columns})
        .copy_(pass.values.index_select(0, at::tensor(positions, at::kLong)));
  }
  of_step_.numel += message.numel();
  start({.unit = unit_, .begin = kLookUps, .bucket = Bucket{.array = message, .pooled = false}}, 1);
}

ExpectedLookUp LookUpGradient::expected() const {
  return {parameter_, context_.arrivals.parameter(parameter_).size(1), expected_};
}

void LookUpGradient::begin_step(bool completed) {
  pass_.reset();
  of_last_step_ = completed ? of_step_ : RowMessages{};
  of_step_ = {};
}

void LookUpGradient::prepare(Reduction& reduction) {
  const int64_t owners = context_.layout.shards();
  const int64_t size = reduction.bucket.array.numel() / owners;
  const auto sum = sums_.of(reduction.unit).make(reduction.unit);
  if (reduction.accumulates || reduction.begin == kLookUps) {
    const auto dtype = context_.gradient_form(reduction.unit).sum_dtype(!reduction.accumulates);
    reduction.output = array(size, dtype);
  } else {
    reduction.output = sum.narrow(0, reduction.begin, size);
  }
}

void LookUpGradient::store_or_add(Reduction reduction) {
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

void LookUpGradient::drop(Reduction reduction) { give_bucket(reduction); }

// Calls `f` with the place of each of this rank's rows in the message and in its slice.
void LookUpGradient::for_each_own_row(
    const std::function<void(int64_t in_message, int64_t in_slice, int64_t numel)>& f) const {
  const int rank = context_.placement.shards->rank();
  const int64_t slice_begin = pass_->shares.slices[static_cast<size_t>(rank)].begin;
  pass_->shares.for_each(rank, [&](partition::Range part, int64_t in_message, int64_t) {
    f(in_message, part.begin - slice_begin, part.size());
  });
}

// Makes the sum that a whole gradient of zeros would have made.
void LookUpGradient::begin_sum() {
  auto sum = sums_.of(unit_).make(unit_);
  if (!pass_->accumulates) {
    sum.zero_();
    return;
  }
  keep_earlier_sums();
  sum.add_(0);  // -0 becomes 0
}

void LookUpGradient::keep_earlier_sums() {
  if (pass_->kept.defined()) return;
  const auto& sum = cell(unit_);
  pass_->kept = array(pass_->shares.message, sum.scalar_type()).zero_();
  for_each_own_row([&](int64_t in_message, int64_t in_slice, int64_t size) {
    pass_->kept.narrow(0, in_message, size).copy_(sum.narrow(0, in_slice, size));
  });
}

LookUpGradient* LookUpGradients::made(int64_t parameter, const at::Tensor& indices) {
  if (indices.scalar_type() != at::kLong || !LookUpGradient::suits(context_, parameter))
    return nullptr;
  const auto place =
      all_.try_emplace(parameter, context_, sums_, under_way_, starts_, parameter).first;
  return &place->second;
}

bool LookUpGradients::announce_rows(int64_t parameter, const at::Tensor& indices) {
  auto* gradient = made(parameter, indices);
  return gradient != nullptr && gradient->announce_rows(indices);
}

c10::intrusive_ptr<AnnouncedLookUp> LookUpGradients::announce_look_up(int64_t parameter,
                                                                      const at::Tensor& indices) {
  auto* gradient = made(parameter, indices);
  if (gradient == nullptr) return {};
  return gradient->announce_look_up(indices);
}

LookUpGradient* LookUpGradients::find(int64_t parameter) {
  const auto found = all_.find(parameter);
  return found != all_.end() ? &found->second : nullptr;
}

void LookUpGradients::returns_whole(int64_t parameter, const at::Tensor& gradient) {
  if (auto* found = find(parameter)) found->returns_whole(gradient);
}

void LookUpGradients::brought(int64_t parameter, const at::Tensor& gradient) {
  if (auto* found = find(parameter)) found->brought(gradient);
}

std::vector<RowMessages> LookUpGradients::messages() const {
  std::vector<RowMessages> messages;
  for (const auto& [parameter, gradient] : all_) {
    if (gradient.messages().unit >= 0) messages.push_back(gradient.messages());
  }
  return messages;
}

std::vector<int64_t> LookUpGradients::begin_pass(const GradientReduction::Pass& pass,
                                                 const std::function<bool(int64_t unit)>& has_sum) {
  std::vector<int64_t> units;
  for (auto& [parameter, gradient] : all_) {
    const int64_t unit = context_.layout.unit_of(parameter);
    if (gradient.begin_pass(pass, has_sum(unit))) units.push_back(unit);
  }
  return units;
}

bool LookUpGradients::first() const {
  return std::ranges::any_of(all_, [](const auto& each) { return each.second.first(); });
}

bool LookUpGradients::has(int64_t unit) const {
  return std::ranges::any_of(all_, [&](const auto& each) {
    return each.second.in_pass() && context_.layout.unit_of(each.first) == unit;
  });
}

void LookUpGradients::take_left_over() {
  for (auto& [parameter, gradient] : all_) gradient.take_left_over();
}

void LookUpGradients::end_pass() {
  for (auto& [parameter, gradient] : all_) gradient.end_pass();
}

void LookUpGradients::drop_pass() {
  for (auto& [parameter, gradient] : all_) gradient.drop_pass();
}

GradientTaker* LookUpGradients::taker(int64_t parameter) {
  auto* found = find(parameter);
  return found != nullptr && found->in_pass() ? found : nullptr;
}

void LookUpGradients::report(std::vector<LookUpUse>& uses) const {
  for (const auto& [parameter, gradient] : all_)
    uses[static_cast<size_t>(parameter)] = gradient.possible();
}

void LookUpGradients::expect(const std::vector<LookUpUse>& uses) {
  for (auto& [parameter, gradient] : all_) gradient.expect(uses[static_cast<size_t>(parameter)]);
}

std::vector<ExpectedLookUp> LookUpGradients::expected() const {
  std::vector<ExpectedLookUp> expected;
  for (const auto& [parameter, gradient] : all_) {
    if (gradient.expected().use != LookUpUse::none) expected.push_back(gradient.expected());
  }
  return expected;
}

void LookUpGradients::begin_step(bool completed) {
  for (auto& [parameter, gradient] : all_) gradient.begin_step(completed);
}

}  // namespace zero
