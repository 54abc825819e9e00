// The collectives of a group on several hosts: what one rank does for each, in two phases.
//
// Note [Two levels]
// With H hosts of R ranks, rank (h, r) shares memory with the ranks of host h and has a rail to
// (h', r) of each other host (Note [Rails] in rail.h). N = H R; a full array is N slices, host by
// host.
//   all-gather      Slice (h, r) goes to each (h', r), straight to its place there. Then the ranks
//                   of a host copy the slices that came from each other.
//   reduce-scatter  Host h adds up its ranks' arrays: (h, r) does so for the slices (h', r), in
//                   shared memory, and sends each partial sum to (h', r), which adds those of all
//                   hosts.
//   all-reduce      A reduce-scatter, and then an all-gather.
//   broadcast       The hosts are a chain, along which the array goes in chunks; on each host it
//                   comes to the rank at the root's place, which gives it to the others.
//   window          The first half of an all-gather: each rank puts the slices of the ranks at its
//                   place into the one array that its host has.
//   all-to-all      The ranks of h first move the parts for host h' to the ranks at their places,
//                   and then send them.
// So a host's link carries (H-1)/H of an array once, whatever its ranks (partition/link_bytes.h).
//
// Note [Order of additions]
// A sum adds a host's ranks in order, then the hosts in order, in fp32, and rounds once. Partial
// sums are not rounded. With one rank a host there are none, and bf16 travels as bf16. A group on
// one host adds in the same order if GroupOptions::sum_block says so.
//
// Note [Coded between hosts]
// With a LinkWire a codec makes each message (link_codec.h), chunk by chunk. Inside a host nothing
// is coded. Small calls go in chunks too.
//   quantised  An all-gather quantises each rank's slice once; all ranks, its owner too, take the
//              values of the message, so all have the same bits. A reduce-scatter quantises each
//              host's sum, in fp32; the host that the slice is on adds its own sum unquantised.
//   exponents  Messages arrive with all their bits, so sums and their order are those without.
//
// Note [Two phases]
// `outward` starts a call: it sends this rank's data for others. `homeward` ends it: it waits for
// the data for this rank and puts it in its place. It begins as soon as the call has been opened
// (`open`), beside the rest of the outward phase (`send`): a long sum leaves in chunks, which do
// not go on before the other hosts take them. Each phase runs calls in the order of their issue, on
// a thread of its own, with channels of its own in shared memory and on the rail. So one call's
// data travel while another's are added up, and still nothing is ordered by timing. Sums, and coded
// messages, pass through a few chunks of constant size, in both phases.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/comm/hosts_call.h"
#include "zero/comm/hosts_links.h"

namespace zero::comm {

class HostsCollectives {
 public:
  using MakeArray = HostsLinks::MakeArray;

  /// `numbers` are those of the group's ranks in the job, for messages; empty if they are the same.
  /// `outward` and `homeward` run the two phases' collectives inside the host; they are null if the
  /// host has one rank. `control` is for small calls, whose phases one thread runs.
  /// `clock` outlives this.
  HostsCollectives(const Topology& topology, std::vector<int> numbers, Rail& rail,
                   Collectives* outward, Collectives* homeward, bool control, MakeArray make_array,
                   std::shared_ptr<Traffic> traffic, LinkClock& clock);

  /// One thread runs the outward phase: `open` and then `send` for each call, in the order of
  /// issue, and ends `sending`. Another thread may run the homeward phase of a call once it is
  /// open, in the same order. All throw CommError. After that nothing more may be run: abort the
  /// rail, and drain each call before it and this object are destroyed.
  void open(HostsCall& call);
  void send(HostsCall& call);
  void homeward(HostsCall& call);
  /// Waits until the aborted rail does not touch the memory of `call` any more.
  static void drain(HostsCall& call) noexcept { HostsLinks::drain(call); }

 private:
  HostsLinks links_;
};

}  // namespace zero::comm
