// A process's place among the ranks of its job, as its launcher says in the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace zero::comm {

/// The place of this process among the ranks of its job.
struct Job {
  std::string launcher{};  ///< "torchrun", "mpirun", "MPICH" or "Slurm"; empty without a launcher
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< among the ranks of this host
  int local_size = 1;
  std::string host{};                 ///< where the store listens
  uint16_t port = 0;                  ///< 0: rank 0 chooses, and says which in a file
  bool launcher_hosts_store = false;  ///< then every rank is a client of it
  std::string key{};                  ///< this job's name among the jobs of this host and user
  /// Of the keys in the store: a restarted job must not read its predecessor's. Ends with the
  /// launcher's token where there is one.
  std::string prefix{};
};

/// The value of an environment variable, or nothing where it is not set.
using Lookup = std::function<std::optional<std::string>(const std::string& name)>;
std::optional<std::string> environment_variable(const std::string& name);

/// What the environment says. The first of these that is there decides: RANK or WORLD_SIZE
/// (torchrun, `zero launch`, which also sets kTokenVariable), OMPI_COMM_WORLD_* (mpirun), PMI_*
/// (MPICH), SLURM_* inside a job step.
/// Throws ConfigError for a variable that is missing or cannot be used, with its name, its value
/// and what it should be.
Job job_from_environment(const Lookup& variable = environment_variable);

}  // namespace zero::comm
