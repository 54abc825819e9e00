// Measures work on this machine as the ranks of a run would do it: all of them at once.
#pragma once

#include <cstdint>
#include <functional>

namespace zero::plan {

/// Work that can be done again and again.
using Work = std::function<void()>;

/// Calls `prepare` on `ranks` threads (this thread is one of them), each of which has its share of
/// the cores for LibTorch's operators, but no more than at::get_num_threads() says, and times the
/// work that it returns on all of them at once. Returns the median of a thread's seconds, averaged
/// over the threads. The work is done a few times to a hundred times, for 20 milliseconds if it is
/// short, and twice before. Throws what `prepare` or the work throws.
double seconds_as_ranks(int64_t ranks, const std::function<Work()>& prepare);

}  // namespace zero::plan
