// The fortified headers define some of these calls inline.
#undef _FORTIFY_SOURCE
#include "tests/support/file_calls.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>

namespace zero::test {
namespace {

namespace fs = std::filesystem;

// The calls have no argument by which a recorder could be handed to them.
struct Recorder {
  std::mutex mutex;
  std::atomic<bool> active = false;
  std::atomic<bool> refuses_swaps = false;
  std::string root;
  std::map<ino_t, int> nodes;
  int next = 0;
  std::vector<FileCall> calls;

  bool below(const std::string& path) const { return path.starts_with(root + "/"); }
  int add(ino_t inode) {
    nodes[inode] = next;  // a number that was freed may come again
    return next++;
  }
  int node_of(const std::string& path) const {
    struct stat status {};
    return lstat(path.c_str(), &status) == 0 ? known(status.st_ino) : -1;
  }
  int node_of(int file) const {
    struct stat status {};
    return fstat(file, &status) == 0 ? known(status.st_ino) : -1;
  }
  int known(ino_t inode) const {
    const auto found = nodes.find(inode);
    return found == nodes.end() ? -1 : found->second;
  }
  FileCall::Entry entry(const std::string& path, int node) const {
    const fs::path at(path);
    const int folder = node_of(at.parent_path().string());
    return {static_cast<size_t>(std::max(0, folder)), at.filename().string(), node};
  }
  void note(FileCall call) { calls.push_back(std::move(call)); }
};

Recorder& recorder() {
  static Recorder one;
  return one;
}

template <class Function>
Function* next_of(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// A path as it is without a current folder or a descriptor.
std::string whole(int folder, const char* path) {
  if (path[0] == '/') return fs::path(path).lexically_normal().string();
  std::error_code error;
  const auto base = folder == AT_FDCWD
                        ? fs::current_path(error)
                        : fs::read_symlink("/proc/self/fd/" + std::to_string(folder), error);
  return (base / path).lexically_normal().string();
}

// The recorder, locked, where it is to know of `path`; the calls to be made meanwhile are not.
std::unique_lock<std::mutex> lock_for(const std::string& path) {
  auto& all = recorder();
  std::unique_lock lock(all.mutex);
  if (!all.active || !all.below(path)) lock.unlock();
  return lock;
}

std::unique_lock<std::mutex> lock_for(int file) {
  auto& all = recorder();
  std::unique_lock lock(all.mutex);
  if (!all.active || all.node_of(file) < 0) lock.unlock();
  return lock;
}

template <class Real>
int opened(int folder, const char* path, int flags, Real real) {
  if (!recorder().active) return real();
  const auto name = whole(folder, path);
  const auto lock = lock_for(name);
  if (!lock) return real();
  auto& all = recorder();
  const bool absent = access(name.c_str(), F_OK) != 0;
  const int file = real();
  struct stat status {};
  if (file < 0 || fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return file;
  if (absent) {
    const int node = all.add(status.st_ino);
    all.note({.what = "create " + name, .entries = {all.entry(name, node)}});
  } else if ((flags & O_TRUNC) != 0) {
    all.note({.what = "truncate " + name, .written = all.node_of(file), .truncates = true});
  }
  return file;
}

template <class Real>
ssize_t written(int file, const void* data, std::optional<off_t> offset, Real real) {
  if (!recorder().active) return real();
  const auto lock = lock_for(file);
  if (!lock) return real();
  const off_t at = offset ? *offset : lseek(file, 0, SEEK_CUR);
  const ssize_t count = real();
  auto& all = recorder();
  if (count > 0) {
    all.note({.what = "write " + std::to_string(count) + " bytes",
              .written = all.node_of(file),
              .offset = static_cast<size_t>(at),
              .bytes = std::string(static_cast<const char*>(data), static_cast<size_t>(count))});
  }
  return count;
}

template <class Real>
int synced(int file, Real real) {
  if (!recorder().active) return real();
  const auto lock = lock_for(file);
  const int result = real();
  auto& all = recorder();
  if (lock && result == 0) {
    const int node = all.node_of(file);
    all.note({.what = "sync node " + std::to_string(node), .synced = node});
  }
  return result;
}

template <class Real>
int made(int folder, const char* path, Real real) {
  if (!recorder().active) return real();
  const auto name = whole(folder, path);
  const auto lock = lock_for(name);
  const int result = real();
  struct stat status {};
  if (!lock || result != 0 || lstat(name.c_str(), &status) != 0) return result;
  auto& all = recorder();
  const int node = all.add(status.st_ino);
  all.note({.what = "mkdir " + name, .entries = {all.entry(name, node)}});
  return result;
}

template <class Real>
int removed(int folder, const char* path, Real real) {
  if (!recorder().active) return real();
  const auto name = whole(folder, path);
  const auto lock = lock_for(name);
  const int result = real();
  auto& all = recorder();
  if (lock && result == 0) all.note({.what = "remove " + name, .entries = {all.entry(name, -1)}});
  return result;
}

template <class Real>
int renamed(int from_folder, const char* from, int to_folder, const char* to, bool swaps,
            Real real) {
  if (!recorder().active) return real();
  const auto before = whole(from_folder, from);
  const auto name = whole(to_folder, to);
  const auto lock = lock_for(name);
  if (!lock) return real();
  auto& all = recorder();
  if (swaps && all.refuses_swaps) {
    errno = EINVAL;
    return -1;
  }
  const int node = all.node_of(before);
  const int other = all.node_of(name);
  const int result = real();
  if (result != 0) return result;
  all.note({.what = (swaps ? "swap " : "rename ") + before + " " + name,
            .entries = {all.entry(before, swaps ? other : -1), all.entry(name, node)}});
  return result;
}

// --- What a disk has ---

struct Node {
  bool folder = false;
  std::string data;
  std::string durable;
  std::map<std::string, int> entries;  // durable ones
};

struct Disk {
  std::map<int, Node> nodes{{0, {.folder = true, .data = {}, .durable = {}, .entries = {}}}};
  std::vector<const FileCall*> pending;

  static void change(std::map<int, Node>& nodes, const FileCall& call) {
    for (const auto& [folder, name, node] : call.entries) {
      auto& at = nodes[static_cast<int>(folder)];
      at.folder = true;
      if (node < 0) {
        at.entries.erase(name);
      } else {
        at.entries[name] = node;
        nodes[node].folder |= call.what.starts_with("mkdir");
      }
    }
  }

  void take(const FileCall& call) {
    if (!call.entries.empty()) pending.push_back(&call);
    if (call.written >= 0) {
      auto& data = nodes[call.written].data;
      if (call.truncates) {
        data.resize(call.offset);
      } else {
        data.resize(std::max(data.size(), call.offset + call.bytes.size()));
        data.replace(call.offset, call.bytes.size(), call.bytes);
      }
    }
    if (call.synced < 0) return;
    nodes[call.synced].durable = nodes[call.synced].data;
    const auto of_it = [&](const FileCall* waiting) {
      return std::any_of(waiting->entries.begin(), waiting->entries.end(), [&](const auto& entry) {
        return static_cast<int>(entry.folder) == call.synced;
      });
    };
    for (const auto* waiting : pending) {
      if (of_it(waiting)) change(nodes, *waiting);
    }
    std::erase_if(pending, of_it);
  }

  enum class Data { synced, all, zeros };
  Tree remains(const std::vector<bool>& kept, Data data) const {
    auto left = nodes;
    for (size_t i = 0; i < pending.size(); ++i) {
      if (kept[i]) change(left, *pending[i]);
    }
    Tree tree;
    const std::function<void(int, const std::string&, int)> walk = [&](int at, const auto& path,
                                                                       int depth) {
      if (depth > 8) return;
      for (const auto& [name, node] : left[at].entries) {
        const auto below = (fs::path(path) / name).string();
        const auto& child = left[node];
        if (child.folder) {
          tree.folders[below] = true;
          walk(node, below, depth + 1);
        } else if (data == Data::synced || child.data == child.durable) {
          tree.files[below] = child.durable;
        } else {
          tree.files[below] = data == Data::all ? child.data : std::string(child.data.size(), '\0');
        }
      }
    };
    walk(0, "", 0);
    return tree;
  }
};

}  // namespace

void Tree::put(const fs::path& root) const {
  for (const auto& entry : fs::directory_iterator(root)) fs::remove_all(entry.path());
  for (const auto& [path, made] : folders) fs::create_directories(root / path);
  for (const auto& [path, bytes] : files) std::ofstream(root / path, std::ios::binary) << bytes;
}

Tree Tree::of(const fs::path& root) {
  Tree tree;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const auto path = entry.path().lexically_relative(root).string();
    if (entry.is_directory()) {
      tree.folders[path] = true;
    } else {
      std::ifstream file(entry.path(), std::ios::binary);
      tree.files[path] = {std::istreambuf_iterator<char>(file), {}};
    }
  }
  return tree;
}

FileCalls::FileCalls(const fs::path& root) {
  auto& all = recorder();
  const std::lock_guard lock(all.mutex);
  all.root = fs::canonical(root).string();
  all.nodes.clear();
  all.calls.clear();
  all.next = 0;
  struct stat status {};
  if (stat(all.root.c_str(), &status) == 0) all.add(status.st_ino);
  all.refuses_swaps = false;
  all.active = true;
}

FileCalls::~FileCalls() { recorder().active = false; }

void FileCalls::refuse_swaps(bool refuse) { recorder().refuses_swaps = refuse; }

std::vector<FileCall> FileCalls::calls() const {
  auto& all = recorder();
  const std::lock_guard lock(all.mutex);
  return all.calls;
}

Tree after(const std::vector<FileCall>& calls) {
  Disk disk;
  for (const auto& call : calls) disk.take(call);
  return disk.remains(std::vector<bool>(disk.pending.size(), true), Disk::Data::all);
}

void visit_remains(const std::vector<FileCall>& calls, size_t count,
                   const std::function<void(const Tree&)>& visit) {
  Disk disk;
  for (size_t i = 0; i < count; ++i) disk.take(calls[i]);
  // All choices of the changes that were not synced; of very many, those in a row and all but one.
  constexpr size_t kAll = 8;
  const size_t pending = disk.pending.size();
  std::vector<std::vector<bool>> choices;
  if (pending <= kAll) {
    for (size_t bits = 0; bits < size_t{1} << pending; ++bits) {
      auto& kept = choices.emplace_back(pending);
      for (size_t i = 0; i < pending; ++i) kept[i] = (bits >> i & 1) != 0;
    }
  } else {
    for (size_t first = 0; first <= pending; ++first) {
      std::vector<bool> kept(pending);
      std::fill_n(kept.begin(), first, true);
      choices.push_back(kept);
      if (first == pending) break;
      kept.assign(pending, true);
      kept[first] = false;
      choices.push_back(kept);
      kept.assign(pending, false);
      kept[first] = true;
      choices.push_back(kept);
    }
  }
  for (const auto& kept : choices) {
    for (const auto data : {Disk::Data::synced, Disk::Data::all, Disk::Data::zeros})
      visit(disk.remains(kept, data));
  }
}

}  // namespace zero::test

// --- The calls ---

using zero::test::made;
using zero::test::next_of;
using zero::test::opened;
using zero::test::removed;
using zero::test::renamed;
using zero::test::synced;
using zero::test::written;

extern "C" {

int open(const char* path, int flags, ...) {
  static const auto real = next_of(open, "open");
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : mode_t{0};
  va_end(more);
  if ((flags & (O_CREAT | O_TRUNC)) == 0) return real(path, flags, mode);
  return opened(AT_FDCWD, path, flags, [&] { return real(path, flags, mode); });
}

int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : mode_t{0};
  va_end(more);
  return open(path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
  static const auto real = next_of(openat, "openat");
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : mode_t{0};
  va_end(more);
  if ((flags & (O_CREAT | O_TRUNC)) == 0) return real(folder, path, flags, mode);
  return opened(folder, path, flags, [&] { return real(folder, path, flags, mode); });
}

ssize_t write(int file, const void* data, size_t size) {
  static const auto real = next_of(write, "write");
  return written(file, data, std::nullopt, [&] { return real(file, data, size); });
}

ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  static const auto real = next_of(pwrite, "pwrite");
  return written(file, data, offset, [&] { return real(file, data, size, offset); });
}

ssize_t pwrite64(int file, const void* data, size_t size, off64_t offset) {
  return pwrite(file, data, size, offset);
}

int fsync(int file) {
  static const auto real = next_of(fsync, "fsync");
  return synced(file, [&] { return real(file); });
}

int fdatasync(int file) {
  static const auto real = next_of(fdatasync, "fdatasync");
  return synced(file, [&] { return real(file); });
}

int mkdir(const char* path, mode_t mode) noexcept {
  static const auto real = next_of(mkdir, "mkdir");
  return made(AT_FDCWD, path, [&] { return real(path, mode); });
}

int unlink(const char* path) noexcept {
  static const auto real = next_of(unlink, "unlink");
  return removed(AT_FDCWD, path, [&] { return real(path); });
}

int rmdir(const char* path) noexcept {
  static const auto real = next_of(rmdir, "rmdir");
  return removed(AT_FDCWD, path, [&] { return real(path); });
}

int remove(const char* path) noexcept {
  static const auto real = next_of(remove, "remove");
  return removed(AT_FDCWD, path, [&] { return real(path); });
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  static const auto real = next_of(unlinkat, "unlinkat");
  return removed(folder, path, [&] { return real(folder, path, flags); });
}

int rename(const char* from, const char* to) noexcept {
  static const auto real = next_of(rename, "rename");
  return renamed(AT_FDCWD, from, AT_FDCWD, to, false, [&] { return real(from, to); });
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned int flags) noexcept {
  static const auto real = next_of(renameat2, "renameat2");
  return renamed(from_folder, from, to_folder, to, (flags & RENAME_EXCHANGE) != 0,
                 [&] { return real(from_folder, from, to_folder, to, flags); });
}

}  // extern "C"
