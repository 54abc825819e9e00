#include "zero/comm/launcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
#include "zero/comm/job.h"
#include "zero/comm/launch_store.h"
#include "zero/comm/memory_folder.h"
#include "zero/comm/token.h"

namespace zero::comm {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(std::string_view what) {
  throw CommError(fmt::format("Cannot {}: {}.", what, std::strerror(errno)));
}

struct Pipe {
  Descriptor read, write;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) fail("make a pipe");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

Descriptor open_file(const std::filesystem::path& path, int flags) {
  Descriptor file(::open(path.c_str(), flags | O_CLOEXEC, 0666));
  if (!file) {
    throw ConfigError(fmt::format("Cannot open {}: {}.", path.string(), std::strerror(errno)));
  }
  return file;
}

/// Passes text on to a descriptor of the launcher as its reader takes it, and never waits for the
/// reader: it keeps text that the reader does not take yet. It drops the text if there is no reader
/// any more.
class Sink {
 public:
  explicit Sink(int fd) : fd_(fd) {
    struct stat status {};
    if (fstat(fd, &status) != 0) return;
    socket_ = S_ISSOCK(status.st_mode);
    waits_ = S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode);
    if (!waits_) return;
    // Opens the file anew, since O_NONBLOCK on the launcher's own description would also apply to
    // the ranks and to the shell's terminal.
    own_ = Descriptor(::open(fmt::format("/proc/self/fd/{}", fd).c_str(),
                             O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  }

  int fd() const { return own_ ? own_.get() : fd_; }
  bool pending() const { return !text_.empty(); }
  /// Returns true if its ranks should wait until the reader has taken more.
  bool full() const { return text_.size() >= kMost; }

  void put(std::string_view text) {
    text_ += text;
    flush();
  }
  /// Writes as much as the reader takes now.
  void flush() {
    size_t done = 0;
    while (done < text_.size()) {
      const ssize_t count = write_some(std::string_view(text_).substr(done));
      if (count > 0) {
        done += static_cast<size_t>(count);
      } else if (count < 0 && errno == EINTR) {
        continue;
      } else {
        if (count < 0 && errno != EAGAIN) done = text_.size();  // nobody reads any more
        break;
      }
    }
    text_.erase(0, done);
  }

 private:
  ssize_t write_some(std::string_view text) const {
    if (socket_) return send(fd_, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (waits_ && !own_) {  // a descriptor that cannot be opened anew says if a little fits
      pollfd writable{fd_, POLLOUT, 0};
      if (poll(&writable, 1, 0) == 0) {
        errno = EAGAIN;
        return -1;
      }
      text = text.substr(0, kLittle);
    }
    return write(fd(), text.data(), text.size());
  }

  static constexpr size_t kMost = 1 << 20;
  static constexpr size_t kLittle = 512;
  int fd_;
  Descriptor own_;
  bool socket_ = false;
  bool waits_ = false;  // a write to `fd_` may wait for its reader
  std::string text_;
};

/// Passes a rank's output on to a sink, line by line, each behind a prefix.
class LineRelay {
 public:
  LineRelay(Descriptor source, Sink& sink, std::string prefix)
      : source_(std::move(source)),
        sink_(&sink),
        clear_(isatty(sink.fd()) == 1 ? "\r\033[K" : ""),
        prefix_(std::move(prefix)) {
    fcntl(source_.get(), F_SETFL, O_NONBLOCK);
  }
  bool open() const { return static_cast<bool>(source_); }
  int fd() const { return source_.get(); }
  /// Returns true if it takes more; a rank whose reader does not keep up waits in its pipe.
  bool ready() const { return open() && !sink_->full(); }

  /// Passes on the complete lines that the pipe holds now. Cuts a line without end.
  void pump() {
    std::array<char, 16384> buffer;
    for (int chunk = 0; chunk < 16;
         ++chunk) {  // a pipe holds four; a rank that never pauses may not starve the others
      const ssize_t count = read(source_.get(), buffer.data(), buffer.size());
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        if (count == 0) finish();
        return;
      }
      pending_.append(buffer.data(), static_cast<size_t>(count));
      emit_lines();
      if (pending_.size() > kLongestLine) emit_rest();
    }
  }

  /// Passes the rest on, and stops.
  void finish() {
    if (!pending_.empty()) emit_rest();
    source_.close();
  }

 private:
  void emit_lines() {
    std::string text;
    size_t begin = 0;
    for (size_t end; (end = pending_.find('\n', begin)) != std::string::npos; begin = end + 1) {
      text += prefix_;
      text.append(pending_, begin, end + 1 - begin);
    }
    if (begin > 0) sink_->put(clear_ + text);
    pending_.erase(0, begin);
  }
  void emit_rest() {
    sink_->put(clear_ + prefix_ + pending_ + "\n");
    pending_.clear();
  }

  static constexpr size_t kLongestLine = 1 << 20;
  Descriptor source_;
  Sink* sink_;
  std::string clear_;  // rank 0 may have left a progress bar on the terminal's line
  std::string prefix_;
  std::string pending_;
};

/// Blocks signals for this thread and those that it starts, and reads them from a descriptor.
/// Signals that the process ignores (nohup, a shell's background jobs) stay ignored. SIGPIPE and
/// SIGXFSZ are ignored too: the job goes on when nobody reads its output any more, or when the file
/// that it goes to may not grow. SIGCHLD gets its default: a parent that ignored it would have
/// handed that on, and the system would then not keep how a rank ended. The destructor restores
/// everything.
class SignalScope {
 public:
  SignalScope() {
    sigset_t blocked;
    sigemptyset(&blocked);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
      struct sigaction action {};
      sigaction(signal, nullptr, &action);
      if (action.sa_handler != SIG_IGN) sigaddset(&blocked, signal);
    }
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
    descriptor_ = Descriptor(signalfd(-1, &blocked, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!descriptor_) {
      pthread_sigmask(SIG_SETMASK, &before_, nullptr);
      fail("watch for signals");
    }
    struct sigaction action {};
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, &broken_pipe_before_);
    sigaction(SIGXFSZ, &action, &file_limit_before_);
    action.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &action, &child_before_);
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  ~SignalScope() {
    restore_for_rank();
    sigaction(SIGCHLD, &child_before_, nullptr);
  }

