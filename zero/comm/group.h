// A group of ranks: the collectives that ZeRO is made of, over c10d's Backend.
//
// Every rank of a group issues the same collectives in the same order. A rank that does not is
// named in a CommError on every rank (see Note [Matching] in shm_collectives.cpp). A group of one
// returns at once from everything.
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
#include "zero/comm/link_wire.h"
#include "zero/comm/topology.h"
#include "zero/comm/traffic.h"
#include "zero/comm/transport.h"
#include "zero/comm/work.h"

namespace zero::comm {

/// How a group is made.
struct GroupOptions {
  /// A peer that keeps a collective waiting for longer is reported by name in a CommError. A dead
  /// peer is reported at once. Of more than a year, a year counts.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// On one host: sums add blocks of so many ranks, each in order, and then the blocks' sums, as a
  /// group on several hosts of so many ranks adds. So its results are theirs, bit for bit. 0: all
  /// ranks are one block.
  int block = 0;
};

/// What a rank publishes to other hosts. On one host they read it where it is.
struct Published {
  at::Tensor whole{};  ///< the slot, (N * n), of the window's memory: N is the group's size
  /// This rank's values, (n). Part of `whole`, or elsewhere: then they are put there too.
  at::Tensor slice{};
  std::string_view label{};  ///< of what it is (a unit's name), in errors
  /// Between hosts as Group::all_gather has it. Then the slot is what the messages say.
  std::optional<LinkWire> wire{};
};

/// One array that all ranks of a host share: each rank writes its own parts of it, and all read the
/// whole without the owners' help and without a copy. On several hosts each has one, and what is
/// published goes to the others', once, whatever is read of it and however often.
///
/// Note [Epochs]
/// A window's array is divided by its user into parts and `slots` (libzero: a slot is a unit, of
/// which every rank owns a slice). Each (rank, slot) carries an epoch. The owner writes its part of
/// a slot only when the peers have agreed that nobody still reads it (libzero: after the step's
/// small all-reduce, which every rank enters once its gathers are done), then publishes the next
/// epoch; readers wait for the epoch that they expect. So a gather needs no matching call of the
/// peers, and moves no byte. Between hosts `publish` is an all-gather: rank (h, r) puts what (h',
/// r) publish into the array of host h, and only then is its epoch seen there.
class Window {
 public:
  /// Frees the array: to be done only when the peers have agreed that nobody uses it any more.
  virtual ~Window() = default;
  /// The array: a 1-D uint8 tensor, zero-filled at first, valid while the window lives. This rank
  /// writes its own parts alone.
  virtual at::Tensor memory() = 0;
  /// The same bytes for reading. What this rank writes here nobody else sees, and the pages (4 KiB)
  /// that it wrote to do not follow the array any more until `discard`. In a group of one it is the
  /// array itself: there is nobody else, and a second copy of what is written would take memory.
  virtual at::Tensor view() = 0;
  /// Forgets what this rank wrote to the view: it shows the array again. In a group of one that is
  /// the array already, and nothing is forgotten.
  virtual void discard() = 0;
  /// Makes what this rank wrote to its part of `slot` visible to readers that wait for `epoch`.
  /// Epochs of a slot only grow. On several hosts needs `what`, is a collective in order with the
  /// group's others, and is asynchronous: the slice must not be written until `settle`.
  virtual void publish(int64_t slot, uint64_t epoch, const Published& what = {}) = 0;
  /// Waits until all that this rank has published is on every host, and what theirs have is here:
  /// to be done before peers agree that nobody uses the array. Throws CommError.
  virtual void settle() {}
  /// Blocks until `rank` has published at least `epoch` for `slot`. Throws CommError if that rank
  /// dies, leaves, or keeps this one waiting for longer than the group's timeout; `label` says on
  /// whose behalf (a unit's name).
  virtual void wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) = 0;
};

