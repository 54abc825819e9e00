// Small records that all ranks exchange, for reports and agreements.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "zero/comm/group.h"

namespace zero::comm {

/// Returns every rank's `mine`, which has as many records on each, one after the other in rank
/// order. Collective; blocks. Its bytes count as control; in a group of one there are none.
template <class Record>
std::vector<Record> gather_arrays(Group& group, std::span<const Record> mine,
                                  std::string_view label) {
  static_assert(std::is_trivially_copyable_v<Record>);
  if (group.size() == 1 || mine.empty()) return {mine.begin(), mine.end()};
  const auto size = static_cast<int64_t>(mine.size_bytes());
  const auto input = at::empty({size}, at::kByte);
  const auto output = at::empty({size * group.size()}, at::kByte);
  std::memcpy(input.data_ptr(), mine.data(), mine.size_bytes());
  group.all_gather_control(output, input, label);
  std::vector<Record> all(mine.size() * static_cast<size_t>(group.size()));
  std::memcpy(all.data(), output.data_ptr(), static_cast<size_t>(output.numel()));
  return all;
}

/// Does the same for one record of each rank.
template <class Record>
std::vector<Record> gather_records(Group& group, const Record& mine, std::string_view label) {
  return gather_arrays(group, std::span(&mine, 1), label);
}

/// Returns, for each flag of `mine`, whether any rank has set it. Collective; blocks.
inline std::vector<uint8_t> flags_of_any_rank(Group& group, std::vector<uint8_t> mine,
                                              std::string_view label) {
  const auto all = gather_arrays<uint8_t>(group, mine, label);
  for (size_t i = 0; i < all.size(); ++i) mine[i % mine.size()] |= all[i];
  return mine;
}

/// Returns the first rank that says `failed`, if one does. Collective; blocks.
inline std::optional<int> first_failure(Group& group, bool failed, std::string_view label) {
  const auto all = gather_records(group, static_cast<uint8_t>(failed), label);
  const auto found = std::find(all.begin(), all.end(), uint8_t{1});
  if (found == all.end()) return std::nullopt;
  return static_cast<int>(found - all.begin());
}

/// Returns whether any rank says `yes`. Collective; blocks.
inline bool any_rank(Group& group, bool yes, std::string_view label) {
  return first_failure(group, yes, label).has_value();
}

}  // namespace zero::comm
