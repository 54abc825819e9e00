#include "zero/comm/job.h"

#include <ATen/ceil_div.h>
#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/token.h"

namespace zero::comm {
namespace {

/// Reads whole numbers from environment variables, in the words of the launcher that should have
/// set them.
class Variables {
 public:
  Variables(const Lookup& lookup, std::string launcher)
      : lookup_(lookup), launcher_(std::move(launcher)) {}

  bool has(const std::string& name) const { return lookup_(name).has_value(); }

  /// The variable `name`, which must be there because `partner` is.
  std::string text(const std::string& name, const std::string& partner) const {
    const auto value = lookup_(name);
    if (!value) {
      throw ConfigError(
          fmt::format("The environment variable {} is not set, but {} is: {} sets both. Set it, or "
                      "unset the other.",
                      name, partner, launcher_));
    }
    return *value;
  }

  int number(const std::string& name, const std::string& partner, int least, int most) const {
    return parse(name, text(name, partner), least, most);
  }

  int number_or(const std::string& name, int otherwise, int least, int most) const {
    const auto value = lookup_(name);
    return value ? parse(name, *value, least, most) : otherwise;
  }

  /// Both or neither: the rank must be below the size.
  std::pair<int, int> rank_and_size(const std::string& rank, const std::string& size) const {
    const int n = number(size, rank, 1, kMost);
    const int r = number(rank, size, 0, kMost);
    require_below(rank, r, size, n);
    return {r, n};
  }

  void require_below(const std::string& rank, int r, const std::string& size, int n) const {
    if (r < n) return;
    throw ConfigError(
        fmt::format("The environment variable {} is {}, but {} is {}: a rank is between 0 and {}. "
                    "{} sets both.",
                    rank, r, size, n, n - 1, launcher_));
  }

  static constexpr int kMost = 1'000'000;

 private:
  int parse(const std::string& name, const std::string& value, int least, int most) const {
    int number = 0;
    const char* end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, number);
    if (error == std::errc{} && stop == end && number >= least && number <= most) return number;
    throw ConfigError(fmt::format(
        "The environment variable {} is '{}'; it should be a whole number from {} to {}.", name,
        value, least, most));
  }

  const Lookup& lookup_;
  std::string launcher_;
};

/// MASTER_ADDR and MASTER_PORT, where they are set.
void read_address(const Variables& variables, Job& job) {
  if (!variables.has("MASTER_ADDR") && !variables.has("MASTER_PORT")) return;
  job.host = variables.text("MASTER_ADDR", "MASTER_PORT");
  if (job.host.empty()) {
    throw ConfigError(
        "The environment variable MASTER_ADDR is ''; it should be the host name or address of rank "
        "0.");
  }
  job.port = static_cast<uint16_t>(variables.number("MASTER_PORT", "MASTER_ADDR", 1, 65535));
}

void read_local(const Variables& variables, const std::string& rank, const std::string& size,
                Job& job) {
  job.local_size = variables.number_or(size, job.size, 1, Variables::kMost);
  job.local_rank = variables.number_or(
      rank, variables.has(size) ? job.rank % job.local_size : job.rank, 0, Variables::kMost);
  variables.require_below(rank, job.local_rank, size, job.local_size);
}

Job torchrun_job(const Lookup& lookup) {
  const Variables variables(lookup, "torchrun");
  Job job{.launcher = "torchrun"};
  std::tie(job.rank, job.size) = variables.rank_and_size("RANK", "WORLD_SIZE");
  read_local(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE", job);
  read_address(variables, job);
  if (job.size > 1 && job.port == 0) {
    throw ConfigError(fmt::format(
        "The environment variables MASTER_ADDR and MASTER_PORT are not set, but WORLD_SIZE is {}. "
        "torchrun and "
        "`zero launch` set them; by hand, give the host of rank 0 and a free port there.",
        job.size));
  }
  job.launcher_hosts_store = lookup("TORCHELASTIC_USE_AGENT_STORE") == "True";
  job.prefix = fmt::format(
      "zero/attempt_{}", variables.number_or("TORCHELASTIC_RESTART_COUNT", 0, 0, Variables::kMost));
  if (const auto token = lookup(kTokenVariable)) {
    if (!is_token(*token)) {
      throw ConfigError(fmt::format(
          "The environment variable {} has {} characters that are not a token; it should "
          "be the 32 hexadecimal digits that `zero launch` sets. Unset it.",
          kTokenVariable, token->size()));
    }
    job.prefix += "/" + *token;
  }
  return job;
}

Job open_mpi_job(const Lookup& lookup) {
  const Variables variables(lookup, "mpirun");
  Job job{.launcher = "mpirun"};
  std::tie(job.rank, job.size) =
      variables.rank_and_size("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  read_local(variables, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", job);
  read_address(variables, job);
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (const auto id = lookup(name); id && job.key.empty()) job.key = "ompi-" + *id;
  }
  return job;
}

Job mpich_job(const Lookup& lookup) {
  const Variables variables(lookup, "mpiexec");
  Job job{.launcher = "MPICH"};
  std::tie(job.rank, job.size) = variables.rank_and_size("PMI_RANK", "PMI_SIZE");
  read_local(variables, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job);
  read_address(variables, job);
  return job;
}

Job slurm_job(const Lookup& lookup) {
  const Variables variables(lookup, "srun");
  Job job{.launcher = "Slurm"};
  // A step may have fewer tasks than its job.
  const char* size =
      variables.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  std::tie(job.rank, job.size) = variables.rank_and_size("SLURM_PROCID", size);
  const char* nodes =
      variables.has("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES";
  const int hosts = variables.number_or(nodes, 1, 1, Variables::kMost);
  job.local_size = hosts == 1 ? job.size : at::ceil_div(job.size, hosts);
  job.local_rank =
      variables.number_or("SLURM_LOCALID", job.rank % job.local_size, 0, Variables::kMost);
  read_address(variables, job);
  if (const auto id = lookup("SLURM_JOB_ID")) {
    job.key = fmt::format("slurm-{}.{}", *id, lookup("SLURM_STEP_ID").value_or("0"));
  }
  return job;
}

/// A batch script also has SLURM_PROCID, but only the tasks that srun starts are ranks: those have
/// a step.
bool is_slurm_step(const Lookup& lookup) {
  return lookup("SLURM_PROCID") && (lookup("SLURM_STEP_ID") || !lookup("SLURM_JOB_ID"));
}

}  // namespace

std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

Job job_from_environment(const Lookup& variable) {
  Job job;
  if (variable("RANK") || variable("WORLD_SIZE")) {
    job = torchrun_job(variable);
  } else if (variable("OMPI_COMM_WORLD_RANK") || variable("OMPI_COMM_WORLD_SIZE")) {
    job = open_mpi_job(variable);
  } else if (variable("PMI_RANK") || variable("PMI_SIZE")) {
    job = mpich_job(variable);
  } else if (is_slurm_step(variable)) {
    job = slurm_job(variable);
  }
  // The ranks of one host are children of one launcher.
  if (job.key.empty()) job.key = fmt::format("parent-{}", getppid());
  if (job.prefix.empty()) job.prefix = "zero/attempt_0";
  return job;
}

}  // namespace zero::comm
