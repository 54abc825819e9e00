#include "zero/comm/memory_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/token.h"

namespace zero::comm {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kName = "libzero-memory-";

/// Opens a folder and locks it. Returns none if it is gone, or if another process has the lock.
Descriptor hold_folder(const fs::path& path) {
  Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder || flock(folder.get(), LOCK_EX | LOCK_NB) != 0) return {};
  return folder;
}

/// Removes the folders of this user's launchers that were killed with all that belongs to them.
void remove_forsaken(const fs::path& place) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(place, ignored)) {
    const auto& path = entry.path();
    struct stat status {};
    if (!path.filename().string().starts_with(kName) || lstat(path.c_str(), &status) != 0 ||
        status.st_uid != getuid())
      continue;
    if (const auto held = hold_folder(path)) fs::remove_all(path, ignored);
  }
}

[[noreturn]] void refuse_place(const fs::path& place, const char* what) {
  throw ConfigError(fmt::format(
      "Cannot {} in {}, where copies of the ranks' states would lie: {}. Name a folder in memory "
      "that can be written (--memory-folder).",
      what, place.string(), std::strerror(errno)));
}

}  // namespace

MemoryFolder::MemoryFolder(const fs::path& place) {
  remove_forsaken(place);
  make(place);
  start_keeper();
}

MemoryFolder::~MemoryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void MemoryFolder::make(const fs::path& place) {
  do {
    path_ = place / (std::string(kName) + random_token());
    if (mkdir(path_.c_str(), 0700) != 0) refuse_place(place, "make a folder");
    lock_ = hold_folder(path_);
  } while (!lock_ || !fs::exists(path_));  // another launcher has just taken it for forsaken
}

// The keeper is nobody's child, so that those who look for the launcher's ranks do not find it, and
// has none of the launcher's files, so that nobody waits for it.
void MemoryFolder::start_keeper() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) refuse_place(path_, "make a pipe");
  const Descriptor gone(ends[0]);
  alive_ = Descriptor(ends[1]);
  const pid_t child = fork();
  if (child < 0) refuse_place(path_, "start a process");
  if (child > 0) {
    waitpid(child, nullptr, 0);
    return;
  }
  setsid();
  if (fork() != 0) _exit(0);
  prctl(PR_SET_NAME, "zero-memory");
  dup2(gone.get(), STDIN_FILENO);
  close_range(STDIN_FILENO + 1, ~0U, 0);
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) < 0 && errno == EINTR) {
  }
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  _exit(0);
}

}  // namespace zero::comm
