#include "zero/engine/row_look_ups.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "zero/comm/gather_records.h"
#include "zero/comm/group.h"
#include "zero/engine/look_ups.h"

namespace zero {

using Asks = paging::UnitSource::Asks;

std::optional<AgreedRows> agree_on_rows(comm::Group& group, int64_t count,
                                        const at::Tensor& indices, uint64_t order,
                                        std::string_view label) {
  constexpr size_t kHead = 1 + sizeof(order);  // whether there are rows, and the order
  std::vector<uint8_t> sent(kHead + static_cast<size_t>((count + 7) / 8), 0);
  std::memcpy(&sent[1], &order, sizeof(order));
  const auto flat = indices.defined() ? indices.reshape({-1}).contiguous() : at::Tensor();
  const auto looked_up =
      flat.defined() ? std::span(flat.const_data_ptr<int64_t>(), static_cast<size_t>(flat.numel()))
                     : std::span<const int64_t>();
  // The model has looked these up, or will, but their tensor may have been changed since then.
  const bool valid =
      std::ranges::all_of(looked_up, [&](int64_t row) { return row >= 0 && row < count; });
  sent[0] = flat.defined() && valid ? 1 : 0;
  for (const int64_t row : valid ? looked_up : std::span<const int64_t>())
    sent[kHead + static_cast<size_t>(row / 8)] |= static_cast<uint8_t>(1U << (row % 8));
  const auto all = comm::gather_arrays<uint8_t>(group, sent, label);
  AgreedRows agreed;
  for (size_t rank = 0; rank * sent.size() < all.size(); ++rank) {
    const auto* from = &all[rank * sent.size()];
    if (from[0] == 0) return {};
    agreed.same_order &= std::memcmp(from + 1, &all[1], sizeof(order)) == 0;
    for (size_t i = kHead; i < sent.size(); ++i) sent[i] |= from[i];
  }
  for (int64_t row = 0; row < count; ++row) {
    if ((sent[kHead + static_cast<size_t>(row / 8)] >> (row % 8) & 1) != 0)
      agreed.rows.push_back(row);
  }
  return agreed;
}

RowShares::RowShares(const partition::Layout& layout, int64_t unit, std::vector<int64_t> those,
                     int64_t width)
    : rows(std::move(those)), columns(width), of_owner(static_cast<size_t>(layout.shards())) {
  const int64_t slice = layout.slice_numel(unit);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t begin = rows[i] * columns;
    for (int64_t owner = begin / slice; owner <= (begin + columns - 1) / slice; ++owner)
      of_owner[static_cast<size_t>(owner)].push_back(static_cast<int64_t>(i));
  }
  size_t most = 0;
  for (const auto& each : of_owner) most = std::max(most, each.size());
  using partition::kAlignment;
  message = (static_cast<int64_t>(most) * columns + kAlignment - 1) / kAlignment * kAlignment;
  for (int owner = 0; owner < layout.shards(); ++owner) slices.push_back(layout.slice(unit, owner));
}

void RowShares::for_each(int owner,
                         const std::function<void(partition::Range part, int64_t in_message,
                                                  int64_t position)>& f) const {
  int64_t place = 0;
  for (const int64_t position : of_owner[static_cast<size_t>(owner)]) {
    const int64_t begin = rows[static_cast<size_t>(position)] * columns;
    const auto part =
        partition::intersect({begin, begin + columns}, slices[static_cast<size_t>(owner)]);
    f(part, place + part.begin - begin, position);
    place += columns;
  }
}

RowLookUps::RowLookUps(StateTable& table)
    : table_(table), asks_(static_cast<size_t>(table.layout().unit_count())) {}

bool RowLookUps::suits(int64_t unit) const {
  const auto& plan = table_.plan(unit);
  return table_.transfer_bytes(unit, State::parameters) == 0 && !plan.comes_up() &&
         !plan.parameter_link.quantised() && table_.device().is_cpu() &&
         table_.layout().unit(unit).segments.size() == 1;
}

