#include "zero/comm/job.h"

#include <ATen/ceil_div.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/comm/process.h"
#include "zero/comm/token.h"

namespace zero::comm {
namespace {

/// Reads whole numbers from environment variables. Errors name the launcher that should set them.
class Variables {
 public:
  Variables(const Lookup& lookup, std::string launcher)
      : lookup_(lookup), launcher_(std::move(launcher)) {}

  bool has(const std::string& name) const { return lookup_(name).has_value(); }

  /// Returns the variable `name`, which must be there because `partner` is.
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

  /// Reads both variables or neither; the rank must be below the size.
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

/// A place where the ranks can meet, in the launcher's words.
struct Meeting {
  std::vector<std::string> addresses{};  ///< rank 0's host, the likeliest address first
  std::string id{};                      ///< this job's alone, and the same on all hosts
};

/// Returns a port of the job's own, below those that the system gives to clients.
uint16_t port_of(std::string_view id) {
  constexpr uint16_t kFirst = 20'000, kPorts = 12'000;
  return static_cast<uint16_t>(kFirst + Hash().add(id).value() % kPorts);
}

/// Reads MASTER_ADDR and MASTER_PORT if they are set, and takes missing values from the launcher,
/// if the job needs an address at all. `how` says how the launcher passes variables on.
void read_address(const Variables& variables, const Meeting& known, std::string_view how,
                  Job& job) {
  if (!known.id.empty()) job.prefix = "zero/" + known.id;
  const bool said = variables.has("MASTER_ADDR") || variables.has("MASTER_PORT");
  if (!said && !job.across_hosts()) return;
  if (said && (variables.has("MASTER_ADDR") || known.addresses.empty())) {
    job.addresses = {variables.text("MASTER_ADDR", "MASTER_PORT")};
    if (job.addresses[0].empty()) {
      throw ConfigError(
          "The environment variable MASTER_ADDR is ''; it should be the host name or address of "
          "rank 0.");
    }
  } else {
    job.addresses = known.addresses;
  }
  if (job.addresses.empty()) {
    throw ConfigError(fmt::format(
        "{} started {} ranks, {} of them on this host, but does not say where the others can meet "
        "them. Set MASTER_ADDR to the name or address of the host of rank 0, and MASTER_PORT to a "
        "free port there{}.",
        job.launcher, job.size, job.local_size, how));
  }
  job.port = variables.has("MASTER_PORT") || known.id.empty()
                 ? static_cast<uint16_t>(variables.number("MASTER_PORT", "MASTER_ADDR", 1, 65535))
                 : port_of(known.id);
}

void read_local(const Variables& variables, const std::string& rank, const std::string& size,
                Job& job) {
  job.local_size = variables.number_or(size, job.size, 1, Variables::kMost);
  job.local_rank = variables.number_or(
      rank, variables.has(size) ? job.rank % job.local_size : job.rank, 0, Variables::kMost);
  variables.require_below(rank, job.local_rank, size, job.local_size);
}

Job torchrun_job(const Lookup& lookup) {
  // A torchrun that `zero launch` has started inherits that variable.
  const bool own =
      lookup(kLauncherVariable) == kOwnLauncher && !lookup("TORCHELASTIC_RUN_ID").has_value();
  const std::string launcher = own ? kOwnLauncher : "torchrun";
  const Variables variables(lookup, launcher);
  Job job{.launcher = launcher};
  std::tie(job.rank, job.size) = variables.rank_and_size("RANK", "WORLD_SIZE");
  read_local(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE", job);
  if (job.size > 1 && !variables.has("MASTER_ADDR") && !variables.has("MASTER_PORT")) {
    throw ConfigError(fmt::format(
        "The environment variables MASTER_ADDR and MASTER_PORT are not set, but WORLD_SIZE is {}. "
        "torchrun and `zero launch` set them; by hand, give the host of rank 0 and a free port "
        "there.",
        job.size));
  }
  read_address(variables, {}, "", job);
  job.launcher_hosts_store = lookup("TORCHELASTIC_USE_AGENT_STORE") == "True";
  // It has no TORCHELASTIC_RESTART_COUNT, which each agent counts for itself: see Note [Roll call].
  job.prefix = "zero";
  if (const auto token = lookup(kTokenVariable)) {
    if (!is_token(*token)) {
      throw ConfigError(fmt::format(
          "The environment variable {} has {} characters that are not a token; it should be the 32 "
          "hexadecimal digits that `zero launch` sets. Unset it.",
          kTokenVariable, token->size()));
    }
    job.prefix += "/" + *token;
  }
  return job;
}

/// Returns the addresses in a URI of OpenMPI's: "1234.0;tcp://10.0.0.1,10.1.0.1:5678".
std::vector<std::string> addresses_in(std::string_view uri) {
  const auto begin = uri.find("://");
  if (begin == std::string_view::npos) return {};
  uri.remove_prefix(begin + 3);
  uri = uri.substr(0, uri.find(';'));   // the first transport's
  uri = uri.substr(0, uri.rfind(':'));  // without the port
  std::vector<std::string> addresses;
  for (size_t at = 0; at <= uri.size();) {
    const auto end = std::min(uri.find(',', at), uri.size());
    auto address = uri.substr(at, end - at);
    if (address.starts_with('[') && address.ends_with(']')) {
      address = address.substr(1, address.size() - 2);
    }
    if (!address.empty()) addresses.emplace_back(address);
    at = end + 1;
  }
  return addresses;
}

/// Returns the host in a job's name by mpirun of OpenMPI 5: node-1 for "prterun-node-1-4711@1".
std::optional<std::string> host_in(std::string_view name) {
  const auto begin = name.find('-');
  const auto end = name.rfind('-');
  if (!name.starts_with("prte") || begin == std::string_view::npos || end <= begin + 1) {
    return std::nullopt;
  }
  return std::string(name.substr(begin + 1, end - begin - 1));
}

/// Returns the first name in a list of Slurm's: "node[07-09,12],gpu1" begins with node07.
std::string first_node(std::string_view list) {
  std::string name;
  for (size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      name += list[at];
      continue;
    }
    const auto end = std::min(list.find_first_of("-,]", at), list.size());
    name += list.substr(at + 1, end - at - 1);
    at = list.find(']', at);
    if (at == std::string_view::npos) break;
  }
  return name;
}

/// Returns the host where a Slurm step or allocation has its first rank, and the host that asked
/// for it: under sbatch they are the same.
void add_slurm_addresses(const Lookup& lookup, std::vector<std::string>& addresses) {
  for (const char* nodes : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    const auto list = lookup(nodes);
    if (!list) continue;
    if (auto name = first_node(*list); !name.empty()) addresses.push_back(std::move(name));
    break;
  }
  const auto launched_from = lookup("SLURM_LAUNCH_NODE_IPADDR");
  if (launched_from && !launched_from->empty()) addresses.push_back(*launched_from);
}

Job open_mpi_job(const Lookup& lookup) {
  const Variables variables(lookup, "mpirun");
  Job job{.launcher = "mpirun"};
  std::tie(job.rank, job.size) =
      variables.rank_and_size("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  read_local(variables, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", job);
  Meeting known;
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (const auto id = lookup(name); id && job.key.empty()) known.id = job.key = "ompi-" + *id;
  }
  // Rank 0 is on mpirun's host, unless hosts were given that leave it out.
  if (const auto uri = lookup("OMPI_MCA_orte_hnp_uri")) known.addresses = addresses_in(*uri);
  if (const auto name = lookup("PMIX_NAMESPACE")) {
    if (auto host = host_in(*name)) known.addresses.push_back(std::move(*host));
  }
  add_slurm_addresses(lookup, known.addresses);
  read_address(variables, known, ": mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 passes them on",
               job);
  return job;
}

/// Returns the nearest ancestor process of that name, or 0. The kernel keeps 15 letters.
pid_t ancestor(std::string_view name) {
  for (pid_t pid = getppid(); pid > 1;) {
    std::ifstream file(fmt::format("/proc/{}/stat", pid));
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto begin = text.find('(');
    const auto end = text.rfind(')');  // the name may hold anything
    if (begin == std::string::npos || end == std::string::npos) return 0;
    if (std::string_view(text).substr(begin + 1, end - begin - 1) == name) return pid;
    std::istringstream fields(text.substr(end + 1));
    char state = 0;
    if (!(fields >> state >> pid)) return 0;
  }
  return 0;
}

Job mpich_job(const Lookup& lookup) {
  const Variables variables(lookup, "mpiexec");
  Job job{.launcher = "MPICH"};
  std::tie(job.rank, job.size) = variables.rank_and_size("PMI_RANK", "PMI_SIZE");
  read_local(variables, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job);
  read_address(variables, {},
               ": mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 passes them on", job);
  // Finds the process of this host that has started its ranks, even if scripts are in between.
  if (const auto helper = ancestor("hydra_pmi_proxy"); helper != 0)
    job.key = fmt::format("hydra-{}", helper);
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
  Meeting known;
  if (const auto id = lookup("SLURM_JOB_ID")) {
    known.id = job.key = fmt::format("slurm-{}.{}", *id, lookup("SLURM_STEP_ID").value_or("0"));
  }
  if (job.across_hosts()) add_slurm_addresses(lookup, known.addresses);
  read_address(variables, known, ": export them before srun", job);
  return job;
}

/// A batch script has SLURM_PROCID too, but only srun's tasks are ranks, and those have a step.
bool is_slurm_step(const Lookup& lookup) {
  return lookup("SLURM_PROCID") && (lookup("SLURM_STEP_ID") || !lookup("SLURM_JOB_ID"));
}

/// Returns true if mpiexec of MPICH started this rank. Inside a Slurm allocation mpiexec has srun
/// start its own helpers, and the SLURM_* variables speak of those. srun --mpi=pmi2 sets PMI_* too,
/// but not these.
bool of_hydra(const Lookup& lookup) {
  return lookup("PMI_RANK") && lookup("MPI_LOCALRANKID").has_value();
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
  } else if (is_slurm_step(variable) && !of_hydra(variable)) {
    job = slurm_job(variable);
  } else if (variable("PMI_RANK") || variable("PMI_SIZE")) {
    job = mpich_job(variable);
  }
  // The ranks of one host are children of one launcher.
  if (job.key.empty()) job.key = fmt::format("{}{}", kParentKey, getppid());
  // Hosts may share the folder of the file.
  job.key += fmt::format("-{:016x}", std::hash<std::string>{}(Process::self().machine));
  if (job.prefix.empty()) job.prefix = "zero";
  job.transport = transport_from_environment(variable);
  return job;
}

std::vector<LaunchedJob> launched_jobs(const Lookup& variable) {
  const auto restarted = [&](const char* name) {
    const auto count = variable(name).value_or("");
    return !count.empty() && count != "0";
  };
  std::vector<LaunchedJob> jobs;
  if (variable(kRestartVariable)) {
    auto name = variable(kJobVariable).value_or("");
    const auto run = variable("TORCHELASTIC_RUN_ID").value_or("none");
    if (name.empty() && run != "none") name = "torchrun " + run;
    if (name.empty() && variable("GROUP_WORLD_SIZE").value_or("1") != "1") {
      // All agents and attempts have this in common.
      name = fmt::format("torchrun at {}:{}", variable("MASTER_ADDR").value_or(""),
                         variable("MASTER_PORT").value_or(""));
    }
    if (const auto file = variable("TORCHELASTIC_ERROR_FILE"); name.empty() && file) {
      // The agent makes one folder for all attempts.
      name = "torchrun in " + file->substr(0, file->find("/attempt_"));
    }
    if (name.empty()) {
      const auto self = Process::self();
      name = fmt::format("process {} of {} since {}", getppid(), self.machine,
                         start_time(getppid()).value_or(0));
    }
    jobs.push_back({std::move(name), restarted(kRestartVariable)});
  }
  if (const auto id = variable("SLURM_JOB_ID"))
    jobs.push_back({"Slurm " + *id, restarted("SLURM_RESTART_COUNT")});
  return jobs;
}

std::string transport_from_environment(const Lookup& variable) {
  constexpr const char* kVariable = "ZERO_TRANSPORT";
  const std::array<std::string, 4> known{"gloo", "openmpi", "mpich", "mpi"};
  auto value = variable(kVariable).value_or("");
  if (value.empty()) return known[0];
  if (value == "mpi" && variable("OMPI_COMM_WORLD_SIZE")) return "openmpi";
  if (value == "mpi" && variable("PMI_SIZE")) return "mpich";
  if (std::find(known.begin(), known.end(), value) != known.end()) return value;
  throw ConfigError(fmt::format("{} is '{}'.{} It may be gloo, openmpi, mpich or mpi.", kVariable,
                                value, did_you_mean(value, known)));
}

int sum_block_from_environment(const Lookup& variable) {
  return Variables(variable, "you").number_or("ZERO_SUM_BLOCK", 0, 1, Variables::kMost);
}

}  // namespace zero::comm
