#include "zero/comm/hosts_group.h"

#include <fmt/format.h>

#include "zero/base/error.h"

namespace zero::comm {

std::shared_ptr<Group> hosts_group(c10::intrusive_ptr<c10d::Store>, const HostsJob& job,
                                   GroupOptions) {
  throw CommError(fmt::format(
      "Rank {} of {}: the backend over {} hosts is not built yet. Start all ranks on one host.",
      job.rank, job.size, job.topology.hosts));
}

}  // namespace zero::comm
