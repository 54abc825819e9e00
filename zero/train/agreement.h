// One rank's failure is everyone's.
#pragma once

#include <exception>

#include "zero/base/error.h"
#include "zero/comm/group.h"

namespace zero::train {

/// What the other ranks throw when a rank has failed by itself (a full disk on rank 0): that rank
/// has the real error, and a program need not print this one.
class StoppedByPeer : public Error {
 public:
  explicit StoppedByPeer(int rank);
};

/// Returns where no rank has failed. Otherwise a rank with a failure rethrows it, and the others
/// throw StoppedByPeer. Collective.
void share_failure(comm::Group& group, const std::exception_ptr& mine);

/// Runs `body` on rank 0 alone and shares its failure. Collective.
template <class Body>
void on_rank_zero(comm::Group& group, const Body& body) {
  std::exception_ptr failure;
  if (group.rank() == 0) {
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  share_failure(group, failure);
}

}  // namespace zero::train
