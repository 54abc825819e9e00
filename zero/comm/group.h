// A group of ranks: the collectives that ZeRO is made of, over c10d's Backend.
//
// Every rank of a group issues the same collectives in the same order. A rank that does not is
// named in a CommError on every rank (see Note [Matching] in shm_collectives.cpp). A group of one
// returns at once from everything.
//
// Note [Reading comm]
// The folder has many files, of which these ten say how it works, in this order:
//   group.h               what the engine calls
//   transport.h           the six roles that carry a group
//   shm_collectives.cpp   the collectives of ranks that share memory
//   shm_control.h         the words by which these ranks stay in step
//   peers.h               how a rank waits, and notices that a peer has died
//   arena.h               the memory that they share
//   rail.h                messages between hosts
//   hosts_collectives.h   the collectives over several hosts, in two levels and two phases
//   link_codec.h          how their values are quantised or packed on the way
//   rendezvous.h          how the ranks of a job find each other
// Then, by need: launcher.h starts ranks, host_watch.h names a rank that dies on another host,
// gloo_rail.h and plugin_rail.h (MPI) are the transports between hosts, *_kernels.h the arithmetic.
#pragma once

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "zero/base/ledger.h"
#include "zero/comm/accounts.h"
#include "zero/comm/activity.h"
#include "zero/comm/link_speed.h"
#include "zero/comm/link_times.h"
#include "zero/comm/link_wire.h"
#include "zero/comm/topology.h"
#include "zero/comm/traffic.h"
#include "zero/comm/transport.h"
#include "zero/comm/work.h"

namespace zero::comm {

/// The options of a group.
struct GroupOptions {
  /// A peer that keeps a collective waiting for longer is named in a CommError. A dead peer is
  /// named at once. More than a year counts as a year.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Makes a group on one host add as several hosts with so many ranks each would: first the ranks
  /// of each block in order, then the blocks' sums. Its results are then those of the several
  /// hosts, bit for bit. 0 makes all ranks one block.
  int sum_block = 0;
};

/// A rank publishes this in a slot of a window for other hosts. Ranks of its own host read it in
/// place.
struct Published {
  at::Tensor whole{};  ///< the slot, (N * n), of the window's memory: N is the group's size
  /// This rank's values, (n). If they are not a part of `whole`, they are copied there too.
  at::Tensor slice{};
  std::string_view label{};  ///< the caller's name for the slot (a unit), in errors
  /// How the values cross between hosts; see Group::all_gather. The slot then gets the values that
  /// the messages carry.
  std::optional<LinkWire> wire{};
};

/// One array that all ranks of a host share. Each rank writes its own parts of it, and all read the
/// whole without the owners' help and without a copy. On several hosts each host has one such
/// array, and published parts go to the other hosts' arrays once, however often they are read.
///
/// Note [Epochs]
/// The user divides a window's array into parts and `slots` (in libzero a slot is a unit, of which
/// every rank owns a slice). Each (rank, slot) carries an epoch. The owner writes its part of a
/// slot only when the peers have agreed that nobody still reads it (in libzero: after the step's
/// small all-reduce, which every rank enters once its gathers are done). Then it publishes the next
/// epoch; readers wait for the epoch that they expect. So a gather needs no matching call of the
/// peers, and moves no byte. Between hosts `publish` is an all-gather: rank (h, r) puts the parts
/// that the ranks (h', r) publish into the array of host h, and only then is their epoch seen
/// there.
class Window {
 public:
  /// Frees the array. The peers must have agreed before that nobody uses it any more.
  virtual ~Window() = default;
  /// Returns the array: a 1-D uint8 tensor, zero-filled at first, valid while the window lives.
  /// This rank writes its own parts alone.
  virtual at::Tensor memory() = 0;
  /// Returns the same bytes for reading. If this rank writes to them, nobody else sees that, and
  /// the pages (4 KiB) that it wrote to do not follow the array any more until `discard`. In a
  /// group of one the view is the array itself: there is nobody else, and a second copy of written
  /// pages would take memory.
  virtual at::Tensor view() = 0;
  /// Forgets this rank's writes to the view, which then shows the array again. In a group of one it
  /// does nothing.
  virtual void discard() = 0;
  /// Makes this rank's part of `slot` visible to readers that wait for `epoch`. Epochs of a slot
  /// only grow. On several hosts it needs `what`, is a collective in order with the group's others,
  /// and is asynchronous: the slice must not be written until `settle`.
  virtual void publish(int64_t slot, uint64_t epoch, const Published& what = {}) = 0;
  /// Waits until this rank's published parts are on every host and the other hosts' parts are here.
  /// To be called before peers agree that nobody uses the array. Throws CommError.
  virtual void settle() {}
  /// Blocks until `rank` has published at least `epoch` for `slot`. Throws CommError if that rank
  /// dies, leaves, or keeps this one waiting for longer than the group's timeout. `label` names the
  /// reader's business (a unit) in errors.
  virtual void wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) = 0;
};

