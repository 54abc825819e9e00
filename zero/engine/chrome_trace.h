// Spans in the trace event format, which Perfetto and Chrome read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zero/base/timeline.h"

namespace zero {

/// One rank's part of a trace.
struct RankSpans {
  int rank = 0;
  int64_t clock = 0;  ///< nanoseconds that its clock is ahead of rank 0's
  std::vector<Span> spans;
};

/// A process for each rank, with rows for its computation (phases, in them operators and waits),
/// gathers, reductions, updates, reads and writes of a disk, and control. Spans of a row that are
/// under way at once are on as many lines. Times are microseconds from the first span on.
std::string chrome_trace(const std::vector<RankSpans>& ranks, int64_t dropped = 0);

}  // namespace zero
