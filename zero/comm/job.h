// A process's place among the ranks of its job, as its launcher says in the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace zero::comm {

/// The environment variable by which `zero launch` says that it has started a rank; its other
/// variables are torchrun's.
inline constexpr const char* kLauncherVariable = "ZERO_LAUNCHER";
inline constexpr const char* kOwnLauncher = "zero launch";

/// Job::key begins with it where all that is known of a job is who has started its ranks.
inline constexpr const char* kParentKey = "parent-";

/// The place of this process among the ranks of its job.
struct Job {
  /// "torchrun", "zero launch", "mpirun", "MPICH" or "Slurm"; empty without a launcher.
  std::string launcher{};
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< among the ranks of this host
  int local_size = 1;
  /// Where the store listens: at the first of these that is an address of rank 0's host. Empty:
  /// all ranks are on one host, and rank 0 says in a file where.
  std::vector<std::string> addresses{};
  uint16_t port = 0;                  ///< of `addresses`
  bool launcher_hosts_store = false;  ///< then every rank is a client of it
  std::string key{};                  ///< this job's name among the jobs of this host and user
  /// Of the keys in the store, the same on all ranks. Ends with the launcher's token where there is
  /// one.
  std::string prefix{};
  /// What ZERO_TRANSPORT asks for, which all ranks must agree about.
  std::string transport = "gloo";

  /// Whether its launcher says that the ranks are on several hosts.
  bool across_hosts() const { return local_size != size; }
};

/// The value of an environment variable, or nothing where it is not set.
using Lookup = std::function<std::optional<std::string>(const std::string& name)>;
std::optional<std::string> environment_variable(const std::string& name);

/// What the environment says. The first of these that is there decides: RANK or WORLD_SIZE
/// (torchrun, `zero launch`, which also sets kLauncherVariable), OMPI_COMM_WORLD_* (mpirun of
/// OpenMPI), SLURM_* inside a job step that srun started, PMI_* (MPICH's mpiexec).
///
/// Ranks on several hosts need an address: MASTER_ADDR, and MASTER_PORT, of whoever sets them; else
/// what the launcher knows: the host of mpirun, or the first node of a Slurm step, and a port that
/// follows from the job's number.
///
/// Throws ConfigError for a variable that is missing or cannot be used, with its name, its value
/// and what it should be.
Job job_from_environment(const Lookup& variable = environment_variable);

/// ZERO_TRANSPORT: what is to carry bytes between hosts, "gloo" (also where it is not set),
/// "openmpi" or "mpich"; "mpi" where that was asked for and no mpirun has started this process.
/// Throws ConfigError.
std::string transport_from_environment(const Lookup& variable = environment_variable);

/// ZERO_SUM_BLOCK: GroupOptions::block for `zero::init`, so that a run on one host has the bits of
/// a run on several of so many ranks each. 0 where it is not set. Throws ConfigError.
int sum_block_from_environment(const Lookup& variable = environment_variable);

}  // namespace zero::comm