/// The ranks that call collectives together. A Transport carries its data; the group counts calls
/// and bytes (Accounts) and knows which ranks share a host (Topology).
class Group {
 public:
  /// Makes a group that counts in `accounts`; another group of this rank may share them.
  Group(Transport transport, GroupOptions options = {}, Accounts accounts = {});
  /// Makes a group over any c10d backend, for data and control; a null `backend` means a group of
  /// one.
  Group(c10::intrusive_ptr<c10d::Backend> backend, GroupOptions options = {});
  virtual ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  /// Returns this rank's number among the ranks of its job, as errors name it.
  int number() const;
  int size() const;
  /// Returns the device of the tensors of its collectives. Control collectives take CPU tensors.
  c10::Device device() const;
  /// Says which ranks share a host.
  const Topology& topology() const;
  /// Return this rank's place among the ranks of its host, and their number (for thread counts and
  /// logs).
  int local_rank() const { return topology().local_rank; }
  int local_size() const { return topology().local_size; }

  /// Returns a 1-D tensor of `numel` elements, uninitialised, on which collectives work in place:
  /// the peers read it where it is. The ledger charges it to `category` while its storage lives. A
  /// group of one, or a transport without shared memory, gives ordinary memory of its device.
  /// Throws OutOfMemory. Not a collective: ranks may allocate in any order.
  at::Tensor empty(int64_t numel, at::ScalarType dtype, Category category);

  /// Returns a shared array of `bytes` bytes, a multiple of the number of ranks, with `slots`
  /// epochs a rank (see Window), or null if the transport has none. Collective. Each rank
  /// charges its share, bytes / local_size(), to `category`, since a host holds one copy.
  std::unique_ptr<Window> window(int64_t bytes, int64_t slots, Category category);
  /// Returns true if `window` returns an array.
  bool has_windows() const;

  // The collectives. Each is asynchronous: every tensor must live, and must not be written (nor
  // read, if it is an output), until Work::wait returns. `label` names the purpose of the call (a
  // unit) in errors. All ranks must give the same label, which tells units of one size apart. In
  // the shapes N is size(). Tensors are contiguous. libzero's own backends (on the CPU) add in rank
  // order 0..N-1 with fp32 accumulation (fp64 for fp64) for fp32, bf16 and fp16, and round once;
  // the result is bit-identical on every rank and for every chunking. All throw CommError.

  // A `wire` makes arrays of Float, BFloat16 or Half cross between hosts in fewer bytes (LinkWire).
  // It has no effect if all ranks are on one host. A group over a foreign backend that spans hosts
  // throws CommError, since that backend cannot encode (see `codes`).

  /// output (N * n), input (n): output = the ranks' inputs in rank order. `input` may be this
  /// rank's slice of `output`. With a `wire` all ranks take the values that the messages carry,
  /// even for their own slices, so all have the same bits. The wire must not have an `error`.
  Work all_gather(at::Tensor output, at::Tensor input, std::string_view label = "",
                  std::optional<LinkWire> wire = {});
  /// output (n), input (N * n): output = slice `rank` of the sum over ranks. `output` may be this
  /// rank's slice of `input`. If `output` is fp32 and `input` is bf16 or fp16, the sum is not
  /// rounded. With a quantised `wire` each host quantises its exact sum once; the host that the
  /// slice is on adds its own sum unquantised. The sums are added in host order and rounded once.
  Work reduce_scatter(at::Tensor output, at::Tensor input, std::string_view label = "",
                      std::optional<LinkWire> wire = {});
  /// Returns the dtype in which reduce_scatter sends an input of dtype `input` whose sum has dtype
  /// `output`. It is `input`; over a foreign backend, which adds in one dtype only, it is the wider
  /// of the two.
  at::ScalarType sent_dtype(at::ScalarType input, at::ScalarType output) const;
  /// Returns whether libzero's own transport carries the tensors, which encodes them by a `wire`:
  /// on the CPU, and with ThroughHost on a device.
  bool codes() const;
  /// Returns the bytes of LinkWire::error for sums whose slices have `slice_numel` elements: about
  /// 1 for each element that this rank sends, 0 on one host.
  int64_t feedback_bytes(const Quantisation& quantisation, int64_t slice_numel) const;
  /// tensor = the sum over ranks, in place.
  Work all_reduce(at::Tensor tensor, std::string_view label = "");
  /// tensor = `root`'s tensor, in place.
  Work broadcast(at::Tensor tensor, int root, std::string_view label = "");
  /// output (N * n), input (N * n): slice r of output = slice `rank` of rank r's input.
  Work all_to_all(at::Tensor output, at::Tensor input, std::string_view label = "");
  /// Returns when every rank has called it. Blocks.
  void barrier(std::string_view label = "");

  /// These do all_gather and all_reduce for scalars and checks. They block, and the traffic counts
  /// them as control.
  void all_gather_control(at::Tensor output, at::Tensor input, std::string_view label = "");
  void all_reduce_control(at::Tensor tensor, std::string_view label = "");

