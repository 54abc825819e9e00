// Disks for offloaded states, tried by the code that training uses.
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <sstream>
#include <string_view>

#include "apps/zero/doctor_checks.h"
#include "zero/base/error.h"
#include "zero/base/host_memory.h"
#include "zero/store/file.h"
#include "zero/store/folder.h"
#include "zero/store/speed.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDisks = "disks";
constexpr int64_t kLeast = int64_t{256} << 20;  // bytes of room, below which nothing is tried

template <size_t kSize>
bool one_of(const std::string& type, const std::array<std::string_view, kSize>& types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

bool in_memory(const std::string& type) {
  return one_of(type, std::array<std::string_view, 2>{"tmpfs", "ramfs"});
}

bool over_network(const std::string& type) {
  constexpr std::array<std::string_view, 14> kTypes{
      "nfs",  "nfs4", "cifs",   "smb3",           "smbfs",      "lustre",    "ceph",
      "gpfs", "9p",   "beegfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "afs"};
  return one_of(type, kTypes);
}

// The kernel writes a blank in a mount's name as \040.
std::string plain(const std::string& text) {
  std::string all;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      all += static_cast<char>(std::stoi(text.substr(i + 1, 3), nullptr, 8));
      i += 3;
    } else {
      all += text[i];
    }
  }
  return all;
}

bool lies_in(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first ==
         folder.end();
}

// Finds the file system that `path` lies in: the last of those with the longest mount point.
void find_mount(const fs::path& root, const fs::path& path, Disk& disk) {
  std::ifstream mounts(root / "proc/self/mounts");
  size_t longest = 0;
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string source, point, type;
    if (!(fields >> source >> point >> type)) continue;
    point = plain(point);
    if (point.size() < longest || !lies_in(path, point)) continue;
    longest = point.size();
    disk.source = plain(source);
    disk.type = type;
  }
}

// Returns whether the disk under a file system, or the disk of which it is a part, says that it
// rotates.
std::optional<bool> rotates(const fs::path& root, const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return std::nullopt;
  const auto device =
      root / fmt::format("sys/dev/block/{}:{}", major(status.st_dev), minor(status.st_dev));
  std::error_code error;
  const auto real = fs::canonical(device, error);
  if (error) return std::nullopt;
  for (const auto& folder : {real, real.parent_path()}) {
    if (const auto value = number(first_line(folder / "queue/rotational"))) return *value != 0;
  }
  return std::nullopt;
}

}  // namespace

Disk read_disk(const fs::path& root, const std::string& path) {
  Disk disk{.path = path, .type = {}, .source = {}};
  std::error_code error;
  const auto real = fs::canonical(path, error);
  if (error || !fs::is_directory(real)) {
    disk.failure = error ? error.message() : "it is no folder";
    return disk;
  }
  find_mount(root, real, disk);
  disk.rotates = rotates(root, path);
  const auto space = fs::space(real, error);
  if (!error) {
    disk.total = static_cast<int64_t>(space.capacity);
    disk.free = static_cast<int64_t>(space.available);
  }
  return disk;
}

void try_disk(Disk& disk) {
  constexpr int64_t kTried = int64_t{8} << 20;
  if (!disk.failure.empty() || disk.free < kLeast) return;
  try {
    const auto memory =
        host_zeros(kTried, at::kByte, std::make_shared<Ledger>(), Category::offload_buffers);
    const store::Folder folder(disk.path);
    store::File file(folder.path() + "/doctor", kTried, {});
    disk.way = file.way();
    auto* bytes = static_cast<std::byte*>(memory.data_ptr());
    for (const bool write : {true, false})
      (void)store::sweep_seconds(file, bytes, kTried / 2, write);
  } catch (const Error& error) {
    disk.failure = error.what();
  }
}

Findings judge(const Disk& disk, int64_t memory) {
  constexpr double kOfParameter = 12;  // bytes of bf16's optimizer states
  const auto named = [&](const char* what) { return fmt::format("{} {}", disk.path, what); };
  if (!disk.failure.empty()) {
    return {problem(fine(kDisks, disk.path, disk.failure),
                    "Name an existing folder on the disk that this user may write.",
                    "States cannot be offloaded there.")};
  }
  Findings all;
  const auto system =
      fine(kDisks, disk.path,
           fmt::format("{} on {}{}", disk.type.empty() ? "unknown file system" : disk.type,
                       disk.source.empty() ? "an unknown device" : disk.source,
                       disk.rotates.value_or(false) ? ", which says that it rotates" : ""));
  if (in_memory(disk.type)) {
    all.push_back(problem(system, "Name a folder on a disk.",
                          "This file system lies in memory: each byte of states that is offloaded "
                          "to it takes a byte of the memory that it should free."));
  } else if (over_network(disk.type)) {
    all.push_back(advice(system, "Name a folder on a disk of this machine.",
                         "States go over the network, which all hosts that use it share."));
  } else {
    all.push_back(system);
  }

  const auto room = fine(kDisks, named("room"),
                         fmt::format("{} of {} free: optimizer states of {:.2f}e9 parameters",
                                     format_bytes(static_cast<double>(disk.free)),
                                     format_bytes(static_cast<double>(disk.total)),
                                     static_cast<double>(disk.free) / kOfParameter * 1e-9));
  if (disk.free < kLeast) {
    all.push_back(problem(room, "Free space there, or name another folder.",
                          fmt::format("States of more than {:.0f}e6 parameters are refused.",
                                      static_cast<double>(disk.free) / kOfParameter * 1e-6)));
  } else if (disk.free < memory) {
    all.push_back(advice(room, "Free space there, or add a disk (nvme_path takes several).",
                         fmt::format("There is less room than memory ({} available): a model whose "
                                     "states do not fit there hardly fits here.",
                                     format_bytes(static_cast<double>(memory)))));
  } else {
    all.push_back(room);
  }
  if (disk.way.empty()) return all;

  const auto way = fine(kDisks, named("way"), disk.way);
  if (disk.way.find("direct") == std::string::npos && !in_memory(disk.type)) {
    all.push_back(advice(way, "Name a folder on a file system with O_DIRECT (ext4, XFS).",
                         "Each byte is copied through the page cache, which takes memory that "
                         "offloading is to free."));
  } else {
    all.push_back(way);
  }
  return all;
}

}  // namespace zero::app::checkup
