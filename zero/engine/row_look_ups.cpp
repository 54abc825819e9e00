#include "zero/engine/row_look_ups.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "zero/comm/gather_records.h"
#include "zero/comm/group.h"
#include "zero/engine/look_ups.h"

namespace zero {

std::optional<std::vector<int64_t>> agree_on_rows(comm::Group& group, int64_t count,
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
  for (size_t rank = 0; rank * sent.size() < all.size(); ++rank) {
    const auto* from = &all[rank * sent.size()];
    if (from[0] == 0 || std::memcmp(from + 1, &all[1], sizeof(order)) != 0) return {};
    for (size_t i = kHead; i < sent.size(); ++i) sent[i] |= from[i];
  }
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < count; ++row) {
    if ((sent[kHead + static_cast<size_t>(row / 8)] >> (row % 8) & 1) != 0) rows.push_back(row);
  }
  return rows;
}

RowShares::RowShares(const partition::Layout& layout, int64_t unit,
                     const std::vector<int64_t>& rows, int64_t columns)
    : of_owner(static_cast<size_t>(layout.shards())) {
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
  few = kLookUpShare * layout.shards() * message <= layout.unit(unit).numel;
}

void RowLookUps::expect(int64_t parameter, int64_t columns) {
  of_last_step_ = std::exchange(of_step_, {});
  asked_ = -1;
  if (parameter < 0) return;
  const int64_t unit = table_.layout().unit_of(parameter);
  const auto& plan = table_.plan(unit);
  if (table_.transfer_bytes(unit, State::parameters) > 0 || plan.comes_up() ||
      plan.parameter_link.quantised() || !table_.device().is_cpu() ||
      table_.layout().unit(unit).segments.size() != 1)
    return;
  asked_ = unit_ = unit;
  columns_ = columns;
}

at::Tensor RowLookUps::look_up(const paging::UnitSource::LookUp& mine) {
  asked_ = -1;
  const auto& layout = table_.layout();
  const auto& label = table_.label(unit_);
  const int64_t count = layout.unit(unit_).content / columns_;
  const auto& given = mine.indices;
  const bool wanted = given.defined() && given.scalar_type() == at::kLong && given.is_cpu();
  const auto indices = wanted ? given : at::Tensor();
  const auto rows = agree_on_rows(table_.group(), count, indices, mine.order, label);
  if (!rows) return {};
  const RowShares shares(layout, unit_, *rows, columns_);
  if (!shares.few) return {};
  mine.meanwhile();
  auto shape = indices.sizes().vec();
  shape.push_back(columns_);
  auto result = at::empty(shape, table_.memory(unit_, State::parameters).options());
  fetch(*rows, shares, indices.reshape({-1}), result.data_ptr());
  return result;
}

// Writes a row to `to` (tokens, C) for each of the tokens (tokens). Collective.
void RowLookUps::fetch(const std::vector<int64_t>& rows, const RowShares& shares,
                       const at::Tensor& tokens, void* to) {
  const auto& layout = table_.layout();
  auto& group = table_.group();
  const auto& slice = table_.memory(unit_, State::parameters);
  const int64_t element = slice.element_size();
  const int64_t slice_begin = layout.slice(unit_, group.rank()).begin;
  // They take the place of the weight, of which each is an eighth at most.
  const auto array = [&](int64_t numel) {
    return group.empty(numel, slice.scalar_type(), Category::gathered_units);
  };
  const auto mine = array(shares.message).zero_();
  const auto all = array(layout.shards() * shares.message);
  // Calls `f` with the part of each of the owner's rows that lies in its slice.
  const auto for_each = [&](int owner, const auto& f) {
    int64_t place = 0;
    for (const int64_t position : shares.of_owner[static_cast<size_t>(owner)]) {
      const int64_t begin = rows[static_cast<size_t>(position)] * columns_;
      const auto part = partition::intersect({begin, begin + columns_}, layout.slice(unit_, owner));
      f(place + part.begin - begin, part, position);
      place += columns_;
    }
  };
  const auto copy = [&](void* destination, int64_t at, const at::Tensor& source, int64_t from,
                        int64_t numel) {
    std::memcpy(static_cast<std::byte*>(destination) + at * element,
                static_cast<const std::byte*>(source.const_data_ptr()) + from * element,
                static_cast<size_t>(numel * element));
  };
  for_each(group.rank(), [&](int64_t in_message, partition::Range part, int64_t /*position*/) {
    copy(mine.data_ptr(), in_message, slice, part.begin - slice_begin, part.size());
  });
  if (shares.message > 0) group.all_gather(all, mine, table_.label(unit_)).wait();
  of_step_ = {.unit = unit_, .numel = all.numel()};

  const auto token = tokens.contiguous();
  std::vector<std::vector<int64_t>> tokens_of(rows.size());  // the places of each row in `to`
  for (int64_t i = 0; i < token.numel(); ++i) {
    const auto row = std::ranges::lower_bound(rows, token.const_data_ptr<int64_t>()[i]);
    tokens_of[static_cast<size_t>(row - rows.begin())].push_back(i);
  }
  for (int owner = 0; owner < layout.shards(); ++owner) {
    for_each(owner, [&](int64_t in_message, partition::Range part, int64_t position) {
      const size_t row = static_cast<size_t>(position);
      for (const int64_t i : tokens_of[row]) {
        const int64_t at = i * columns_ + part.begin - rows[row] * columns_;
        copy(to, at, all, owner * shares.message + in_message, part.size());
      }
    });
  }
}

}  // namespace zero
