#include "tests/compositions/worker.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <string>

#include "zero/base/error.h"

namespace zero::compositions {

namespace {

constexpr int kCasesOfAProcess = 500;

void write_line(int file, const std::string& line) {
  const std::string text = line + "\n";
  for (size_t written = 0; written < text.size();) {
    const auto count = ::write(file, text.data() + written, text.size() - written);
    if (count <= 0) return;
    written += static_cast<size_t>(count);
  }
}

/// Returns a line without its end, or nothing where the other end is gone.
std::string read_line(int file) {
  std::string line;
  for (char c = 0; ::read(file, &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

[[noreturn]] void serve(int from, int to) {
  at::set_num_threads(1);
  // The empty case is a line, too.
  for (std::string line; !(line = read_line(from)).empty();) {
    const auto verdict = run(parse(line.substr(1)));
    write_line(to, fmt::format("{}{}", static_cast<int>(verdict.kind), verdict.why));
  }
  ::_exit(0);
}

}  // namespace

void Worker::begin() {
  std::array<int, 2> there{};
  std::array<int, 2> back{};
  if (::pipe(there.data()) != 0 || ::pipe(back.data()) != 0) throw Error("No pipe can be made.");
  pid_ = ::fork();
  if (pid_ < 0) throw Error("No process can be started.");
  if (pid_ == 0) {
    ::close(there[1]);
    ::close(back[0]);
    serve(there[0], back[1]);
  }
  ::close(there[0]);
  ::close(back[1]);
  to_ = there[1];
  from_ = back[0];
  cases_ = 0;
}

// A process without a case ends when nobody is left to give it one.
void Worker::end(bool hangs) {
  if (pid_ < 0) return;
  ::close(to_);
  ::close(from_);
  if (hangs) ::kill(pid_, SIGKILL);
  ::waitpid(pid_, &status_, 0);
  pid_ = -1;
}

Verdict Worker::run(const Case& given) {
  if (++cases_ > kCasesOfAProcess) end(false);
  if (pid_ < 0) begin();
  write_line(to_, "=" + text_of(given));
  pollfd answer{.fd = from_, .events = POLLIN, .revents = 0};
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(limit_).count();
  if (::poll(&answer, 1, static_cast<int>(limit)) != 1) {
    end(true);
    return {Verdict::Kind::failed, fmt::format("took longer than {} s", limit_.count())};
  }
  const auto line = read_line(from_);
  if (!line.empty()) return {static_cast<Verdict::Kind>(line.front() - '0'), line.substr(1)};
  end(false);
  return {Verdict::Kind::failed, WIFSIGNALED(status_)
                                     ? fmt::format("ended by signal {}", WTERMSIG(status_))
                                     : fmt::format("ended with status {}", WEXITSTATUS(status_))};
}

}  // namespace zero::compositions