  /// Gives this rank up: its peers' calls under way, and all their later ones, throw a CommError
  /// with `why`. Does nothing if the transport cannot tell the peers.
  void abandon(std::string_view why);

  /// Returns the place where this rank shows what it does between its calls. The other ranks of its
  /// host name it in their errors when they wait for this rank in vain (zero::ShownOperators shows
  /// operators). The group and its subgroups share one.
  const std::shared_ptr<RankActivity>& activity();

  /// Returns a store in which these ranks can meet, under keys that nobody else uses, for another
  /// library. Collective. Throws CommError if the transport has none; those of zero::init and
  /// run_as_threads have one.
  c10::intrusive_ptr<c10d::Store> store();

  /// Returns the group of `ranks`, whose rank i is ranks[i]. `ranks` are numbers in this group, in
  /// ascending order, with this rank's among them, and as many on each host, in order. Collective
  /// among them. It counts in this group's accounts. Throws CommError if the transport cannot
  /// make it; those of zero::init and run_as_threads can.
  ///
  /// Works of this group that are under way should have been waited for. Over MPI (ZERO_TRANSPORT)
  /// they must be: MPI has one thread, which moves no bytes while it makes a group, so a rank that
  /// still waits for such a work would never come to make the group.
  std::shared_ptr<Group> subgroup(std::span<const int> ranks);

  /// Returns all that is counted, for another group of this rank.
  const Accounts& accounts() const;
  /// Returns the calls and bytes of each collective.
  Traffic& traffic();
  /// Returns the bytes of each category. The engine charges this ledger too.
  const std::shared_ptr<Ledger>& ledger() const;
  /// Returns the milliseconds that this rank has spent inside Work::wait, Window::wait and the
  /// blocking collectives.
  double wait_ms() const;
  /// Returns for how long this rank's link to other hosts has been busy, and has stood still and
  /// why, since the job's group was made; all groups of the rank share it. The difference of two
  /// answers adds up to the time between them. Null if all ranks are on one host, or another
  /// library than libzero carries the tensors.
  std::optional<LinkTimes> link_times() const;
  /// Measures the link between the hosts (link_probe.h), unless a group of the job has done so
  /// before, and returns the same speed on all ranks. Null where `link_times` is, and if all ranks
  /// of this group are on one host. Collective. Throws CommError.
  std::optional<LinkSpeed> measure_link();
  /// Returns the speed that was measured, or null.
  std::optional<LinkSpeed> link_speed() const;

 private:
  friend std::shared_ptr<Group> on_device(
      std::shared_ptr<Group> host, c10::Device device,
      std::function<c10::intrusive_ptr<c10d::Backend>(Group& ranks)> make);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes the backend that carries a device's tensors between the given ranks.
using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(Group& ranks)>;

/// Returns a group of the ranks of `host` whose collectives take tensors on `device`. `make` makes
/// the backend that carries them: it is called once, and once for each subgroup, but never for a
/// group of one. Without it libzero's plugin for such devices is loaded and carries them (for CUDA
/// by NCCL); throws ConfigError if there is none. Control, liveness and all that is counted stay
/// those of `host`. Work::wait does not block there: work that this thread enqueues afterwards on
/// its current stream runs after the collective. When the group goes, the plugin's backend first
/// completes the calls under way, unless the group has failed.
std::shared_ptr<Group> on_device(std::shared_ptr<Group> host, c10::Device device,
                                 MakeBackend make = {});

/// Returns a group of one: every collective returns at once, nothing is shared.
std::shared_ptr<Group> single(Accounts accounts = {});

/// Returns the shared-memory group of `size` ranks of this host that meet in `store`. Collective.
/// Throws CommError if the ranks are not on one host, or a rank does not arrive within the
/// timeout.
std::shared_ptr<Group> shared_memory_group(c10::intrusive_ptr<c10d::Store> store, int rank,
                                           int size, GroupOptions options = {});

/// Runs `body` on `size` ranks that are threads of this process, over an in-process store and the
/// same shared-memory backend; for tests and experiments. Rethrows the first failure once all ranks
/// have ended.
void run_as_threads(int size, const std::function<void(std::shared_ptr<Group>)>& body,
                    GroupOptions options = {});

/// Runs `body` in the same way on `hosts` x `local_size` ranks; a rank shares memory only with
/// those of its host.
void run_as_hosts(int hosts, int local_size,
                  const std::function<void(std::shared_ptr<Group>)>& body,
                  GroupOptions options = {});

}  // namespace zero::comm

namespace zero {

/// Returns the group that the environment describes: that of torchrun (RANK, WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT), mpirun, Slurm or `zero launch`; without any of them a group of one.
/// Ranks on one host share memory. Several hosts must have equally many ranks, which also send
/// messages between hosts (hosts_group.h, docs/clusters.md). Throws CommError or ConfigError naming
/// the variable that is wrong.
std::shared_ptr<comm::Group> init(comm::GroupOptions options = {});

}  // namespace zero
