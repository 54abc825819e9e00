// Says before a model is built whether it fits into the memory of this host.
#pragma once

#include <cstdint>

#include "zero/comm/group.h"
#include "zero/config/config.h"

namespace zero {

/// Returns the bytes that its host (or the cgroup that the ranks run in) has left for each rank,
/// the least of all ranks. Collective.
int64_t memory_of_rank(comm::Group& group);

/// Returns the bytes that the ranks of this host need together while each builds a whole model of
/// `parameters` parameters in fp32.
double bytes_to_build(int64_t parameters, const comm::Group& group);

/// Throws OutOfMemory, on every rank, if a model of `parameters` parameters cannot be trained with
/// `config` in the memory that this host (or the cgroup that the ranks run in) has left. Either
/// building it in fp32 takes more (not with `built_on_disk`: it is built in a zero::BuildOnDisk
/// scope), or its states do by formula. The message names settings that would fit. Call it before
/// the model is built; activations and buffers come on top. `frozen` of the parameters are not
/// trained. Collective.
void check_fits(int64_t parameters, const Config& config, comm::Group& group,
                bool built_on_disk = false, int64_t frozen = 0);

}  // namespace zero