  int fd() const { return descriptor_.get(); }
  /// A rank starts with the earlier handling of signals, except of SIGCHLD: it may wait for its own
  /// children.
  void restore_for_rank() const {
    sigaction(SIGPIPE, &broken_pipe_before_, nullptr);
    sigaction(SIGXFSZ, &file_limit_before_, nullptr);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  std::optional<int> next() const {
    signalfd_siginfo info{};
    if (read(descriptor_.get(), &info, sizeof(info)) != sizeof(info)) return std::nullopt;
    return static_cast<int>(info.ssi_signo);
  }

 private:
  sigset_t before_{};
  struct sigaction broken_pipe_before_ {};
  struct sigaction file_limit_before_ {};
  struct sigaction child_before_ {};
  Descriptor descriptor_;
};

/// This process's environment with some variables set, as execve takes it.
class Environment {
 public:
  Environment() {
    for (char** entry = environ; *entry != nullptr; ++entry) entries_.emplace_back(*entry);
  }
  void set(std::string_view name, std::string_view value) {
    const std::string start = fmt::format("{}=", name);
    std::erase_if(entries_, [&](const std::string& entry) { return entry.starts_with(start); });
    entries_.push_back(start + std::string(value));
  }
  std::vector<char*> pointers() { return null_terminated(entries_); }

