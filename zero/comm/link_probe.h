// Measures the link between hosts, quickly.
#pragma once

#include <functional>

#include "zero/comm/link_speed.h"
#include "zero/comm/work.h"

namespace zero::comm {

class Group;

/// Returns the speed of the slowest rank's link: the same on all ranks. It takes a tenth of a
/// second at 1 Gbit/s, and less where the link is faster or so slow that few bytes tell. `gather`
/// starts an all-gather of the group. Collective, between hosts. Throws CommError.
///
/// Note [A quick probe]
/// Bytes grow until an all-gather takes some time, or has some MB: so a slow link is not held for
/// long, and the time of a fast one is not all latency. Then the better of two more counts, since
/// other work on the machine only ever adds to it, and a link that lets some bytes through at once
/// has done so before. What depends on the result are times: when
/// messages leave and how a report divides a wait. Bits and bytes do not.
LinkSpeed probe_link(Group& group,
                     const std::function<Work(at::Tensor output, at::Tensor input)>& gather);

}  // namespace zero::comm
