#include "zero/data/filter.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>

#include "zero/base/broken_pipe.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/base/thread.h"

namespace zero {
namespace {

struct Pipe {
  Descriptor read;
  Descriptor write;
};

[[noreturn]] void report(const std::string& program, int code) {
  throw DataError(fmt::format("Cannot run {}: {}.", program, std::strerror(code)));
}

Pipe make_pipe(const std::string& program) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) report(program, errno);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

// Feeds the program until the input ends or the program closes its end; its exit status tells
// whether it objected.
void feed(int descriptor, const FilterInput& input) {
  for (auto piece = input(); !piece.empty(); piece = input()) {
    while (!piece.empty()) {
      const auto written = ::write(descriptor, piece.data(), piece.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return;
      piece.remove_prefix(static_cast<size_t>(written));
    }
  }
}

void drain(int descriptor, const FilterOutput& output) {
  std::vector<char> buffer(size_t{1} << 16);
  while (true) {
    const auto got = ::read(descriptor, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    output({buffer.data(), static_cast<size_t>(got)});
  }
}

std::string contents(int descriptor) {
  std::string text(4096, '\0');
  const auto got = ::pread(descriptor, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

pid_t start(const std::vector<std::string>& command, int in, int out, int error) {
  std::vector<char*> arguments;
  for (const auto& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, error, STDERR_FILENO);
  pid_t child = -1;
  const int code =
      ::posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (code != 0) report(command[0], code);
  return child;
}

// Nothing where the system keeps no status, since somebody ignores SIGCHLD.
std::optional<int> wait_for(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return {};
  }
  return status;
}

}  // namespace

void run_filter(const std::vector<std::string>& command, const FilterInput& input,
                const FilterOutput& output) {
  auto in = make_pipe(command[0]);
  auto out = make_pipe(command[0]);
  // Errors go to memory, so that a talkative program never waits for a reader.
  const Descriptor errors(::memfd_create("errors", MFD_CLOEXEC));
  if (!errors) report(command[0], errno);
  const pid_t child = start(command, in.read.get(), out.write.get(), errors.get());
  in.read.close();
  out.write.close();

  std::exception_ptr input_failure;
  const auto feed_all = [&] {
    // A program that ends early must not end this one.
    const BrokenPipeScope survives;
    try {
      feed(in.write.get(), input);
    } catch (...) {
      input_failure = std::current_exception();
    }
    in.write.close();
  };
  std::thread feeder;
  try {
    feeder = start_thread<DataError>(command[0], feed_all);
  } catch (const DataError&) {
    ::kill(child, SIGKILL);
    wait_for(child);
    throw;
  }
  std::exception_ptr output_failure;
  try {
    drain(out.read.get(), output);
  } catch (...) {
    output_failure = std::current_exception();
    ::kill(child, SIGKILL);
  }
  out.read.close();
  const auto ended = wait_for(child);
  feeder.join();

  if (output_failure) std::rethrow_exception(output_failure);
  if (input_failure) std::rethrow_exception(input_failure);
  if (!ended) {
    throw DataError(fmt::format(
        "{} has ended, but its exit status is lost: this process ignores SIGCHLD. Start "
        "it with the signal at its default (env --default-signal=CHLD).",
        command[0]));
  }
  const int status = *ended;
  if (WIFSIGNALED(status))
    throw DataError(fmt::format("{} was ended by signal {}.", command[0], WTERMSIG(status)));
  if (WEXITSTATUS(status) != 0) {
    throw DataError(fmt::format("{} {} failed: {}", command[0],
                                command.size() > 1 ? command[1] : "", contents(errors.get())));
  }
}

}  // namespace zero