  static std::vector<char*> null_terminated(std::vector<std::string>& words) {
    std::vector<char*> pointers;
    for (auto& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    return pointers;
  }

 private:
  std::vector<std::string> entries_;
};

Environment rank_environment(const LaunchOptions& options, const LaunchAttempt& attempt,
                             int local_rank, const LaunchStore& store, const MemoryFolder* memory) {
  Environment environment;
  environment.set("RANK", std::to_string(attempt.first_rank() + local_rank));
  environment.set("WORLD_SIZE", std::to_string(attempt.world_size()));
  environment.set("LOCAL_RANK", std::to_string(local_rank));
  environment.set("LOCAL_WORLD_SIZE", std::to_string(attempt.nproc));
  environment.set("GROUP_RANK", std::to_string(attempt.node));
  environment.set("GROUP_WORLD_SIZE", std::to_string(attempt.nodes));
  environment.set("MASTER_ADDR", store.address());
  environment.set("MASTER_PORT", std::to_string(store.port()));
  environment.set("TORCHELASTIC_USE_AGENT_STORE", "True");
  // A launcher may be what another one starts again: then the ranks are of that job.
  if (environment_variable(kJobVariable)) {
    if (attempt.number > 0) environment.set(kRestartVariable, std::to_string(attempt.number));
  } else {
    environment.set(kJobVariable, store.job());
    environment.set(kRestartVariable, std::to_string(attempt.number));
  }
  environment.set(kFirstRanksVariable, std::to_string(options.nnodes * options.nproc));
  environment.set(kLauncherVariable, kOwnLauncher);
  if (memory != nullptr) environment.set(kMemoryVariable, memory->path().string());
  if (!environment_variable("OMP_NUM_THREADS")) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    environment.set("OMP_NUM_THREADS", std::to_string(std::max(1, cores / attempt.nproc)));
  }
  return environment;
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name ? fmt::format("signal {} (SIG{})", signal, name) : fmt::format("signal {}", signal);
}

/// One rank's process.
struct RankProcess {
  int rank = 0;
  pid_t pid = -1;
  Descriptor pidfd;
  std::optional<siginfo_t> end;  ///< once the process has ended

  /// Returns true if it has ended. It stays a zombie, so that nobody else gets its number.
  bool look() {
    siginfo_t info{};
    if (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
      if (errno == EINTR) return false;
      fail(fmt::format("learn how rank {} ended", rank));
    }
    if (info.si_pid == pid) end = info;
    return ended();
  }
  bool ended() const { return end.has_value(); }
  bool killed() const { return ended() && end->si_code != CLD_EXITED; }
  bool failed() const { return ended() && exit_status() != 0; }
  int exit_status() const { return killed() ? 128 + end->si_status : end->si_status; }
  std::string fate() const {
    return fmt::format("rank {} (pid {}) {}", rank, pid,
                       killed() ? "was killed by " + signal_name(end->si_status)
                                : fmt::format("exited with status {}", end->si_status));
  }
  /// Sends a signal to the rank and the processes that it has started.
  void signal(int number) const { kill(-pid, number); }
};

/// The signals and the output of a launcher, in all attempts.
struct Console {
  SignalScope signals;
  Sink output{STDOUT_FILENO};
  Sink errors{STDERR_FILENO};
};

/// The time between two looks at the launchers of other hosts.
constexpr int kLookMilliseconds = 500;
/// The exit status of an attempt whose own ranks have not failed.
constexpr int kFailure = 1;

/// The ranks of one attempt.
class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, const LaunchAttempt& attempt, LaunchStore& store,
             const MemoryFolder* memory, Console& console)
      : options_(options),
        attempt_(attempt),
        store_(store),
        memory_(memory),
        signals_(console.signals),
        output_(console.output),
        errors_(console.errors) {}
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;
  ~Supervisor() {
    for (const auto& process : processes_) {
      // kills the rank, or the processes that it left behind
      if (failed_ || !process.ended()) process.signal(SIGKILL);
      waitpid(process.pid, nullptr, 0);
    }
  }

  /// Starts the ranks, and returns the status of the attempt once all have ended.
  int run() {
    if (options_.nnodes > 1) announce();
    for (int local = 0; local < attempt_.nproc; ++local) start(local);
    while (running() > 0) wait_for_events();
    for (auto& relay : relays_) {  // the last ranks' last words
      if (relay.open()) relay.pump();
      if (relay.open()) relay.finish();
    }
    return verdict();
  }

  /// Returns whether the user has asked the job to end.
  bool interrupted() const { return interrupted_by_.has_value(); }
  /// Returns how many ranks were killed before this launcher ended the others.
  int lost() const { return lost_; }
  /// Says something to whoever reads the launcher's errors.
  void say(const std::string& text) { errors_.put("zero: " + text + "\n"); }