void RowLookUps::expect(const std::vector<ExpectedLookUp>& expected) {
  of_last_step_.clear();
  for (const auto& [unit, found] : units_) {
    if (found.of_step.unit >= 0) of_last_step_.push_back(found.of_step);
  }
  units_.clear();
  for (auto& asks : asks_) asks = Asks::never;
  const bool tied = std::ranges::any_of(
      expected, [](const ExpectedLookUp& each) { return each.use == LookUpUse::tied; });
  for (const auto& each : expected) {
    const int64_t unit = table_.layout().unit_of(each.parameter);
    const bool is_tied = each.use == LookUpUse::tied;
    if (is_tied != tied || !suits(unit)) continue;
    asks_[static_cast<size_t>(unit)] = tied ? Asks::once : Asks::always;
    units_[unit] = {.columns = each.columns};
  }
}

Asks RowLookUps::asks(int64_t unit) const { return asks_[static_cast<size_t>(unit)]; }

at::Tensor RowLookUps::look_up(int64_t unit, const paging::UnitSource::LookUp& mine,
                               const std::function<void()>& up_to_date) {
  auto& asks = asks_[static_cast<size_t>(unit)];
  const bool once = asks == Asks::once;
  if (once) asks = Asks::never;
  const auto& layout = table_.layout();
  auto& [columns, of_step] = units_.at(unit);
  const int64_t count = layout.unit(unit).content / columns;
  const auto& given = mine.indices;
  const bool wanted = given.defined() && given.scalar_type() == at::kLong && given.is_cpu();
  const auto indices = wanted ? given : at::Tensor();
  const auto agreed = agree_on_rows(table_.group(), count, indices, mine.order, table_.label(unit));
  if (!agreed || (once && !agreed->same_order)) return {};
  const RowShares shares(layout, unit, agreed->rows, columns);
  if (!are_few(of_step.numel + shares.all(), layout.unit(unit).numel)) return {};
  if (agreed->same_order) mine.meanwhile();
  up_to_date();
  auto shape = indices.sizes().vec();
  shape.push_back(columns);
  auto result = at::empty(shape, table_.memory(unit, State::parameters).options());
  fetch(unit, shares, indices.reshape({-1}), result.data_ptr());
  of_step = {.unit = unit,
             .numel = of_step.numel + shares.all(),
             .replaces = of_step.replaces + (once ? 0 : 1)};
  return result;
}

// Writes a row to `to` (tokens, C) for each of the tokens (tokens). Collective.
void RowLookUps::fetch(int64_t unit, const RowShares& shares, const at::Tensor& tokens, void* to) {
  auto& group = table_.group();
  const auto& slice = table_.memory(unit, State::parameters);
  const int64_t element = slice.element_size();
  const int64_t slice_begin = shares.slices[static_cast<size_t>(group.rank())].begin;
  // They take the place of the weight, of which each is an eighth at most.
  const auto array = [&](int64_t numel) {
    return group.empty(numel, slice.scalar_type(), Category::gathered_units);
  };
  const auto mine = array(shares.message).zero_();
  const auto all = array(shares.all());
  const auto copy = [&](void* destination, int64_t at, const at::Tensor& source, int64_t from,
                        int64_t numel) {
    std::memcpy(static_cast<std::byte*>(destination) + at * element,
                static_cast<const std::byte*>(source.const_data_ptr()) + from * element,
                static_cast<size_t>(numel * element));
  };
  shares.for_each(group.rank(), [&](partition::Range part, int64_t in_message, int64_t) {
    copy(mine.data_ptr(), in_message, slice, part.begin - slice_begin, part.size());
  });
  if (shares.message > 0) group.all_gather(all, mine, table_.label(unit)).wait();

  const auto token = tokens.contiguous();
  const auto row_of = [&](int64_t i) { return token.const_data_ptr<int64_t>()[i]; };
  std::vector<int64_t> places(static_cast<size_t>(token.numel()));  // in `to`, by their rows
  std::iota(places.begin(), places.end(), 0);
  std::ranges::sort(places, {}, row_of);
  for (int owner = 0; owner < group.size(); ++owner) {
    shares.for_each(owner, [&](partition::Range part, int64_t in_message, int64_t position) {
      const int64_t row = shares.rows[static_cast<size_t>(position)];
      for (const int64_t i : std::ranges::equal_range(places, row, {}, row_of)) {
        const int64_t at = i * shares.columns + part.begin - row * shares.columns;
        copy(to, at, all, owner * shares.message + in_message, part.size());
      }
    });
  }
}

}  // namespace zero
