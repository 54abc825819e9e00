// Spans in the trace event format, which Perfetto and Chrome read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/base/timeline.h"
#include "zero/comm/link_speed.h"

namespace zero {

/// One rank's part of a trace.
struct RankSpans {
  int rank = 0;
  int64_t clock = 0;  ///< nanoseconds that its clock is ahead of rank 0's
  std::vector<Span> spans;
};

/// Returns a trace with a process for each rank. A process has rows for computation (phases, with
/// operators and waits in them), gathers, reductions, updates, reads and writes of a disk, and
/// control. Spans of a row that overlap in time are on separate lines. Times are in microseconds
/// since the first span. `link` is shown with the trace, if it was measured.
std::string chrome_trace(const std::vector<RankSpans>& ranks, int64_t dropped = 0,
                         const std::optional<comm::LinkSpeed>& link = {});

}  // namespace zero