  /// Ends the job: waits for the launchers of other hosts, and for the reader of the output.
  void leave() {
    store_.leave();
    wait_for_launchers();
    wait_for_reader();
  }

  /// Sleeps a moment while other launchers are waited for. Returns false once a signal has come.
  bool pause() {
    std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}};
    add_sinks(polled);
    if (poll(polled.data(), 1, 50) < 0 && errno != EINTR) return false;
    if (const auto signal = signals_.next()) interrupted_by_ = signal;
    output_.flush();
    errors_.flush();
    return !interrupted_by_;
  }

 private:
  /// The descriptors that become a rank's stdin, stdout and stderr; -1 keeps the launcher's own.
  struct Streams {
    int in = -1, out = -1, err = -1;
  };

  int first_rank() const { return attempt_.first_rank(); }

  void announce() {
    errors_.put(
        fmt::format("zero: node {} of {}: ranks {} to {}, with WORLD_SIZE={} LOCAL_WORLD_SIZE={} "
                    "MASTER_ADDR={} MASTER_PORT={}\n",
                    attempt_.node, attempt_.nodes, first_rank(), first_rank() + attempt_.nproc - 1,
                    attempt_.world_size(), attempt_.nproc, store_.address(), store_.port()));
  }

  void start(int local_rank) {
    const int rank = first_rank() + local_rank;
    Descriptor null = open_file("/dev/null", O_RDWR);
    Descriptor log;
    Streams streams;
    // One rank reads the terminal or file. A rank in the background may not read a terminal at all.
    if (local_rank > 0 || isatty(STDIN_FILENO)) streams.in = null.get();
    std::vector<Descriptor> pipes;
    const auto relay = [&](Sink& sink) {
      auto pipe = make_pipe();
      relays_.emplace_back(std::move(pipe.read), sink, fmt::format("[{}] ", rank));
      pipes.push_back(std::move(pipe.write));
      return pipes.back().get();
    };
    switch (options_.logs) {
      case RankLogs::rank0:
        if (rank > 0) streams.out = null.get();
        streams.err = relay(errors_);
        break;
      case RankLogs::prefix:
        streams.out = relay(output_);
        streams.err = relay(errors_);
        break;
      case RankLogs::files:
        log = open_file(options_.log_dir / fmt::format("rank-{}.log", rank),
                        O_WRONLY | O_CREAT | O_APPEND | (attempt_.number == 0 ? O_TRUNC : 0));
        streams.out = streams.err = log.get();
        break;
    }
    spawn(local_rank, streams);
  }

  void spawn(int local_rank, const Streams& streams) {
    const int rank = first_rank() + local_rank;
    // All that allocates happens before the fork: the store's threads may hold the allocator's
    // lock.
    auto environment = rank_environment(options_, attempt_, local_rank, store_, memory_);
    // Rank 0 makes a token for several hosts, since their launchers do not know this one.
    if (options_.nnodes == 1) environment.set(kTokenVariable, token_);
    auto variables = environment.pointers();
    auto words = options_.command;
    auto arguments = Environment::null_terminated(words);
    auto report = make_pipe();
    const pid_t launcher = getpid();
    const pid_t pid = fork();
    if (pid < 0) fail(fmt::format("start rank {}", rank));
    if (pid == 0) {
      become_rank(launcher, streams, arguments.data(), variables.data());
      const int error = errno;
      [[maybe_unused]] const ssize_t told = write(report.write.get(), &error, sizeof(error));
      _exit(127);
    }
    setpgid(pid, pid);  // the child does it too: one of the two comes first
    processes_.push_back(
        {rank, pid, Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))), {}});
    if (!processes_.back().pidfd) fail("watch a process (pidfd_open)");

    report.write.close();
    int error = 0;
    ssize_t told;
    while ((told = read(report.read.get(), &error, sizeof(error))) < 0 && errno == EINTR) {
    }
    if (told == sizeof(error)) {
      throw ConfigError(
          fmt::format("Cannot run '{}': {}.", options_.command.front(), std::strerror(error)));
    }
  }

  /// Runs in the child. Returns only if the command cannot be run, with errno set.
  void become_rank(pid_t launcher, const Streams& streams, char** arguments, char** variables) {
    setpgid(0,
            0);  // a terminal's Ctrl-C then reaches the launcher alone, which passes it on once
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(1);  // the launcher died before the line above
    signals_.restore_for_rank();
    if (streams.in >= 0) dup2(streams.in, STDIN_FILENO);
    if (streams.out >= 0) dup2(streams.out, STDOUT_FILENO);
    if (streams.err >= 0) dup2(streams.err, STDERR_FILENO);
    execvpe(arguments[0], arguments, variables);
  }

  long running() const {
    return std::count_if(processes_.begin(), processes_.end(), [](auto& p) { return !p.ended(); });
  }

  /// Sleeps until a rank writes or ends, a signal comes or the grace period is over, and handles
  /// it.
  void wait_for_events() {
    std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}};
    for (const auto& process : processes_) {
      if (!process.ended()) polled.push_back({process.pidfd.get(), POLLIN, 0});
    }
    for (const auto& relay : relays_) {
      if (relay.ready()) polled.push_back({relay.fd(), POLLIN, 0});
    }
    add_sinks(polled);
    if (poll(polled.data(), polled.size(), milliseconds_to_event()) < 0 && errno != EINTR) {
      fail("wait for the ranks");
    }
    while (const auto signal = signals_.next()) forward(*signal);
    output_.flush();
    errors_.flush();
    for (auto& relay : relays_) {
      if (relay.ready()) relay.pump();
    }
    reap();
    look_at_others();
    if (stop_at_ && Clock::now() >= *stop_at_) {
      signal_all(stop_with_);
      stop_at_.reset();
      if (stop_with_ == SIGTERM) {
        stop_with_ = SIGKILL;
        stop_at_ = Clock::now() + options_.grace;
      }
    }
  }

  /// Ranks of other hosts may still ask the store for the cause.
  void wait_for_launchers() {
    const auto deadline =
        Clock::now() + (failed_ ? std::chrono::seconds(5) : std::chrono::seconds(300));
    while (!interrupted_by_ && Clock::now() < deadline && store_.needed()) {
      if (!pause()) return;
    }
  }

  void add_sinks(std::vector<pollfd>& polled) const {
    for (const auto* sink : {&output_, &errors_}) {
      if (sink->pending()) polled.push_back({sink->fd(), POLLOUT, 0});
    }
  }

  /// Passes on the ranks' output, but only until somebody wants the job to end.
  void wait_for_reader() {
    while (!interrupted_by_ && (output_.pending() || errors_.pending())) {
      std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}};
      add_sinks(polled);
      if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
      interrupted_by_ = signals_.next();
      output_.flush();
      errors_.flush();
    }
  }

  int milliseconds_to_event() const {
    if (!stop_at_) return watches_others() ? kLookMilliseconds : -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*stop_at_ - Clock::now());
    return std::max(0, static_cast<int>(left.count()));
  }

  bool watches_others() const { return options_.nnodes > 1 && options_.max_restarts > 0; }

  /// Ends the ranks once those of another host have ended, and these have had the time to say so.
  void look_at_others() {
    if (stop_at_ || doomed_ || !watches_others() || Clock::now() < look_at_) return;
    look_at_ = Clock::now() + std::chrono::milliseconds(kLookMilliseconds);
    doomed_ = store_.doomed();
    if (doomed_) stop_at_ = Clock::now() + std::chrono::seconds(1);
  }

  void signal_all(int number) const {
    for (const auto& process : processes_) {
      if (!process.ended()) process.signal(number);
    }
  }

  void forward(int signal) {
    forced_ = signal == SIGINT && interrupted_by_ == SIGINT;
    interrupted_by_ = signal;
    signal_all(forced_ ? SIGKILL : signal);
  }

  void reap() {
    RankProcess* failed = nullptr;
    for (auto& process : processes_) {
      if (process.ended() || !process.look() || !process.failed() || obeyed(process)) continue;
      // If several ranks have ended since the last look, one that was killed is the cause, and one
      // that complains the consequence.
      if (failed == nullptr || (process.killed() && !failed->killed())) failed = &process;
    }
    if (failed == nullptr || failed_) return;
    failed_ = failed->rank;
    lost_ = static_cast<int>(std::count_if(processes_.begin(), processes_.end(),
                                           [](const auto& process) { return process.killed(); }));
    // The other hosts learn from this host's ranks which one has failed.
    stop_at_ =
        Clock::now() + (options_.nnodes > 1 ? std::chrono::seconds(1) : std::chrono::seconds(0));
  }

  /// Returns true if the rank obeyed a signal that was passed on: its peers may then take their
  /// time.
  bool obeyed(const RankProcess& process) const {
    return forced_ || (interrupted_by_ && (process.exit_status() == 128 + *interrupted_by_ ||
                                           process.exit_status() == 128 + SIGINT));
  }

  int verdict() {
    if (forced_) return 128 + SIGINT;
    if (failed_) {
      const auto& process = processes_[static_cast<size_t>(*failed_ - first_rank())];
      const auto log = options_.log_dir / fmt::format("rank-{}.log", process.rank);
      errors_.put(fmt::format(
          "zero: error: {}{}{}{}\n", process.fate(), reason(process),
          attempt_.nproc > 1 ? (options_.nnodes > 1 ? "; the other ranks of this host were stopped"
                                                    : "; the other ranks were stopped")
                             : "",
          options_.logs == RankLogs::files ? "; see " + log.string() : ""));
      return process.exit_status();
    }
    if (doomed_) {
      say("the ranks of another host have ended");
      return kFailure;
    }
    for (const auto& process : processes_) {
      if (process.failed()) return process.exit_status();
    }
    return 0;
  }

  /// Says why a rank may have been killed, if the kernel tells.
  std::string reason(const RankProcess& process) const {
    if (!process.killed() || process.end->si_status != SIGKILL ||
        kills_for_memory() == kills_before_)
      return "";
    return "; meanwhile the kernel has killed a process because memory ran out: hold less on each "
           "rank (zero train --memory-budget BYTES chooses what), or raise the limit";
  }

  const LaunchOptions& options_;
  const LaunchAttempt attempt_;
  LaunchStore& store_;
  const MemoryFolder* memory_;
  const SignalScope& signals_;
  Sink& output_;
  Sink& errors_;
  const std::string token_ = random_token();
  const int64_t kills_before_ = kills_for_memory();
  std::vector<RankProcess> processes_;
  std::vector<LineRelay> relays_;
  std::optional<int> interrupted_by_;
  bool forced_ = false;
  std::optional<int> failed_;
  bool doomed_ = false;
  Clock::time_point look_at_{};
  int lost_ = 0;
  std::optional<Clock::time_point> stop_at_;
  int stop_with_ = SIGTERM;
};

