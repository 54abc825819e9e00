// Texts that all ranks exchange.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zero/comm/gather_records.h"

namespace zero::comm {

/// Returns every rank's text, in rank order. Collective; blocks. Counts as control.
inline std::vector<std::string> gather_texts(Group& group, const std::string& mine,
                                             std::string_view label) {
  const auto lengths = gather_records(group, static_cast<int64_t>(mine.size()), label);
  auto padded = mine;
  padded.resize(static_cast<size_t>(*std::max_element(lengths.begin(), lengths.end())));
  const auto all = gather_arrays<char>(group, padded, label);
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < lengths.size(); ++rank) {
    const auto begin = all.begin() + static_cast<ptrdiff_t>(rank * padded.size());
    texts.emplace_back(begin, begin + lengths[rank]);
  }
  return texts;
}

}  // namespace zero::comm
