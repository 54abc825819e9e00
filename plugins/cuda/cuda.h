// NCCL for groups of CUDA devices. Its symbols are in libzero_cuda.so, which needs LibTorch's CUDA
// libraries.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "zero/comm/group.h"

namespace zero::cuda {

/// LibTorch's NCCL among `size` ranks that meet in `store`, where nobody else uses its keys. It
/// works on the CUDA device of the tensors that it is given; its collectives are enqueued, and one
/// that takes longer than `timeout` ends the process. Throws c10::Error where there is no GPU.
c10::intrusive_ptr<c10d::Backend> nccl_backend(c10::intrusive_ptr<c10d::Store> store, int rank,
                                               int size, std::chrono::milliseconds timeout);

/// For comm::on_device: NCCL for a group and for each of its subgroups, whose ranks meet under
/// names of their own in `store`, which all ranks of the job reach. Each is made collectively.
comm::MakeBackend nccl(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout);

}  // namespace zero::cuda
