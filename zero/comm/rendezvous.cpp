#include "zero/comm/rendezvous.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/deadline.h"
#include "zero/comm/group.h"
#include "zero/comm/hosts_group.h"
#include "zero/comm/process.h"
#include "zero/comm/rail_address.h"
#include "zero/comm/socket.h"
#include "zero/comm/token.h"
#include "zero/comm/watched_store.h"

namespace zero::comm {
namespace {

namespace fs = std::filesystem;

/// The pause between two looks at something that another rank will do.
constexpr auto kPause = std::chrono::milliseconds(20);

// --- The file in which rank 0 says where it listens ---

class StoreFile {
 public:
  StoreFile(const fs::path& folder, const std::string& key) {
    std::string name = "job-" + key;
    for (char& c : name) {
      if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '.') c = '_';
    }
    if (!folder.empty()) path_ = folder / name;
  }

  const fs::path& path() const { return path_; }

  /// The file's content: the port where rank 0 listens, and the token that its keys begin with.
  struct Word {
    uint16_t port = 0;
    std::string token;
  };

  /// Replaces the file in one step.
  void write(const Word& word) const {
    const auto temporary = path_.string() + fmt::format(".{}", getpid());
    std::ofstream file(temporary, std::ios::trunc);
    file << word.port << ' ' << getpid() << ' ' << start_time(getpid()).value_or(0) << ' '
         << word.token << '\n';
    file.close();
    if (!file || std::rename(temporary.c_str(), path_.c_str()) != 0) {
      std::remove(temporary.c_str());
      throw CommError(fmt::format(
          "Cannot write {}, where the ranks of this job meet: {}. Set TMPDIR to a folder that can "
          "be written.",
          path_.string(), std::strerror(errno)));
    }
  }

  /// Removes the files of jobs that were killed while they started. No job takes a day to meet.
  void remove_abandoned() const {
    std::error_code ignored;
    const auto limit = fs::file_time_type::clock::now() - std::chrono::hours(24);
    for (const auto& entry : fs::directory_iterator(path_.parent_path(), ignored)) {
      if (!entry.path().filename().string().starts_with("job-")) continue;
      if (const auto written = entry.last_write_time(ignored); !ignored && written < limit) {
        fs::remove(entry.path(), ignored);
      }
    }
  }

  /// Returns the file's content, if the process that wrote it still runs.
  std::optional<Word> read() const {
    std::ifstream file(path_);
    Word word;
    pid_t pid = 0;
    uint64_t started = 0;
    if (!(file >> word.port >> pid >> started >> word.token) || start_time(pid) != started ||
        !is_token(word.token))
      return std::nullopt;
    return word;
  }

  void remove() const {
    std::error_code ignored;
    if (!path_.empty()) fs::remove(path_, ignored);
  }

