// Disks for offloaded states, through the code that training uses.
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <cstring>
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
constexpr int64_t kFirst = int64_t{32} << 20;
constexpr int64_t kMost = int64_t{256} << 20;

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

// In mounts a blank stands as \040.
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

// The file system that `path` lies in: of the longest mount point, and of equal ones the last.
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

// Of the disk under a file system, or of that of which it is a part.
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

void measure(Disk& disk) {
  constexpr int64_t kChunk = int64_t{8} << 20;
  constexpr double kSeconds = 1.5;  // of each direction
  if (!disk.failure.empty() || disk.free < 2 * kFirst) return;
  try {
    const auto memory =
        host_zeros(2 * kChunk, at::kByte, std::make_shared<Ledger>(), Category::offload_buffers);
    auto* bytes = static_cast<std::byte*>(memory.data_ptr());
    memory.random_();  // some disks compress
    const store::Folder folder(disk.path);
    int64_t size = kFirst;
    {
      store::File file(folder.path() + "/doctor", size, {});
      const double seconds = store::sweep_seconds(file, bytes, kChunk, true);
      const auto affordable = static_cast<int64_t>(static_cast<double>(size) * kSeconds / seconds);
      size = std::clamp(std::min(affordable, disk.free / 2), kFirst, kMost) / kChunk * kChunk;
    }
    store::File file(folder.path() + "/doctor", size, {});
    disk.way = file.way();
    // Once untimed: only then does the file system note which blocks of the reservation hold
    // something.
    store::sweep_seconds(file, bytes, kChunk, true);
    const auto rate = [&](double seconds) { return static_cast<double>(size) / seconds * 1e-9; };
    disk.write = rate(store::sweep_seconds(file, bytes, kChunk, true));
    disk.read = rate(store::sweep_seconds(file, bytes, kChunk, false));
    disk.measured = size;
  } catch (const Error& error) {
    disk.failure = error.what();
  }
}

Findings judge(const Disk& disk, int64_t memory) {
  constexpr double kOfParameter = 12;  // bytes of bf16's optimizer states
  constexpr double kSlow = 0.5;        // GB/s
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
    all.push_back(advice(
        system, "Name a folder on a disk of this machine.",
        disk.measured > 0 ? fmt::format("States go over the network, at {:.2f} GB/s of writes and "
                                        "{:.2f} of reads (measured), which all hosts that use "
                                        "it share.",
                                        disk.write, disk.read)
                          : "States go over the network, which all hosts that use it share."));
  } else {
    all.push_back(system);
  }

  const auto room = fine(kDisks, named("room"),
                         fmt::format("{} of {} free: optimizer states of {:.2f}e9 parameters",
                                     format_bytes(static_cast<double>(disk.free)),
                                     format_bytes(static_cast<double>(disk.total)),
                                     static_cast<double>(disk.free) / kOfParameter * 1e-9));
  if (disk.free < kMost) {
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
  if (disk.measured == 0) return all;

  const auto way = fine(kDisks, named("way"), disk.way);
  if (disk.way.find("direct") == std::string::npos && !in_memory(disk.type)) {
    all.push_back(advice(way, "Name a folder on a file system with O_DIRECT (ext4, XFS).",
                         "Each byte is copied through the page cache, which takes memory that "
                         "offloading is to free; the speeds below may be the cache's."));
  } else {
    all.push_back(way);
  }
  const double update = kOfParameter / disk.write + kOfParameter / disk.read;
  const auto speed = fine(
      kDisks, named("speed"),
      fmt::format("write {:.2f} GB/s, read {:.2f} ({}): {:.1f} s for an update "
                  "of 1e9 parameters",
                  disk.write, disk.read, format_bytes(static_cast<double>(disk.measured)), update));
  if (std::min(disk.write, disk.read) < kSlow && !in_memory(disk.type)) {
    all.push_back(advice(speed,
                         "Offload to a faster disk, or to several (nvme_path takes them all).",
                         fmt::format("An update waits {:.1f} s for each 1e9 parameters (12 bytes "
                                     "written at {:.2f} GB/s and read at {:.2f}, measured).",
                                     update, disk.write, disk.read)));
  } else {
    all.push_back(speed);
  }
  return all;
}

}  // namespace zero::app::checkup
