// Measures the link between hosts, quickly.
#pragma once

#include <functional>

#include "zero/comm/link_speed.h"
#include "zero/comm/work.h"

namespace zero::comm {

class Group;

/// Returns the speed of the slowest rank's link: the same on all ranks. `gather` starts an
/// all-gather of the group. Collective, between hosts. Throws CommError.
///
/// Note [A quick probe]
/// A host sends 3 MiB, in three calls, and a few small ones: always as many, so that a job's bytes
/// are the same each time. That takes 30 ms at 1 Gbit/s. The first call does not count, since a
/// link may let some bytes through at once; of the others the faster one does, since other work on
/// the machine only ever adds to it. What depends on the result are times: when messages leave, and
/// how a report divides a wait. Bits and bytes do not.
LinkSpeed probe_link(Group& group,
                     const std::function<Work(at::Tensor output, at::Tensor input)>& gather);

}  // namespace zero::comm
