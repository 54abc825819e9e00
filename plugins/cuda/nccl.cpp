#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <atomic>
#include <memory>
#include <utility>

#include "plugins/cuda/cuda.h"

namespace zero::cuda {

c10::intrusive_ptr<c10d::Backend> nccl_backend(c10::intrusive_ptr<c10d::Store> store, int rank,
                                               int size, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(store), rank, size,
                                                     std::move(options));
}

comm::MakeBackend nccl(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout) {
  // Ranks may have made different numbers of groups, so that all take the name that the first of
  // the new group gives: its number, and how many it has made.
  const auto made = std::make_shared<std::atomic<int64_t>>(0);
  return [store = std::move(store), timeout, made](comm::Group& ranks) {
    const auto own = at::empty({2}, at::kLong);
    own.mutable_data_ptr<int64_t>()[0] = ranks.number();
    own.mutable_data_ptr<int64_t>()[1] = (*made)++;
    const auto all = at::empty({2 * int64_t{ranks.size()}}, at::kLong);
    ranks.all_gather_control(all, own, "the name of a group of NCCL");
    const auto* first = all.const_data_ptr<int64_t>();
    auto meeting = c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("zero/nccl/{}/{}", first[0], first[1]), store);
    return nccl_backend(std::move(meeting), ranks.rank(), ranks.size(), timeout);
  };
}

}  // namespace zero::cuda
