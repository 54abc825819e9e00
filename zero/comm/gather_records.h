// A small record of every rank, for reports.
#pragma once

#include <ATen/ops/empty.h>

#include <cstring>
#include <string_view>
#include <type_traits>
#include <vector>

#include "zero/comm/group.h"

namespace zero::comm {

/// Every rank's `mine`, in rank order. Counted as control. Blocks. Collective.
template <class Record>
std::vector<Record> gather_records(Group& group, const Record& mine, std::string_view label) {
  static_assert(std::is_trivially_copyable_v<Record>);
  const auto size = static_cast<int64_t>(sizeof(Record));
  const auto input = at::empty({size}, at::kByte);
  const auto output = at::empty({size * group.size()}, at::kByte);
  std::memcpy(input.data_ptr(), &mine, sizeof(Record));
  group.all_gather_control(output, input, label);
  std::vector<Record> all(static_cast<size_t>(group.size()));
  std::memcpy(all.data(), output.data_ptr(), static_cast<size_t>(output.numel()));
  return all;
}

}  // namespace zero::comm
