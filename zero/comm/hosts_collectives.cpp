#include "zero/comm/hosts_collectives.h"

#include <utility>

#include "zero/comm/hosts_algorithms.h"

namespace zero::comm {

HostsCollectives::HostsCollectives(const Topology& topology, std::vector<int> numbers, Rail& rail,
                                   Collectives* outward, Collectives* homeward, bool control,
                                   MakeArray make_array, std::shared_ptr<Traffic> traffic,
                                   LinkClock& clock)
    : links_(topology, std::move(numbers), rail, outward, homeward, control, std::move(make_array),
             std::move(traffic), clock) {}

void HostsCollectives::open(HostsCall& call) {
  links_.exchange_records(call);
  const auto op = call.call.op;
  const bool sums = op == Op::reduce_scatter || op == Op::all_reduce;
  call.algorithm = op == Op::all_gather ? make_gather(links_, call)
                   : sums               ? make_sum(links_, call)
                                        : make_exchange(links_, call);
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
