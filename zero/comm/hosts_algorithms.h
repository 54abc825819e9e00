// The collectives of a group on several hosts, each a class of its own (Note [Two levels] in
// hosts_collectives.h says what each does).
#pragma once

#include <memory>

#include "zero/comm/hosts_call.h"
#include "zero/comm/hosts_links.h"

namespace zero::comm {

// An algorithm is made when its call is opened, and lives as long as the call is under way.

/// Makes an all-gather (hosts_gather.cpp).
std::unique_ptr<HostsAlgorithm> make_gather(HostsLinks& links, HostsCall& call);
/// Makes a reduce-scatter or an all-reduce (hosts_sum.cpp).
std::unique_ptr<HostsAlgorithm> make_sum(HostsLinks& links, HostsCall& call);
/// Makes a broadcast, an all-to-all or a barrier (hosts_exchange.cpp).
std::unique_ptr<HostsAlgorithm> make_exchange(HostsLinks& links, HostsCall& call);

/// All-gathers and all-reduces with so few bytes in all slices go in one piece.
inline constexpr int64_t kSmallCall = int64_t{64} << 10;

/// Gathers few bytes of every rank: first those of the ranks at this one's place on the other
/// hosts, then, inside the host, the bytes that each of its ranks has gathered.
class SmallGather {
 public:
  SmallGather(HostsLinks& links, HostsCall& call) : links_(links), call_(call) {}
  /// Sends `input`, which may be empty. The outward phase calls it.
  void start(const at::Tensor& input);
  /// Returns the bytes of all ranks, (ranks a host, hosts, bytes of the input), which must not be
  /// empty. Blocks. The homeward phase calls it.
  at::Tensor finish();

 private:
  HostsLinks& links_;
  HostsCall& call_;
  int64_t bytes_ = 0;
  at::Tensor stage_;
};

}  // namespace zero::comm
