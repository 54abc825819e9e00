// The places of the program at which a stream was asked to wait.
#pragma once

#include <string>
#include <vector>

namespace zero::simulated {

/// The return addresses of the calls under way, the innermost first.
std::vector<void*> calls_under_way();

/// The function that wanted what the innermost calls do, and by which of libzero's own: "zero::
/// GatherFlow::gather + 120 by zero::StreamMark::wait". The innermost that is neither this
/// library's, nor of libzero's streams, nor of its groups; in LibTorch where there is none of
/// libzero.
std::string place_of(const std::vector<void*>& calls);

}  // namespace zero::simulated
