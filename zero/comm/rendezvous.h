// How the ranks of a job find each other: the launcher's words in the environment, and the store
// where they meet.
//
// Note [Rendezvous]
// 1. The environment gives a rank, a world size and perhaps an address (Job). 2. Every rank opens
// the same c10d store. torchrun and `zero launch` host it themselves. If anyone else gives an
// address, rank 0 hosts the store there. Without an address (mpirun, srun) the ranks are on one
// host: rank 0 listens on a free port of the loopback interface and writes the port to a file that
// only this user can read. The file also names rank 0's process and the moment it started, so that
// nobody believes the file of a crashed job. The file's name contains the host's, since hosts may
// share the folder. 3. Roll call: each rank signs in with its host. Once all have, rank 0 removes
// the file, tells the others to go on, and says which rank is on which host. When the time is up,
// every rank that is there names those that are missing. See Note [Roll call]. 4. Ranks that have
// named one host share memory; several hosts are joined by hosts_group.h. The ranks know the hosts
// better than the launcher, which is not asked again.
//
// Note [Roll call]
// A launcher that starts a job again keeps its store, with everything that earlier attempts have
// written there. The ranks do not know the number of their attempt: each of torchrun's agents
// counts its own restarts, and an agent that only hears that others want to meet anew does not
// count. So rank 0 names each meeting afresh, `current` holds the newest name, and the others sign
// in there.
// - If a meeting was complete before a rank has signed in, that rank does not belong to it and
//   waits for the next.
// - A meeting that is not complete may still be of an attempt that died while it met. So a rank
//   that has signed in and waits looks at `current` now and then, and signs in anew if that has
//   changed. Nobody completes the old meeting any more: its rank 0 has ended, since an agent ends
//   its old ranks before it agrees with the others to start new ones.
// A process that makes one group after the other uses the same rules.
//
// Note [Trust]
// A store answers anybody who reaches it. So ours (torchrun brings its own) listens on one address
// alone: the loopback interface, or the one that MASTER_ADDR or the launcher names. The job's keys
// begin with a random token, which the ranks have from their launcher's environment, from the file,
// or, under other launchers and across hosts, from rank 0 at the roll call. Somebody who sees the
// store's keys or guesses right can keep a job from starting, but not more: memory is passed over a
// socket of which the kernel says which user and process is at the other end (shm_meeting.cpp), and
// bytes that peers write there are checked before use. Between hosts there is no such kernel:
// whoever can read the traffic of the network can read the token too.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "zero/comm/job.h"
#include "zero/comm/topology.h"

namespace zero::comm {

/// Returns the folder of the files in which rank 0 says where it listens. It is under TMPDIR, open
/// to this user alone, and made if absent. Throws ConfigError if another user owns it.
std::filesystem::path rendezvous_folder();

/// A rank as it signed in.
struct Attendant {
  std::string host{};       ///< for messages
  std::string address{};    ///< its host's, by which it reaches the store; empty if unknown
  std::string transport{};  ///< Job::transport
  std::string machine{};    ///< Process::machine: the same for ranks that can share memory
};

/// All that a rank knows when the ranks of its job have met.
struct Joined {
  c10::intrusive_ptr<c10d::Store> store{};
  std::string store_address{};  ///< this rank reaches the store there
  uint16_t store_port = 0;
  std::vector<Attendant> ranks{};

  /// Says which ranks share a host.
  Topology topology(int rank) const;
  /// Returns this host's address for ranks on other hosts. Throws as rail_address does.
  std::string address() const;
};

/// Returns the store of `job`, once all its ranks are there (see Note [Rendezvous]). Blocks. May be
/// called again: every call of all ranks gives a fresh store. Throws CommError naming the address;
/// or the ranks that did not arrive within `timeout`; or, if the hosts do not have equally many
/// ranks, one after the other, the ranks of each host and the launcher's remedy. Throws ConfigError
/// if the ranks of several hosts ask for different transports.
Joined join_store(const Job& job, std::chrono::milliseconds timeout,
                  const std::filesystem::path& folder);

/// A store that this process hosts on the loopback interface alone, and the free port that it got.
/// It answers while it lives.
struct LocalStore {
  c10::intrusive_ptr<c10d::Store> store;
  uint16_t port = 0;
};
LocalStore host_local_store(std::chrono::milliseconds timeout);

/// Hosts a store at `address` of this host, for ranks on other hosts too. Throws CommError.
c10::intrusive_ptr<c10d::Store> host_store(const std::string& address, uint16_t port,
                                           std::chrono::milliseconds timeout);
/// Connects to a store there; returns null if it does not answer within `timeout`.
c10::intrusive_ptr<c10d::Store> reach_store(const std::string& address, uint16_t port,
                                            std::chrono::milliseconds timeout);
inline constexpr const char* kLoopback = "127.0.0.1";

}  // namespace zero::comm