/// The exit status of a program that refuses what it was given, and of one that was asked to end.
constexpr int kRefusal = 2;
constexpr int kAskedToEnd = 128 + SIGINT;

/// Returns the folder that outlives the ranks; null if there are no restarts, or no place for it.
std::unique_ptr<MemoryFolder> memory_of(const LaunchOptions& options) {
  if (options.max_restarts == 0) return nullptr;
  if (!options.memory_folder.empty()) return std::make_unique<MemoryFolder>(options.memory_folder);
  if (access(kMemoryPlace, W_OK | X_OK) != 0) return nullptr;
  return std::make_unique<MemoryFolder>(kMemoryPlace);
}

/// Starts the ranks, and again after failures for which the options allow a restart.
int run_attempts(const LaunchOptions& options) {
  Console console;  // blocks the signals before the store starts threads
  const auto memory = memory_of(options);
  LaunchStore store(options);
  LaunchAttempt attempt{.number = store.first_attempt(),
                        .nproc = options.nproc,
                        .node = options.node_rank,
                        .nodes = options.nnodes};
  const int least = options.min_ranks > 0 ? options.min_ranks : options.nproc * options.nnodes;
  std::optional<Supervisor> ranks;
  int restarts = 0;
  if (attempt.number > 0) {  // the job has begun without this host
    ranks.emplace(options, attempt, store, memory.get(), console);
    ranks->say(fmt::format("node {} waits for the next restart", options.node_rank));
    const auto joined = store.join(attempt.number, [&] { return ranks->pause(); });
    if (!joined) {
      ranks->leave();
      return 0;
    }
    attempt = *joined;
  }
  for (;;) {
    ranks.reset();
    ranks.emplace(options, attempt, store, memory.get(), console);
    const int status = ranks->run();
    const bool fewer = attempt.nproc < options.nproc;
    const bool refused = status == kRefusal;
    if (refused && !fewer) store.refuse();
    const bool done =
        status == 0 && (ranks->interrupted() || store.all_done([&] { return ranks->pause(); }));
    if (done || status == kAskedToEnd || ranks->interrupted() || options.max_restarts == 0 ||
        (refused ? !fewer : restarts == options.max_restarts)) {
      ranks->leave();
      return status;
    }
    auto next = attempt;
    ++next.number;
    if (options.nnodes > 1) {
      const auto joined = store.join(next.number, [&] { return ranks->pause(); });
      if (!joined) {
        ranks->leave();
        return status;
      }
      next = *joined;
    } else {
      next.nproc -= refused ? 1 : ranks->lost();
      if (next.nproc < least) {
        if (refused) {
          ranks->leave();
          return status;
        }
        next.nproc = std::max(least, 1);
      }
    }
    if (!refused) ++restarts;
    ranks->say(fmt::format("restart {} of {} with {} rank{}", restarts, options.max_restarts,
                           next.world_size(), next.world_size() == 1 ? "" : "s"));
    attempt = next;
  }
}

}  // namespace

