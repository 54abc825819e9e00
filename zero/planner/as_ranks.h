// Measures work on this machine as the ranks of a run would do it: all of them at once.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace zero::plan {

/// Work that can be done again and again.
using Work = std::function<void()>;

/// Gives a number of this host to the others, and returns those of all hosts. Blocks until all have
/// called it. Throws Error if another host cannot go on.
using OfHosts = std::function<std::vector<double>(double)>;

/// Calls `prepare` on `ranks` threads (this thread is one of them), each of which has its share of
/// the cores for LibTorch's operators, but no more than at::get_num_threads() says, and times the
/// work that it returns on all of them at once. Returns the median of a thread's seconds, averaged
/// over the threads. The work is done a few times to a hundred times, for 20 milliseconds if it is
/// short, and twice before. With `hosts`, all hosts measure the same at the same time, and each
/// gets the mean of them. Throws what `prepare` or the work throws, ConfigError where so many
/// threads cannot be started, and Error where another host has thrown.
double seconds_as_ranks(int64_t ranks, const std::function<Work()>& prepare,
                        const OfHosts& hosts = {});

}  // namespace zero::plan
