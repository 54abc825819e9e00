// The collectives of a group on several hosts: what one rank does for each, in two phases.
//
// Note [Two levels]
// With H hosts of R ranks, rank (h, r) shares memory with the ranks of host h and has a rail to
// (h', r) of each other host (Note [Rails] in rail.h). N = H R; a full array is N slices, host by
// host.
//   all-gather      slice (h, r) goes to each (h', r), straight to its place there; then the ranks
//                   of a host copy the slices that came from each other.
//   reduce-scatter  host h adds its ranks' arrays: (h, r) does so for the slices (h', r), in shared
//                   memory, and sends the partial sums to (h', r), who adds those of all hosts.
//   all-reduce      the one and then the other.
//   broadcast       along a chain of hosts, in chunks; in each, from the rank at the root's place.
//   window          of an all-gather the first half: each rank puts what comes to its place into
//   the
//                   one array that its host has.
//   all-to-all      what goes to host h' is brought to its place by the ranks of h among
//   themselves.
// So a host's link carries (H-1)/H of an array once, whatever its ranks (partition/formulas.h).
//
// Note [Order of additions]
// A sum adds a host's ranks in order, then the hosts in order, in fp32, and rounds once. Partial
// sums are never rounded; with one rank a host there are none, and bf16 travels as bf16. A group on
// one host adds in the same order where GroupOptions::block says so.
//
// Note [Quantised between hosts]
// With a LinkWire what leaves a host is packed, chunk by chunk, and unpacked where it arrives: of
// an all-gather each rank's slice, which it puts into its own output as the message says it, so
// that all ranks have the same; of a reduce-scatter the host's sum, in fp32, of which what is
// wanted here stays as it is. Chunks begin at multiples of a block, so together they have the bytes
// of one message. Inside a host nothing is quantised. Small calls go in chunks too.
//
// Note [Packed between hosts]
// With LinkWire::packed chunks leave with their exponents packed (Note [Packed exponents] in
// packed_exponents.h) and are unpacked where they arrive, with all their bits: sums and their order
// are those without it. A chunk that does not fit is followed by its rest, on a channel of its own,
// since what comes behind it on its own channel is awaited already.
//
// Note [Two phases]
// `outward` starts a call: what this rank has for others leaves. `homeward` ends it: what others
// have for this rank is awaited and put in its place. It begins as soon as the call has been opened
// (`open`), beside the rest of the outward phase (`send`): a long sum leaves in chunks, which do
// not go on before the other hosts take them. Each phase runs calls in the order of their
// issue, on a thread of its own, with channels of its own in shared memory and on the rail; so one
// call's data travel while another's are added up, and yet nothing is ordered by timing. Sums, and
// what is quantised, pass through a few chunks of constant size, in both phases.
#pragma once

#include <torch/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "zero/comm/call.h"
#include "zero/comm/rail.h"
#include "zero/comm/shm_collectives.h"
#include "zero/comm/topology.h"
#include "zero/comm/traffic.h"

namespace zero::comm {

/// A call between its phases.
struct HostsCall {
  struct Departure {
    int host = 0;
    std::unique_ptr<Passage> passage;
  };
  /// Whether the outward phase is over.
  class Sending {
   public:
    void end(std::exception_ptr error = nullptr) {
      const std::lock_guard lock(mutex_);
      over_ = true;
      error_ = std::move(error);
      changed_.notify_all();
    }
    /// Throws what it has ended with.
    void wait() {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return over_; });
      if (error_) std::rethrow_exception(error_);
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool over_ = false;
    std::exception_ptr error_;
  };
  Call call;
  Sending sending;
  CallRecord record;
  std::vector<CallRecord> records;    ///< of the other hosts' ranks, by host
  std::vector<at::Tensor> held;       ///< for as long as something is under way
  std::vector<Departure> departures;  ///< the second phase's own once `sending` is over
  std::vector<std::vector<std::unique_ptr<Passage>>> arrivals;  ///< by host: its record, and more
};

class HostsCollectives {
 public:
  /// Memory on which the ranks of a host work in place.
  using MakeArray = std::function<at::Tensor(int64_t bytes)>;

  /// `numbers`: of the group's ranks in the job, for messages; empty: the same. `control`: for
  /// small calls, whose phases are run by one thread.
  HostsCollectives(const Topology& topology, std::vector<int> numbers, Rail& rail,
                   Collectives* outward, Collectives* homeward, bool control, MakeArray make_array,
                   std::shared_ptr<Traffic> traffic);

  ~HostsCollectives();
  HostsCollectives(const HostsCollectives&) = delete;
  HostsCollectives& operator=(const HostsCollectives&) = delete;

