// Says before a model is built whether it fits into the memory of this host.
#pragma once

#include <cstdint>

#include "zero/comm/group.h"
#include "zero/config/config.h"

namespace zero {

/// Bytes that its host (or the cgroup that the ranks run in) has left for each rank; the least of
/// all ranks. Collective.
int64_t memory_of_rank(comm::Group& group);

/// Bytes that the ranks of this host together need while each builds a model of `parameters`
/// parameters whole, in fp32.
double bytes_to_build(int64_t parameters, const comm::Group& group);

/// Throws OutOfMemory, on every rank, if a model of `parameters` parameters cannot be trained so in
/// the memory that this host (or the cgroup that the ranks run in) has left: because building it in
/// fp32 takes more (`built_on_disk`: it is built in a zero::BuildOnDisk scope), or its states do by
/// formula. Names what would do. For use before the model is built; activations and buffers come on
/// top. Collective.
void check_fits(int64_t parameters, const Config& config, comm::Group& group,
                bool built_on_disk = false);

}  // namespace zero
