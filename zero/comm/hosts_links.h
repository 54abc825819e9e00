// How one rank of a group on several hosts reaches the others: the ranks of its host through shared
// memory, and the rank at its place on each other host over its rail. The collectives are built on
// this (hosts_algorithms.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "zero/comm/hosts_call.h"
#include "zero/comm/link_clock.h"
#include "zero/comm/link_codec.h"
#include "zero/comm/rail.h"
#include "zero/comm/shm_collectives.h"
#include "zero/comm/topology.h"
#include "zero/comm/traffic.h"

namespace zero::comm {

/// A host has two sequences of collectives in shared memory, one for each phase of calls.
enum class Phase : uint8_t { outward, homeward };

/// The outward phase sends, and the homeward phase receives in chunks; both may go on at once. All
/// functions throw CommError.
class HostsLinks {
 public:
  /// Makes memory on which the ranks of a host work in place.
  using MakeArray = std::function<at::Tensor(int64_t bytes)>;

  /// For the arguments see HostsCollectives.
  HostsLinks(const Topology& topology, std::vector<int> numbers, Rail& rail, Collectives* outward,
             Collectives* homeward, bool control, MakeArray make_array,
             std::shared_ptr<Traffic> traffic, LinkClock& clock);
  ~HostsLinks();
  HostsLinks(const HostsLinks&) = delete;
  HostsLinks& operator=(const HostsLinks&) = delete;

  // These tell places.
  int hosts() const { return topology_.hosts; }
  int here() const { return topology_.host; }
  int others() const { return topology_.hosts - 1; }
  int local_size() const { return topology_.local_size; }
  int local_rank() const { return topology_.local_rank; }
  int ranks() const { return topology_.hosts * topology_.local_size; }
  /// True if each host has one rank.
  bool alone() const { return topology_.local_size == 1; }
  /// Returns the rank at this one's place on `host`.
  int rank_at(int host) const { return host * topology_.local_size + topology_.local_rank; }
  /// Hosts in a circle. Messages go to those after this one and come from those before it, nearest
  /// first, so that no host is everybody's first.
  int host_after(int distance) const { return (topology_.host + distance) % topology_.hosts; }
  int host_before(int distance) const { return host_after(topology_.hosts - distance); }
  /// True for small calls, whose two phases one thread runs.
  bool control() const { return control_; }

  // These exchange records. Ranks of one host compare theirs in shared memory.
  /// Sends this call's record to the ranks at this one's place on the other hosts, and asks for
  /// theirs.
  void exchange_records(HostsCall& call);
  /// Waits for their records. Throws CommError if one of them runs another collective.
  void check_records(HostsCall& call) const;

  // These move messages of a call, from and to memory that must not change until they are waited
  // for.
  void depart(HostsCall& call, int host, Channel channel, const at::Tensor& values);
  void arrive(HostsCall& call, int host, Channel channel, const at::Tensor& values);
  /// Waits for all messages that were asked for from `host`.
  void wait_for(HostsCall& call, int host) const;
  /// Waits for passage `index` of those from `host`, and does not remove it.
  void wait_for(HostsCall& call, int host, size_t index) const;
  void wait_for_departures(HostsCall& call) const;
  /// Waits until the aborted rail does not touch the memory of `call` any more.
  static void drain(HostsCall& call) noexcept;

  // These move messages through arrays of this object, chunk by chunk.
  int64_t chunk_bytes() const;
  /// An array in which a chunk for `host` is made. `next_leaving` blocks until the last chunk in it
  /// has left.
  struct Leaving {
    int host = 0;
    int64_t turn = 0;
    at::Tensor message;  ///< 1-D, Byte
  };
  Leaving next_leaving(int host, int64_t bytes);
  void leave(HostsCall& call, const Leaving& chunk);
  /// Sends the rest of a message that was too small (Codec::pack), in a message of its own. It has
  /// a channel of its own too, since the next chunk is awaited already on the chunks' channel.
  void leave_rest(HostsCall& call, int host, std::span<const std::byte> rest);
  void receive_rest(int host, std::span<std::byte> rest) const;
  /// A chunk of each other host, for this rank.
  struct Coming {
    int64_t begin = 0;  ///< its first element
    int64_t numel = 0;
    /// Waits for the message of the host that is `distance` before this one.
    std::function<const std::byte*(int distance)> message;
    at::Tensor spare;  ///< an array of a chunk, Byte, for this host's values
  };
  /// Receives `numel` elements of each other host, in chunks, and gives them to `body` in order.
  void receive_chunks(int64_t numel, const Codec& codec,
                      const std::function<void(const Coming&)>& body);
  /// Returns an array for a chunk into which a message from the host at `distance` is unpacked.
  at::Tensor unpacked(int distance, int64_t numel, at::ScalarType dtype);

  /// Runs a part of a call among the ranks of this host. Blocks. An `input` of two dimensions is
  /// (ranks, n) for a reduce-scatter of slices that are parts of larger ones.
  void run_local(Phase phase, const HostsCall& of, Op op, const at::Tensor& output,
                 const at::Tensor& input, int root = 0);

  /// Lends the call an array of at least `bytes` bytes, until the call has ended.
  at::Tensor borrow(HostsCall& call, int64_t bytes);
  void give_back(HostsCall& call);

 private:
  class Ring;

  int number_at(int host) const {
    return numbers_.empty() ? rank_at(host) : numbers_[static_cast<size_t>(rank_at(host))];
  }
  Channel on(Channel channel) const { return control_ ? Channel::control : channel; }
  void count_link(const HostsCall& call, int64_t bytes) const;
  template <class Body>
  auto blaming(int host, Body body) const;
  void await(Passage& passage, int host) const;
  /// Returns the bytes that cross this host's link while a message of `bytes` comes to each rank.
  int64_t on_link(int64_t bytes) const { return bytes * others() * topology_.local_size; }
  std::unique_ptr<Passage> send(int host, Channel channel, std::span<const std::byte> bytes) const;
  std::unique_ptr<Passage> receive(int host, Channel channel, std::span<std::byte> bytes) const;

  Topology topology_;
  std::vector<int> numbers_;
  Rail& rail_;
  Collectives* outward_;
  Collectives* homeward_;
  bool control_;
  MakeArray make_array_;
  std::shared_ptr<Traffic> traffic_;
  LinkClock& clock_;
  uint64_t sequence_ = 0;
  std::mutex mutex_;
  std::multimap<int64_t, at::Tensor> free_;  // arrays to lend, by bytes; guarded by the mutex
  std::unique_ptr<Ring> leaving_;            // chunks on their way to other hosts
  std::unique_ptr<Ring> rests_;              // and their rests
  std::vector<int64_t> rest_turns_;          // by host, how many rests have left
  std::unique_ptr<Ring> coming_;             // chunks on their way here
  at::Tensor unpacked_;                      // a chunk of each other host
};

}  // namespace zero::comm
