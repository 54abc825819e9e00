// A process's place among the ranks of its job, as its launcher passes it in the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace zero::comm {

/// `zero launch` says in this environment variable that it has started a rank; its other variables
/// are torchrun's.
inline constexpr const char* kLauncherVariable = "ZERO_LAUNCHER";
inline constexpr const char* kOwnLauncher = "zero launch";
/// torchrun's and zero launch's number of the attempt, from 0.
inline constexpr const char* kRestartVariable = "TORCHELASTIC_RESTART_COUNT";

/// Job::key begins with it if all that is known of a job is the process that has started its ranks.
inline constexpr const char* kParentKey = "parent-";

/// The place of this process among the ranks of its job.
struct Job {
  /// "torchrun", "zero launch", "mpirun", "MPICH" or "Slurm"; empty without a launcher.
  std::string launcher{};
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< among the ranks of this host
  int local_size = 1;
  /// The store listens at the first of these that is an address of rank 0's host. Empty if all
  /// ranks are on one host: then rank 0 says in a file where the store listens.
  std::vector<std::string> addresses{};
  uint16_t port = 0;                  ///< the port at `addresses`
  bool launcher_hosts_store = false;  ///< then every rank is a client of it
  std::string key{};                  ///< this job's name among the jobs of this host and user
  /// All keys in the store begin with it. It is the same on all ranks, and ends with the launcher's
  /// token if there is one.
  std::string prefix{};
  /// The value of ZERO_TRANSPORT, about which all ranks must agree.
  std::string transport = "gloo";

  /// Returns true if the launcher says that the ranks are on several hosts.
  bool across_hosts() const { return local_size != size; }
};

/// Returns the value of an environment variable, or nothing if it is not set.
using Lookup = std::function<std::optional<std::string>(const std::string& name)>;
std::optional<std::string> environment_variable(const std::string& name);

/// Reads the job from the environment. The first group of variables that is there decides: RANK or
/// WORLD_SIZE (torchrun, and `zero launch`, which also sets kLauncherVariable), OMPI_COMM_WORLD_*
/// (mpirun of OpenMPI), SLURM_* inside a job step that srun started, PMI_* (MPICH's mpiexec).
///
/// Ranks on several hosts need an address. They take it from MASTER_ADDR and MASTER_PORT if these
/// are set, otherwise from the launcher: the host of mpirun, or the first node of a Slurm step, and
/// a port that follows from the job's number.
///
/// Throws ConfigError for a variable that is missing or cannot be used, with its name, its value
/// and what it should be.
Job job_from_environment(const Lookup& variable = environment_variable);

/// `zero launch` says in it how many ranks the job had at first.
inline constexpr const char* kFirstRanksVariable = "ZERO_FIRST_RANKS";

/// In this variable `zero launch` gives the ranks of all attempts of a job the same random name.
inline constexpr const char* kJobVariable = "ZERO_JOB";

/// A job that a launcher may start several times.
struct LaunchedJob {
  std::string name;        ///< the same in all attempts, and different from other jobs' names
  bool restarted = false;  ///< the launcher says that this is not the first attempt
};
/// Returns the jobs that this process belongs to: that of `zero launch` or torchrun, and that of
/// Slurm, which starts a job anew after a requeue (SLURM_RESTART_COUNT). A job of torchrun has the
/// id of its rendezvous as its name. Without an id it is the agent's on one host, and on several
/// hosts the address at which the ranks meet, which a later job may have too. Of several torchrun
/// agents some may not know of a restart.
std::vector<LaunchedJob> launched_jobs(const Lookup& variable = environment_variable);

/// Returns the value of ZERO_TRANSPORT, which carries bytes between hosts: "gloo" (also if it is
/// not set), "openmpi" or "mpich"; "mpi" if that was asked for and no mpirun has started this
/// process. Throws ConfigError.
std::string transport_from_environment(const Lookup& variable = environment_variable);

/// Returns the value of ZERO_SUM_BLOCK, or 0 if it is not set. `zero::init` takes it as
/// GroupOptions::sum_block, so that a run on one host has the bits of a run on several hosts of so
/// many ranks each. Throws ConfigError.
int sum_block_from_environment(const Lookup& variable = environment_variable);

}  // namespace zero::comm
