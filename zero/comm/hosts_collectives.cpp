#include "zero/comm/hosts_collectives.h"

#include <utility>

#include "zero/base/error.h"
#include "zero/comm/hosts_algorithms.h"

namespace zero::comm {
namespace {

std::unique_ptr<HostsAlgorithm> make_algorithm(HostsLinks& links, HostsCall& call) {
  switch (call.call.op) {
    case Op::all_gather:
      return make_all_gather(links, call);
    case Op::reduce_scatter:
      return make_reduce_scatter(links, call);
    case Op::all_reduce:
      return make_all_reduce(links, call);
    case Op::broadcast:
      return make_broadcast(links, call);
    case Op::all_to_all:
      return make_all_to_all(links, call);
    default:
      ensure(call.call.op == Op::barrier, "a collective that several hosts do not have");
      return make_barrier(links, call);
  }
}

}  // namespace

HostsCollectives::HostsCollectives(const Topology& topology, std::vector<int> numbers, Rail& rail,
                                   Collectives* outward, Collectives* homeward, bool control,
                                   MakeArray make_array, std::shared_ptr<Traffic> traffic)
    : links_(topology, std::move(numbers), rail, outward, homeward, control, std::move(make_array),
             std::move(traffic)) {}

void HostsCollectives::open(HostsCall& call) {
  links_.exchange_records(call);
  call.algorithm = make_algorithm(links_, call);
  call.algorithm->open();
}

void HostsCollectives::send(HostsCall& call) { call.algorithm->send(); }

void HostsCollectives::homeward(HostsCall& call) {
  if (!call.algorithm->sends_in_chunks()) call.sending.wait();
  call.algorithm->homeward();
  for (int host = 0; host < links_.hosts(); ++host) links_.wait_for(call, host);
  call.sending.wait();
  links_.wait_for_departures(call);
  call.algorithm.reset();
  links_.give_back(call);
}

}  // namespace zero::comm
