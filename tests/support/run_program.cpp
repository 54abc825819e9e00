#include "tests/support/run_program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <thread>

namespace zero::test {

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

Program::Program(const std::vector<std::string>& command,
                 const std::map<std::string, std::string>& variables) {
  std::vector<std::string> words = command;
  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const std::string out = folder_ / "out", err = folder_ / "err";
  pid_ = fork();
  if (pid_ != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  setpgid(0, 0);
  // As a terminal starts it, also where a shell runs the tests in the background.
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) std::signal(number, SIG_DFL);
  for (const auto& [name, value] : variables) {
    if (value.empty()) {
      unsetenv(name.c_str());
    } else {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
  dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDOUT_FILENO);
  dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
  execvp(arguments[0], arguments.data());
  _exit(127);
}

Program::~Program() {
  if (poll_end()) return;
  signal(SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string Program::out() const { return read_file(folder_ / "out"); }
std::string Program::err() const { return read_file(folder_ / "err"); }
void Program::signal(int number) const { kill(pid_, number); }

bool Program::poll_end() {
  int status = 0;
  if (ended_ || waitpid(pid_, &status, WNOHANG) != pid_) return ended_;
  status_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return ended_ = true;
}

bool Program::wait_for_output(const std::string& text, std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (out().find(text) == std::string::npos) {
    if (poll_end() || std::chrono::steady_clock::now() > deadline)
      return out().find(text) != std::string::npos;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

Outcome Program::wait(std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!poll_end()) {
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << "the program still ran after " << limit.count() << " s; stderr: " << err();
      signal(SIGKILL);
      waitpid(pid_, &status_, 0);
      ended_ = true;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return {status_, out(), err()};
}

Outcome run(const std::vector<std::string>& command,
            const std::map<std::string, std::string>& variables) {
  return Program(command, variables).wait();
}

}  // namespace zero::test
