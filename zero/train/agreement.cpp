#include "zero/train/agreement.h"

#include <fmt/format.h>

#include "zero/comm/gather_records.h"

namespace zero::train {

StoppedByPeer::StoppedByPeer(int rank)
    : Error(fmt::format("Rank {} stopped the run; its message says why.", rank)) {}

void share_failure(comm::Group& group, const std::exception_ptr& mine) {
  const auto failed = comm::first_failure(group, mine != nullptr, "failures");
  if (mine) std::rethrow_exception(mine);
  if (failed) throw StoppedByPeer(*failed);
}

}  // namespace zero::train
