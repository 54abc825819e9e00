// Broadcasts, all-to-alls and barriers between hosts.
#include <algorithm>

#include "zero/base/error.h"
#include "zero/comm/array_views.h"
#include "zero/comm/hosts_algorithms.h"

namespace zero::comm {
namespace {

constexpr int64_t kBroadcastChunk = int64_t{4} << 20;  // bytes

// The hosts are a chain that begins with the root's; the ranks at the root's place pass the array
// on in chunks. Then each of them gives it to its host.
class Broadcast final : public HostsAlgorithm {
 public:
  using HostsAlgorithm::HostsAlgorithm;

  void homeward() override {
    const auto& tensor = call_.call.input;
    const int root_place = call_.call.root % links_.local_size();
    links_.check_records(call_);
    if (links_.local_rank() == root_place) pass_on();
    if (!links_.alone())
      links_.run_local(Phase::homeward, call_, Op::broadcast, tensor, tensor, root_place);
  }

 private:
  void pass_on() {
    const auto& tensor = call_.call.input;
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    const int root_host = call_.call.root / links_.local_size();
    const bool first = links_.here() == root_host;
    const bool last = links_.host_after(1) == root_host;
    const auto all = as_dtype(tensor, bytes, at::kByte);
    const auto chunk = [&](int64_t at) {
      return part(all, at, std::min(kBroadcastChunk, bytes - at));
    };
    const int before = links_.host_before(1);
    call_.arrivals[static_cast<size_t>(before)].clear();  // its record has been checked
    for (int64_t at = 0; !first && at < bytes; at += kBroadcastChunk)
      links_.arrive(call_, before, Channel::homeward, chunk(at));
    for (int64_t at = 0; at < bytes; at += kBroadcastChunk) {
      if (!first) links_.wait_for(call_, before, static_cast<size_t>(at / kBroadcastChunk));
      if (!last) links_.depart(call_, links_.host_after(1), Channel::homeward, chunk(at));
    }
  }
};

// The ranks of a host first exchange the parts for another host, so that each has the parts for the
// rank at its own place there. Then each sends them.
class AllToAll final : public HostsAlgorithm {
 public:
  AllToAll(HostsLinks& links, HostsCall& call)
      : HostsAlgorithm(links, call), block_(call.call.input.numel() / links.hosts()) {}

  void open() override {
    for (int d = 1; d <= links_.others(); ++d) {
      const int from = links_.host_before(d);
      links_.arrive(call_, from, Channel::gather, part(call_.call.output, from * block_, block_));
    }
    for (int d = 1; d <= links_.others(); ++d) {
      const int to = links_.host_after(d);
      auto leaves = part(call_.call.input, to * block_, block_);
      if (!links_.alone() && block_ > 0) {
        const auto array = links_.borrow(call_, static_cast<int64_t>(span_of(leaves).size()));
        const auto ordered = as_dtype(array, block_, leaves.scalar_type());
        links_.run_local(Phase::outward, call_, Op::all_to_all, ordered, leaves);
        leaves = ordered;
      }
      links_.depart(call_, to, Channel::gather, leaves);
    }
  }

  void homeward() override {
    const auto from = part(call_.call.input, links_.here() * block_, block_);
    const auto to = part(call_.call.output, links_.here() * block_, block_);
    if (links_.alone()) {
      copy_to(bytes_of(to), from);
    } else {
      links_.run_local(Phase::homeward, call_, Op::all_to_all, to, from);
    }
    links_.check_records(call_);
    for (int host = 0; host < links_.hosts(); ++host) links_.wait_for(call_, host);
  }

 private:
  int64_t block_;  // elements for each host
};

// The records of the other hosts' ranks at this place show that they have come. Then the ranks of
// this host wait for each other, so that the ranks of all places have come.
class Barrier final : public HostsAlgorithm {
 public:
  using HostsAlgorithm::HostsAlgorithm;
  void homeward() override {
    links_.check_records(call_);
    if (!links_.alone()) links_.run_local(Phase::homeward, call_, Op::barrier, {}, {});
  }
};

}  // namespace

std::unique_ptr<HostsAlgorithm> make_exchange(HostsLinks& links, HostsCall& call) {
  if (call.call.op == Op::broadcast) return std::make_unique<Broadcast>(links, call);
  if (call.call.op == Op::all_to_all) return std::make_unique<AllToAll>(links, call);
  ensure(call.call.op == Op::barrier, "a collective that several hosts do not have");
  return std::make_unique<Barrier>(links, call);
}

}  // namespace zero::comm
