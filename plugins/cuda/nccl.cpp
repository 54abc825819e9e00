// NCCL for groups of CUDA devices: LibTorch's, whose symbols are in its CUDA libraries. It works on
// the device of the tensors that it is given; one of its collectives that takes longer than the
// timeout ends the process.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "zero/comm/device_backend.h"

extern "C" zero::comm::MakeDeviceBackend zero_device_backend;

void zero_device_backend(c10::intrusive_ptr<c10d::Backend>* made, zero::comm::Group* ranks,
                         int64_t timeout_ms) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::milliseconds(timeout_ms);
  *made = c10::make_intrusive<c10d::ProcessGroupNCCL>(ranks->store(), ranks->rank(), ranks->size(),
                                                      std::move(options));
}