  /// The outward phase: one thread runs `open` and then `send` for each call, in the order of
  /// issue, and ends `sending`. The homeward phase: another may run `homeward` once a call is open,
  /// in the same order. All throw CommError; then nothing more may be run, the rail is to be
  /// aborted, and each call and this are settled before they go.
  void open(HostsCall& call);
  void send(HostsCall& call);
  void homeward(HostsCall& call);
  /// Waits until the aborted rail does not touch what the call uses any more.
  static void settle(HostsCall& call) noexcept;

 private:
  // Arrays through which chunks pass.
  class Ring;
  // Arrays of the sizes of small calls, used again and again.
  class Scratch {
   public:
    explicit Scratch(MakeArray make) : make_(std::move(make)) {}
    at::Tensor take(int64_t bytes);
    void give(at::Tensor array);

   private:
    MakeArray make_;
    std::mutex mutex_;
    std::multimap<int64_t, at::Tensor> free_;  // by bytes
  };

  int rank_at(int host) const { return host * topology_.local_size + topology_.local_rank; }
  // Of this place's rank on `host`, among the ranks of the job.
  int number_at(int host) const {
    return numbers_.empty() ? rank_at(host) : numbers_[static_cast<size_t>(rank_at(host))];
  }
  int ranks() const { return topology_.hosts * topology_.local_size; }
  int others() const { return topology_.hosts - 1; }
  int host_after(int distance) const { return (topology_.host + distance) % topology_.hosts; }
  bool alone() const { return topology_.local_size == 1; }
  Channel on(Channel channel) const { return control_ ? Channel::control : channel; }
  int64_t chunk_bytes() const;
  int64_t chunk_numel(const LinkWire& wire, at::ScalarType dtype) const;
  bool small(const Call& call) const;
  int64_t reduced_slice(const Call& call) const;

  void depart(HostsCall& call, int host, Channel channel, const at::Tensor& values);
  void count_link(const HostsCall& call, std::span<const std::byte> bytes) const;
  void arrive(HostsCall& call, int host, Channel channel, const at::Tensor& values);
  template <class Body>
  auto blaming(int host, Body body) const;
  void await(Passage& passage, int host) const;
  std::unique_ptr<Passage> send(int host, Channel channel, std::span<const std::byte> bytes) const;
  std::unique_ptr<Passage> receive(int host, Channel channel, std::span<std::byte> bytes) const;
  void wait_for(HostsCall& call, int host) const;
  void wait_for_departures(HostsCall& call) const;
  void exchange_records(HostsCall& call);
  void check_records(HostsCall& call) const;
  static void run_local(Collectives& local, const HostsCall& of, Op op, const at::Tensor& output,
                        const at::Tensor& input, int root = 0);

  void start_small_gather(HostsCall& call, const at::Tensor& input);
  at::Tensor finish_small_gather(HostsCall& call, int64_t bytes);
  void finish_small_all_gather(HostsCall& call);
  void start_gather(HostsCall& call);
  void finish_gather(HostsCall& call);
  void send_packed(HostsCall& call);
  void finish_packed_gather(HostsCall& call);
  at::Tensor leaving(int host, int64_t& turn, int64_t numel, at::ScalarType dtype);
  void leave(HostsCall& call, int host, int64_t turn, const at::Tensor& values);
  void leave_rest(HostsCall& call, int host, const at::Tensor& values);
  void unpack_chunk(int host, const at::Tensor& values, const std::byte* message);
  template <class Body>
  void receive_chunks(int64_t n, int64_t step, const std::function<int64_t(int64_t)>& bytes,
                      Body body);
  void send_parts(HostsCall& call, const at::Tensor& input, int64_t n);
  void add_parts(HostsCall& call, const at::Tensor& output, const at::Tensor& input, int64_t n);
  void add_packed(HostsCall& call, const at::Tensor& output, const at::Tensor& own,
                  std::span<const std::byte* const> messages);
  void add_small(HostsCall& call, const at::Tensor& values);
  void finish_all_reduce(HostsCall& call);
  void broadcast(HostsCall& call);
  void start_all_to_all(HostsCall& call);
  void finish_all_to_all(HostsCall& call);

  Topology topology_;
  std::vector<int> numbers_;
  Rail& rail_;
  Collectives* outward_;
  Collectives* homeward_;
  bool control_;
  MakeArray make_array_;
  Scratch scratch_;
  std::shared_ptr<Traffic> traffic_;
  uint64_t sequence_ = 0;
  std::unique_ptr<Ring> leaving_;    // sums of this host, on their way to others
  std::unique_ptr<Ring> rests_;      // of packed chunks that did not fit
  std::vector<int64_t> rest_turns_;  // by host, how many have left
  at::Tensor unpacked_;           // of packed chunks, one of each other host: the homeward phase's
  std::unique_ptr<Ring> coming_;  // and those of other hosts, on their way here
};

}  // namespace zero::comm
