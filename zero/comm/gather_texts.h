// Texts that all ranks exchange.
#pragma once

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "zero/comm/gather_records.h"

namespace zero::comm {

/// Returns every rank's text, in rank order. Collective; blocks. Counts as control.
inline std::vector<std::string> gather_texts(Group& group, const std::string& mine,
                                             std::string_view label) {
  const auto lengths = gather_records(group, static_cast<int64_t>(mine.size()), label);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> texts(lengths.size(), mine);
  if (group.size() == 1 || longest == 0) return texts;
  const auto input = at::zeros({longest}, at::kByte);
  const auto output = at::empty({longest * group.size()}, at::kByte);
  std::memcpy(input.data_ptr(), mine.data(), mine.size());
  group.all_gather_control(output, input, label);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank].assign(
        static_cast<const char*>(output.const_data_ptr()) + static_cast<int64_t>(rank) * longest,
        static_cast<size_t>(lengths[rank]));
  }
  return texts;
}

}  // namespace zero::comm