/// Owns what it counts (Accounts) and knows where its ranks are (Topology); a Transport carries it.
class Group {
 public:
  /// `accounts` are the group's own, or another's of this rank that shall count this one's too.
  Group(Transport transport, GroupOptions options = {}, Accounts accounts = {});
  /// Over any c10d backend, data and control; `backend` null means a group of one.
  Group(c10::intrusive_ptr<c10d::Backend> backend, GroupOptions options = {});
  virtual ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  /// What this rank is among the ranks of its job, as errors name it.
  int number() const;
  int size() const;
  /// Where the tensors of its collectives are; those of control collectives are on the CPU.
  c10::Device device() const;
  /// Which ranks share a host.
  const Topology& topology() const;
  /// Ranks of this host and this rank's place among them (for thread counts and logs).
  int local_rank() const { return topology().local_rank; }
  int local_size() const { return topology().local_size; }

  /// A 1-D tensor of `numel` elements, uninitialised, on which collectives work in place: the peers
  /// read it where it is. Charged to `category` of the ledger while its storage lives. A group of
  /// one, or a transport without shared memory, gives ordinary memory of its device. Throws
  /// OutOfMemory. Not a
  /// collective: ranks may allocate in any order.
  at::Tensor empty(int64_t numel, at::ScalarType dtype, Category category);

  /// A shared array of `bytes` bytes, a multiple of the number of ranks, with `slots` epochs a rank
  /// (see Window), or null where the transport has none. Collective. Each rank charges its share,
  /// bytes / local_size(), to `category`: a host holds one copy.
  std::unique_ptr<Window> window(int64_t bytes, int64_t slots, Category category);
  /// Whether `window` gives one.
  bool has_windows() const;

  // The collectives. Each is asynchronous: every tensor must live, and must not be written (nor
  // read, if it is an output), until Work::wait returns. `label` names the caller's business (a
  // unit) in errors; the ranks' labels must agree, which tells units of one size apart. Shapes: N
  // is size(). Tensors are contiguous. Reductions add in rank order 0..N-1 with fp32 accumulation
  // (fp64 for fp64) for fp32, bf16 and fp16, and round once; the result is bit-identical on every
  // rank and for every chunking.

  // With a `wire` arrays of Float, BFloat16 or Half cross between hosts quantised. Where all ranks
  // are on one host nothing crosses, and it has no effect. Throws CommError where the group is over
  // a foreign backend that spans hosts: that one sends what it is given.

  /// output (N * n), input (n): output = the ranks' inputs in rank order. `input` may be this
  /// rank's slice of `output`. With a `wire` the output is what the messages say, this rank's own
  /// slice too: the same bits on all ranks. It must not have an `error`.
  Work all_gather(at::Tensor output, at::Tensor input, std::string_view label = "",
                  std::optional<LinkWire> wire = {});
  /// output (n), input (N * n): output = slice `rank` of the sum over ranks. `output` may be this
  /// rank's slice of `input`. `output` may be fp32 where `input` is bf16 or fp16: then the sum is
  /// not rounded. With a `wire` a host's exact sums leave it quantised, once; the sum of the host
  /// that the slice is on enters as it is. Added in host order, and rounded once.
  Work reduce_scatter(at::Tensor output, at::Tensor input, std::string_view label = "",
                      std::optional<LinkWire> wire = {});
  /// The dtype in which reduce_scatter sends an input of dtype `input` whose sum has dtype
  /// `output`: `input`, but over another backend, which adds one dtype only, the wider of them.
  at::ScalarType sent_dtype(at::ScalarType input, at::ScalarType output) const;
  /// Bytes of LinkWire::error for sums whose slices have `slice_numel` elements: about 1 for each
  /// element that this rank sends, 0 on one host.
  int64_t feedback_bytes(const Quantisation& quantisation, int64_t slice_numel) const;
  /// In place: tensor = the sum over ranks.
  Work all_reduce(at::Tensor tensor, std::string_view label = "");
  /// In place: tensor = `root`'s tensor.
  Work broadcast(at::Tensor tensor, int root, std::string_view label = "");
  /// output (N * n), input (N * n): slice r of output = slice `rank` of rank r's input.
  Work all_to_all(at::Tensor output, at::Tensor input, std::string_view label = "");
  /// Returns when every rank has called it. Blocks.
  void barrier(std::string_view label = "");

  /// Same as all_gather and all_reduce, blocking, for scalars and checks: kept apart in the traffic
  /// ledger.
  void all_gather_control(at::Tensor output, at::Tensor input, std::string_view label = "");
  void all_reduce_control(at::Tensor tensor, std::string_view label = "");

