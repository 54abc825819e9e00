#include "zero/train/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

namespace zero::train {

StoppedByPeer::StoppedByPeer(int rank)
    : Error(fmt::format("Rank {} stopped the run; its message says why.", rank)) {}

void share_failure(comm::Group& group, const std::exception_ptr& mine) {
  const auto failed = at::full({1}, mine ? 1 : 0, at::kLong);
  const auto all = at::empty({group.size()}, at::kLong);
  group.all_gather_control(all, failed, "failures");
  if (mine) std::rethrow_exception(mine);
  for (int rank = 0; rank < group.size(); ++rank) {
    if (all.data_ptr<int64_t>()[rank] != 0) throw StoppedByPeer(rank);
  }
}

}  // namespace zero::train