 private:
  fs::path path_;
};

// --- The store ---

/// A store, and the address at which this rank reaches it.
struct OpenStore {
  c10::intrusive_ptr<c10d::Store> store{};
  std::string address{};
  uint16_t port = 0;
};

/// Returns "10.0.0.1:29500", or several with "or".
std::string places(const std::vector<std::string>& addresses, uint16_t port) {
  std::string text;
  for (const auto& address : addresses) {
    text += fmt::format("{}{}:{}", text.empty() ? "" : " or ", address, port);
  }
  return text;
}

c10::intrusive_ptr<c10d::Store> client_of(const std::string& host, uint16_t port,
                                          std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;  // the roll call waits instead, and names who is missing
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

/// Connects to the store at the first of `addresses` where somebody listens.
OpenStore connect_store(const Job& job, const std::vector<std::string>& addresses, uint16_t port,
                        std::chrono::milliseconds timeout) {
  const auto give_up = [&](const std::string& reason) {
    throw CommError(fmt::format(
        "Rank {} (on {}) could not reach the job's store at {} within {}: {}. {}", job.rank,
        Process::self().host, places(addresses, port), seconds(timeout), reason,
        job.launcher_hosts_store
            ? "The launcher should be listening there: see MASTER_ADDR and MASTER_PORT. If it has "
              "ended, it says why."
            : "Rank 0 should be listening there: did it start? Across hosts, a firewall may be in "
              "between, or MASTER_ADDR may be a name that means another address here."));
  };
  // c10d would wait as well, but it logs a stack trace if it fails.
  const auto deadline = deadline_after(timeout);
  for (;;) {
    std::string reason;
    for (const auto& host : addresses) {
      if (!connect_to(host, port, reason)) continue;
      try {
        const auto store =
            answer_to([host, port, timeout] { return client_of(host, port, timeout); },
                      [&] {
                        if (Clock::now() >= deadline + kLastAnswer)
                          give_up("a program listens there, but does not answer");
                      });
        return {store, host, port};
      } catch (const c10::Error& error) {
        give_up(first_line(error));
      }
    }
    if (Clock::now() >= deadline) give_up(reason);
    std::this_thread::sleep_for(kPause);
  }
}

/// Hosts a store at the first of `addresses` that is this host's.
OpenStore host_store_at(const std::vector<std::string>& addresses, uint16_t port, bool across,
                        std::chrono::milliseconds timeout) {
  std::string reasons;
  const auto give_up = [&] {
    throw CommError(fmt::format(
        "Rank 0 (on {}) could not open the job's store at {}: {}. MASTER_ADDR should be an address "
        "of this host and MASTER_PORT a port that no other program uses.",
        Process::self().host, places(addresses, port), reasons));
  };
  for (const auto& host : addresses) {
    auto listener = listen_at(host, port, across);
    if (!listener.socket && !listener.taken) {
      reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", listener.reason);
      continue;
    }
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = true;
    options.waitWorkers = false;
    options.timeout = timeout;
    options.multiTenant = true;  // a second group of this process uses the same server
    if (listener.socket) {
      options.masterListenFd = listener.socket.release();  // the server closes it
    }
    // c10d knows if this process has the port; if not, c10d cannot listen either, and throws.
    try {
      return {c10::make_intrusive<c10d::TCPStore>(host, options), host, port};
    } catch (const c10::Error& error) {
      reasons = first_line(error);
      give_up();
    }
  }
  give_up();
  return {};
}

StoreFile::Word wait_for_word(const StoreFile& file, const Job& job,
                              std::chrono::milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  for (;;) {
    if (auto word = file.read()) return *word;
    if (Clock::now() >= deadline) {
      throw CommError(
          fmt::format("Rank {} waited {} for rank 0, which never said in {} where it listens. Did "
                      "rank 0 start, on this host and with the same TMPDIR? Across hosts, set "
                      "MASTER_ADDR and MASTER_PORT.{}",
                      job.rank, seconds(timeout), file.path().string(),
                      job.key.starts_with(kParentKey)
                          ? " Ranks of one parent process are taken for one job: a script that "
                            "starts a rank must do so by `exec`."
                          : ""));
    }
    std::this_thread::sleep_for(kPause);
  }
}

/// Returns "rank 2" or "ranks 1, 3".
std::string rank_list(const std::vector<int>& ranks) {
  if (ranks.empty()) return "the word of rank 0";
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

constexpr size_t kLongestEntry = 2048;

std::string encode(const Attendant& rank) {
  const auto word = [](const std::string& text) { return text.empty() ? "-" : text; };
  return fmt::format("{} {} {} {}", word(rank.host), word(rank.address), rank.transport,
                     rank.machine);
}

/// Returns nothing if no rank wrote the text.
std::optional<Attendant> decode(const std::string& text) {
  if (text.size() > kLongestEntry) return std::nullopt;
  Attendant rank;
  std::istringstream words(text);
  if (!(words >> rank.host >> rank.address >> rank.transport >> std::ws)) return std::nullopt;
  std::getline(words, rank.machine);
  for (auto* word : {&rank.host, &rank.address}) {
    if (*word == "-") word->clear();
  }
  return rank;
}

/// Holds the roll call (Note [Roll call]). `store` is for the job's keys alone.
class RollCall {
 public:
  RollCall(c10d::Store& store, const Job& job, std::chrono::milliseconds timeout)
      : store_(store), job_(job), timeout_(timeout), deadline_(deadline_after(timeout)) {}

  struct Result {
    std::string meeting{};  ///< its keys begin with it
    std::string token{};    ///< rank 0 has made it for the ranks that were there
    std::vector<Attendant> ranks{};
  };

  /// Blocks until all ranks are there; `own` is this one. Rank 0 calls `all_arrived` before it lets
  /// the others go on. Throws c10::Error if the store is lost.
  Result hold(const Attendant& own, const std::function<void()>& all_arrived) {
    if (job_.rank != 0) return attend(own);
    meeting_ = random_token();
    store_.set(here(0), encode(own));
    store_.set(kCurrent, meeting_);
    while (!store_.check(all())) pause();
    std::string verdict = random_token();
    for (const auto& key : all()) verdict += "\n" + store_.get_to_str(key);
    auto result = read(verdict);
    all_arrived();
    store_.set(of_meeting(kComplete), verdict);
    return result;
  }

 private:
  Result attend(const Attendant& own) {
    for (;;) {
      find_meeting();
      store_.set(here(job_.rank), encode(own));
      if (wait_for_completion()) return read(store_.get_to_str(of_meeting(kComplete)));
    }
  }

  /// Waits for the newest meeting that is not over and that this rank has not given up.
  void find_meeting() {
    const auto last = std::exchange(meeting_, "");
    std::string over;
    for (;; pause()) {
      if (!store_.check({kCurrent})) continue;
      const auto newest = store_.get_to_str(kCurrent);
      if (newest == last || newest == over) continue;
      if (store_.check({newest + "/" + kComplete})) {
        over = newest;
        continue;
      }
      meeting_ = newest;
      return;
    }
  }

  /// Returns false if there is a newer meeting.
  bool wait_for_completion() {
    constexpr int kLooks = 5;  // to one look at `current`, which seldom changes
    for (int look = 1;; ++look, pause()) {
      if (store_.check({of_meeting(kComplete)})) return true;
      // Rank 0 may have completed this one meanwhile, and begun the next.
      if (look % kLooks == 0 && store_.get_to_str(kCurrent) != meeting_)
        return store_.check({of_meeting(kComplete)});
    }
  }

  std::string of_meeting(const std::string& key) const { return meeting_ + "/" + key; }
  std::string here(int rank) const { return of_meeting(fmt::format("here/{}", rank)); }

  std::vector<std::string> all() const {
    std::vector<std::string> keys;
    keys.reserve(static_cast<size_t>(job_.size));
    for (int rank = 0; rank < job_.size; ++rank) keys.push_back(here(rank));
    return keys;
  }

  /// Reads rank 0's verdict: the token, and a line for each rank.
  Result read(const std::string& verdict) const {
    Result result{.meeting = meeting_};
    std::istringstream lines(verdict);
    std::getline(lines, result.token);
    bool valid = is_token(result.token);
    for (std::string line; valid && std::getline(lines, line);) {
      auto rank = decode(line);
      valid = rank.has_value();
      if (rank) result.ranks.push_back(std::move(*rank));
    }
    if (valid && result.ranks.size() == static_cast<size_t>(job_.size)) return result;
    throw CommError(
        fmt::format("Rank {} found {} bytes that ranks of this job did not write in its store at "
                    "the roll call. Does another program use the same store, address or port?",
                    job_.rank, verdict.size()));
  }

  /// Sleeps between two looks. c10d's own wait would log warnings when the time is up.
  void pause() {
    if (Clock::now() >= deadline_) report_missing();
    std::this_thread::sleep_for(kPause);
  }

  [[noreturn]] void report_missing() {
    std::vector<int> missing;
    if (meeting_.empty()) missing.push_back(0);  // the others have not been asked yet
    for (int rank = 0; rank < job_.size && !meeting_.empty(); ++rank) {
      if (!store_.check({here(rank)})) missing.push_back(rank);
    }
    // Rank 0 may host the store, so it gives the others a moment to ask it the same question.
    if (job_.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    throw CommError(
        fmt::format("Rank {} waited {} for the {} ranks of this job, but {} never arrived. Did all "
                    "start, and do all still run?",
                    job_.rank, seconds(timeout_), job_.size, rank_list(missing)));
  }

  static constexpr const char* kCurrent = "current";
  static constexpr const char* kComplete = "complete";
  c10d::Store& store_;
  const Job& job_;
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  std::string meeting_;
};

/// Opens the store of `job`. Its keys begin with `prefix`, to which the file's token is added.
OpenStore open_store(const Job& job, const StoreFile& file, std::chrono::milliseconds timeout,
                     std::string& prefix) {
  const bool host_it = job.rank == 0 && !job.launcher_hosts_store;
  if (!job.addresses.empty()) {
    return host_it ? host_store_at(job.addresses, job.port, job.across_hosts(), timeout)
                   : connect_store(job, job.addresses, job.port, timeout);
  }
  if (!host_it) {
    const auto word = wait_for_word(file, job, timeout);
    prefix += "/" + word.token;
    return connect_store(job, {kLoopback}, word.port, timeout);
  }
  const auto local = host_local_store(timeout);
  const StoreFile::Word word{local.port, random_token()};
  prefix += "/" + word.token;
  file.remove_abandoned();
  file.write(word);
  return {local.store, kLoopback, local.port};
}

/// Returns the place of each rank's host among the hosts, in the order of their first ranks.
std::vector<int64_t> places_of(const std::vector<Attendant>& ranks) {
  std::vector<std::string> machines;
  std::vector<int64_t> places;
  for (const auto& rank : ranks) {
    const auto found = std::find(machines.begin(), machines.end(), rank.machine);
    places.push_back(found - machines.begin());
    if (found == machines.end()) machines.push_back(rank.machine);
  }
  return places;
}

/// Says how to start `each` ranks on every host, in order.
std::string remedy(const std::string& launcher, const std::string& each) {
  if (launcher == "torchrun") return fmt::format("--nproc-per-node {} on every node", each);
  if (launcher == "zero launch") return fmt::format("-n {} on every node", each);
  if (launcher == "mpirun") return fmt::format("mpirun --map-by ppr:{}:node", each);
  if (launcher == "MPICH") return fmt::format("mpiexec -ppn {}", each);
  return fmt::format("srun --ntasks-per-node={} --distribution=block", each);
}

/// Returns "" if the address is not known; the rail will say more.
std::string known_address_towards(const std::string& host) {
  try {
    return address_towards(host);
  } catch (const CommError&) {
    return {};
  }
}

/// Rank 0 may host the store, so it stays until all have read its verdict, or time is up.
void leave_together(c10d::Store& store, const Job& job) {
  constexpr const char* kLeft = "left";
  store.add(kLeft, 1);
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  while (job.rank == 0 && store.add(kLeft, 0) < job.size && Clock::now() < deadline) {
    std::this_thread::sleep_for(kPause);
  }
}

/// Names the ranks of each host, and the remedy.
[[noreturn]] void refuse_irregular(const std::vector<Attendant>& ranks,
                                   const std::string& launcher) {
  const auto places = places_of(ranks);
  const auto topology = Topology::of(places, 0);
  std::string table;
  std::vector<std::vector<int>> of_host(static_cast<size_t>(topology.hosts));
  for (size_t rank = 0; rank < places.size(); ++rank) {
    of_host[static_cast<size_t>(places[rank])].push_back(static_cast<int>(rank));
  }
  bool even = true;
  for (const auto& list : of_host) {
    even = even && list.size() == of_host[0].size();
    table += fmt::format("{}{} on {} ({})", table.empty() ? "" : ", ", list.size(),
                         ranks[static_cast<size_t>(list[0])].host, rank_list(list));
  }
  const auto size = static_cast<int>(ranks.size());
  const auto each =
      size % topology.hosts == 0 ? std::to_string(size / topology.hosts) : std::string("N");
  throw CommError(fmt::format(
      "The {} ranks of this job are {} over {} hosts: {}. Every host must have equally many ranks, "
      "which follow one another: {}.",
      size, even ? "in no order" : "spread unevenly", topology.hosts, table,
      remedy(launcher, each)));
}

/// Ranks with different transports cannot reach each other: each would wait for its own.
[[noreturn]] void refuse_transports(const std::vector<Attendant>& ranks,
                                    const std::string& launcher) {
  std::map<std::string, std::vector<int>> of_transport;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    of_transport[ranks[rank].transport].push_back(static_cast<int>(rank));
  std::string table;
  for (const auto& [transport, list] : of_transport) {
    table += fmt::format("{}'{}' for {} ({})", table.empty() ? "" : ", ", transport,
                         rank_list(list), ranks[static_cast<size_t>(list[0])].host);
  }
  std::string how = "Set it for all ranks";
  if (launcher == "mpirun") how += ": `mpirun -x ZERO_TRANSPORT` passes it on to other hosts";
  if (launcher == "MPICH") how += ": `mpiexec -genv ZERO_TRANSPORT VALUE` does";
  throw ConfigError(
      fmt::format("ZERO_TRANSPORT is not the same on all hosts: {}. {}.", table, how));
}

}  // namespace

fs::path rendezvous_folder() {
  std::error_code error;
  const fs::path temporary = fs::temp_directory_path(error);
  if (error) {
    throw ConfigError(fmt::format("The environment variable TMPDIR is '{}'; it should be a folder.",
                                  environment_variable("TMPDIR").value_or("")));
  }
  fs::path folder = temporary / fmt::format("libzero-{}", geteuid());
  struct stat status {};
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    throw ConfigError(fmt::format(
        "Cannot make {}, where the ranks of a job meet: {}. Set TMPDIR to a folder that can be "
        "written.",
        folder.string(), std::strerror(errno)));
  }
  // Anybody who can write here can lead the ranks astray.
  if (lstat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
      status.st_uid != geteuid() || (status.st_mode & 0022) != 0) {
    throw ConfigError(fmt::format(
        "{} should be a folder of this user that nobody else can write. Remove it, or set TMPDIR "
        "to another folder.",
        folder.string()));
  }
  return folder;
}

Topology Joined::topology(int rank) const { return Topology::of(places_of(ranks), rank); }

std::string Joined::address() const {
  std::vector<std::string> all;
  for (const auto& rank : ranks) all.push_back(rank.address);
  return reachable_address(rail_address(store_address), all);
}

Joined join_store(const Job& job, std::chrono::milliseconds timeout, const fs::path& folder) {
  timeout = within_a_year(timeout);
  const StoreFile file(folder, job.key);
  const auto attempt = [&](std::chrono::milliseconds patience) -> Joined {
    auto prefix = job.prefix;
    const auto opened = open_store(job, file, patience, prefix);
    const auto deadline = deadline_after(timeout) + kLastAnswer;
    const auto check = [&] {
      if (Clock::now() < deadline) return;
      throw CommError(fmt::format(
          "The job's store at {}:{} has not answered rank {} for {} while the ranks were signing "
          "in. Does rank 0, or the launcher of its host, still run there?",
          opened.address, opened.port, job.rank, seconds(timeout)));
    };
    WatchedStore of_job(prefix, opened.store, check);
    const auto self = Process::self();
    auto met = RollCall(of_job, job, timeout)
                   .hold({.host = self.host,
                          .address = known_address_towards(opened.address),
                          .transport = job.transport,
                          .machine = self.machine},
                         [&] { file.remove(); });
    const auto keys = fmt::format("{}/{}", prefix, met.meeting);
    WatchedStore store(keys, opened.store, check);
    const auto topology = Topology::of(places_of(met.ranks), 0);
    if (!topology.regular) {
      leave_together(store, job);
      refuse_irregular(met.ranks, job.launcher);
    }
    const auto other_transport = [&](const Attendant& rank) {
      return rank.transport != met.ranks.front().transport;
    };
    if (topology.hosts > 1 && std::ranges::any_of(met.ranks, other_transport)) {
      leave_together(store, job);
      refuse_transports(met.ranks, job.launcher);
    }
    return {.store = c10::make_intrusive<c10d::PrefixStore>(
                met.token, c10::make_intrusive<c10d::PrefixStore>(keys, opened.store)),
            .store_address = opened.address,
            .store_port = opened.port,
            .ranks = std::move(met.ranks)};
  };
  try {
    try {
      return attempt(timeout);
    } catch (const c10::Error&) {
      // Rank 0 may have closed the store of an earlier group that this rank had found still open.
      return attempt(std::min<std::chrono::milliseconds>(timeout, std::chrono::seconds(5)));
    }
  } catch (const c10::Error& error) {
    if (job.rank == 0) file.remove();
    throw CommError(fmt::format(
        "Rank {} lost the job's store while the ranks were signing in: {}. Its host has ended.",
        job.rank, first_line(error)));
  } catch (...) {
    if (job.rank == 0) file.remove();
    throw;
  }
}

LocalStore host_local_store(std::chrono::milliseconds timeout) {
  auto listener = listen_at(kLoopback, 0);
  if (!listener.socket)
    throw CommError(fmt::format("Cannot listen on {}: {}.", kLoopback, listener.reason));
  LocalStore local;
  local.port = own_port(listener.socket);
  c10d::TCPStoreOptions options;
  options.port = local.port;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.masterListenFd = listener.socket.release();  // the server closes it
  try {
    local.store = c10::make_intrusive<c10d::TCPStore>(kLoopback, options);
  } catch (const c10::Error& error) {
    throw CommError(
        fmt::format("Cannot open a store at {}:{}: {}.", kLoopback, local.port, first_line(error)));
  }
  return local;
}

c10::intrusive_ptr<c10d::Store> host_store(const std::string& address, uint16_t port,
                                           std::chrono::milliseconds timeout) {
  return host_store_at({address}, port, true, timeout).store;
}

c10::intrusive_ptr<c10d::Store> reach_store(const std::string& address, uint16_t port,
                                            std::chrono::milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  std::string reason;
  while (!connect_to(address, port, reason)) {
    if (Clock::now() >= deadline) return nullptr;
    std::this_thread::sleep_for(kPause);
  }
  try {
    // A process that is stopped accepts connections too.
    return answer_to([=] { return client_of(address, port, timeout); },
                     [&] {
                       if (Clock::now() >= deadline) throw CommError("The store does not answer.");
                     });
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace zero::comm

namespace zero {

std::shared_ptr<comm::Group> init(comm::GroupOptions options) {
  const auto job = comm::job_from_environment();
  if (job.size == 1) return comm::single();
  const auto folder = job.addresses.empty() ? comm::rendezvous_folder() : std::filesystem::path();
  if (const auto block = comm::sum_block_from_environment(); block > 0) options.sum_block = block;
  auto joined = comm::join_store(job, options.timeout, folder);
  const auto topology = joined.topology(job.rank);
  return comm::job_group(std::move(joined.store),
                         {.rank = job.rank,
                          .size = job.size,
                          .topology = topology,
                          .address = topology.hosts == 1 ? std::string() : joined.address()},
                         options);
}

}  // namespace zero