  /// This rank gives up: every call of its peers under way, and all later ones, throw a CommError
  /// with `why`. Nothing where the transport cannot tell them.
  void abandon(std::string_view why);

  /// What this rank does between its calls; the others of its host see it, for their errors where
  /// they wait for it in vain (zero::ShownOperators shows operators). One for it and its subgroups.
  const std::shared_ptr<RankActivity>& activity();

  /// A store in which these ranks can meet, under keys that nobody else uses: for another library
  /// of theirs. Collective. Throws CommError where the transport has none: those of zero::init and
  /// of run_as_threads have.
  c10::intrusive_ptr<c10d::Store> store();

  /// The group of `ranks` (numbers in this group, ascending, this rank's among them; as many on
  /// each host, in order), whose rank i is ranks[i]. Collective among them. It counts in this
  /// group's accounts. Throws CommError where the transport cannot make it: those of zero::init and
  /// of run_as_threads can.
  ///
  /// Works of this group that are under way should have been waited for. Over an MPI
  /// (ZERO_TRANSPORT) they must: MPI has one thread, which moves no bytes while it makes a group,
  /// so a rank that still waits for one of these would never come to make the group too.
  std::shared_ptr<Group> subgroup(std::span<const int> ranks);

  /// All that is counted, for another group of this rank.
  const Accounts& accounts() const;
  /// Calls and bytes by collective.
  Traffic& traffic();
  /// Bytes by category. The engine charges this ledger too.
  const std::shared_ptr<Ledger>& ledger() const;
  /// Milliseconds that this rank has spent inside Work::wait, Window::wait and the blocking
  /// collectives.
  double wait_ms() const;

 private:
  friend std::shared_ptr<Group> on_device(
      std::shared_ptr<Group> host, c10::Device device,
      std::function<c10::intrusive_ptr<c10d::Backend>(Group& ranks)> make);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes what carries tensors of a device between the ranks of a group of the host's.
using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(Group& ranks)>;

/// The ranks of `host`, with collectives of tensors on `device`, which the backend carries that
/// `make` gives (it is asked once, and once for each subgroup; of a group of one never). Without it
/// libzero's plugin for such devices is loaded, and carries them: NCCL, for CUDA. Throws
/// ConfigError where there is none. Control, liveness and all that is counted stay those of `host`.
/// Work::wait does not block there: what this thread enqueues afterwards, on its current stream,
/// runs after the collective.
/// What the plugin's backend has under way when the group goes is completed first, unless the group
/// has failed.
std::shared_ptr<Group> on_device(std::shared_ptr<Group> host, c10::Device device,
                                 MakeBackend make = {});

/// A group of one: every collective returns at once, nothing is shared.
std::shared_ptr<Group> single(Accounts accounts = {});

/// The shared-memory group of `size` ranks of this host that meet in `store`. Collective. Throws
/// CommError where the ranks are not on one host, or a rank does not arrive within the timeout.
std::shared_ptr<Group> shared_memory_group(c10::intrusive_ptr<c10d::Store> store, int rank,
                                           int size, GroupOptions options = {});

/// Runs `body` on `size` ranks that are threads of this process, over an in-process store and the
/// same shared-memory backend; for tests and experiments. Rethrows the first failure once all ranks
/// have ended.
void run_as_threads(int size, const std::function<void(std::shared_ptr<Group>)>& body,
                    GroupOptions options = {});

/// The same for `hosts` x `local_size` ranks, which share memory with those of their host alone.
void run_as_hosts(int hosts, int local_size,
                  const std::function<void(std::shared_ptr<Group>)>& body,
                  GroupOptions options = {});

}  // namespace zero::comm

namespace zero {

/// The group that the environment describes: torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
/// mpirun, Slurm or `zero launch`; without any of them a group of one. Ranks on one host share
/// memory; on several, as many on each, they also send messages (hosts_group.h, docs/clusters.md).
/// Throws CommError or ConfigError naming the variable that is wrong.
std::shared_ptr<comm::Group> init(comm::GroupOptions options = {});

}  // namespace zero
