#include "zero/checkpoint/whole_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace zero {
namespace {

namespace fs = std::filesystem;

// Returns the folder without a separator at its end, so that names can be put beside it. The result
// is empty if `target` does not name a folder of its own.
fs::path named(const fs::path& target) {
  fs::path path = target;
  while (path.has_relative_path() && (!path.has_filename() || path.filename() == "."))
    path = path.parent_path();
  return !path.has_filename() || path.filename() == ".." ? fs::path() : path;
}

fs::path beside(const fs::path& target, const char* ending) {
  auto path = named(target);
  path += ending;
  return path;
}

fs::path earlier(const fs::path& target) { return beside(target, ".earlier"); }

fs::path parent_of(const fs::path& path) {
  const auto parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

bool present(const fs::path& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

// Returns the lock of an existing folder, or nothing; then errno says why (EWOULDBLOCK while
// another process has it). If the file system cannot lock, the folder is returned all the same:
// processes are trusted to come one at a time.
Descriptor hold(const fs::path& folder) {
  Descriptor held(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (held && flock(held.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    held.close();
    errno = EWOULDBLOCK;
  }
  return held;
}

bool same_file(const Descriptor& held, const fs::path& path) {
  struct stat mine {};
  struct stat there {};
  return fstat(held.get(), &mine) == 0 && lstat(path.c_str(), &there) == 0 &&
         mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

// Removes the folder unless a process holds it. Returns 0 or an errno.
int remove_unheld(const fs::path& path) {
  const auto held = hold(path);
  if (!held && errno == EWOULDBLOCK) return EWOULDBLOCK;
  std::error_code error;
  fs::remove_all(path, error);
  return error.value();
}

void sync_file(const fs::path& path, Fail fail) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (file && fsync(file.get()) == 0) return;
  const int error = errno;
  fail(fmt::format("Cannot sync {}: {}.", path.string(), std::strerror(error)));
}

void sync_tree(const fs::path& folder, Fail fail) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const auto type = entries->symlink_status(error).type();
    if (type == fs::file_type::directory) sync_tree(entries->path(), fail);
    if (type == fs::file_type::regular) sync_file(entries->path(), fail);
  }
  if (error) fail(fmt::format("Cannot list {}: {}.", folder.string(), error.message()));
  sync_folder(folder, fail);
}

}  // namespace

fs::path WholeFolder::partial(const fs::path& target) { return beside(target, ".partial"); }

WholeFolder::WholeFolder(fs::path target, Fail fail)
    : target_(named(target)), partial_(partial(target)), fail_(fail) {
  if (target_.empty()) {
    fail_(fmt::format("'{}' cannot be replaced. Name a folder of its own, as 'checkpoint'.",
                      target.string()));
  }
  std::error_code error;
  if (fs::exists(target_, error) && !fs::is_directory(target_, error)) {
    fail_(fmt::format("{} exists and is not a folder. Name another, or move it away.",
                      target_.string()));
  }
  const auto parent = parent_of(target_);
  for (auto above = parent;; above = parent_of(above)) {
    parents_.push_back(above);
    if (fs::exists(above, error) || above == parent_of(above)) break;
  }
  fs::create_directories(parent, error);
  if (error) {
    errno = error.value();
    report("make", parent);
  }
  recover(target_, fail_);
  if (const int refused = remove_unheld(earlier(target_)); refused != 0) {
    errno = refused;
    report("remove", earlier(target_));
  }
  make();
}

void WholeFolder::make() {
  // The loop repeats only if another process does the same at the same time.
  while (mkdir(partial_.c_str(), 0777) != 0) {
    if (errno != EEXIST) report("make", partial_);
    if (const int error = remove_unheld(partial_); error != 0) {
      errno = error;
      report("remove", partial_);
    }
  }
  lock_ = hold(partial_);
  if (!lock_) report("lock", partial_);
  if (!same_file(lock_, partial_)) {
    errno = EWOULDBLOCK;
    report("lock", partial_);
  }
}

WholeFolder::~WholeFolder() {
  if (committed_ || !lock_ || !owner_.here()) return;
  std::error_code ignored;
  fs::remove_all(partial_, ignored);
}

void WholeFolder::report(const char* what, const fs::path& path) const {
  const int error = errno;
  if (error == EWOULDBLOCK) {
    fail_(fmt::format("Another process is writing {}, in {}. Wait for it, or name another folder.",
                      target_.string(), path.string()));
  }
  const char* remedy = error == ENOSPC || error == EDQUOT
                           ? " Free some space, or write to another disk."
                           : " Check that its parent is a folder that may be written.";
  fail_(fmt::format("Cannot {} {}: {}.{}", what, path.string(), std::strerror(error), remedy));
  std::abort();  // `fail_` throws
}

void WholeFolder::commit() {
  sync_tree(partial_, fail_);
  take_the_name();
  committed_ = true;
  // A child that was forked meanwhile has the lock too, so closing the descriptor alone would not
  // release it.
  (void)flock(lock_.get(), LOCK_UN);
  for (const auto& parent : parents_) sync_folder(parent, fail_);
  // The save is done. If something cannot be removed now, the next one that begins reports it.
  (void)remove_unheld(partial_);
  (void)remove_unheld(earlier(target_));
}

void WholeFolder::take_the_name() {
  if (!present(target_)) {
    if (rename(partial_.c_str(), target_.c_str()) != 0) report("complete", target_);
    return;
  }
  if (renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) == 0)
    return;
  if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) report("complete", target_);
  const auto aside = earlier(target_);
  if (rename(target_.c_str(), aside.c_str()) != 0) report("move away", target_);
  if (rename(partial_.c_str(), target_.c_str()) == 0) return;
  const int error = errno;
  recover(target_, fail_);
  errno = error;
  report("complete", target_);
}

void WholeFolder::recover(const fs::path& target, Fail fail) {
  const auto name = named(target);
  const auto aside = earlier(target);
  if (name.empty() || present(name) || !present(aside)) return;
  if (rename(aside.c_str(), name.c_str()) != 0) {
    const int error = errno;
    fail(fmt::format("Cannot rename {} to {}, whose replacement was cut short: {}.", aside.string(),
                     name.string(), std::strerror(error)));
  }
  sync_folder(parent_of(name), fail);
}

void WholeFolder::remove_left_overs(const fs::path& target) {
  struct Ignored {};
  try {
    recover(target, [](const std::string&) { throw Ignored(); });
  } catch (const Ignored&) {
    return;  // the earlier folder stays
  }
  (void)remove_unheld(partial(target));
  (void)remove_unheld(earlier(target));
}

}  // namespace zero