int launch(const LaunchOptions& options) {
  if (options.nproc < 1) {
    throw ConfigError(
        fmt::format("The number of ranks is {}; it should be at least 1.", options.nproc));
  }
  if (options.nnodes < 1) {
    throw ConfigError(
        fmt::format("The number of nodes is {}; it should be at least 1.", options.nnodes));
  }
  if (options.node_rank < 0 || options.node_rank >= options.nnodes) {
    throw ConfigError(fmt::format("The rank of this node is {}; of {} node{} it should be {}.",
                                  options.node_rank, options.nnodes, options.nnodes == 1 ? "" : "s",
                                  options.nnodes == 1
                                      ? std::string("0")
                                      : fmt::format("between 0 and {}", options.nnodes - 1)));
  }
  if (options.nnodes > 1 && options.master_addr.empty()) {
    throw ConfigError(
        "A job over several nodes needs the name or address of node 0 (--master-addr), the same on "
        "every node.");
  }
  if (options.max_restarts < 0) {
    throw ConfigError(fmt::format("The number of restarts is {}; it should be at least 0.",
                                  options.max_restarts));
  }
  if (options.min_ranks < 0 || options.min_ranks > options.nnodes * options.nproc) {
    throw ConfigError(fmt::format(
        "The fewest ranks of a restart are {}; of {} ranks it should be between 1 and {}.",
        options.min_ranks, options.nnodes * options.nproc, options.nnodes * options.nproc));
  }
  if (options.min_ranks > 0 && options.max_restarts == 0) {
    throw ConfigError(fmt::format(
        "The fewest ranks of a restart are {}, but there are no restarts. Give --max-restarts.",
        options.min_ranks));
  }
  if (!options.memory_folder.empty() && options.max_restarts == 0) {
    throw ConfigError(fmt::format(
        "The place for copies in memory is {}, but there are no restarts. Give --max-restarts.",
        options.memory_folder.string()));
  }
  if (options.command.empty()) throw ConfigError("There is no program to launch.");
  if (options.logs == RankLogs::files) {
    std::error_code error;
    std::filesystem::create_directories(options.log_dir, error);
    if (error) {
      throw ConfigError(fmt::format("Cannot make the log folder '{}': {}.",
                                    options.log_dir.string(), error.message()));
    }
  }
  return run_attempts(options);
}

}  // namespace zero::comm
