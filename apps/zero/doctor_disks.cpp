// Disks for offloaded states, tried by the code that training uses.
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

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

struct Mount {
  std::string type, source;  // "ext4", "/dev/nvme0n1p1"
};

// Returns the file system that `path` lies in: the last of those with the longest mount point.
Mount mount_of(const fs::path& root, const fs::path& path) {
  std::ifstream mounts(root / "proc/self/mounts");
  Mount found{"unknown file system", "an unknown device"};
  size_t longest = 0;
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string source, point, type;
    if (!(fields >> source >> point >> type)) continue;
    point = plain(point);
    if (point.size() < longest || !lies_in(path, point)) continue;
    longest = point.size();
    found = {type, plain(source)};
  }
  return found;
}

// Writes and reads by the code that training uses; returns how bytes go, as "io_uring, direct".
std::string try_disk(const std::string& path) {
  constexpr int64_t kTried = int64_t{8} << 20;
  const auto memory =
      host_zeros(kTried, at::kByte, std::make_shared<Ledger>(), Category::offload_buffers);
  const store::Folder folder(path);
  store::File file(folder.path() + "/doctor", kTried, {});
  auto* bytes = static_cast<std::byte*>(memory.data_ptr());
  for (const bool write : {true, false}) (void)store::sweep_seconds(file, bytes, kTried / 2, write);
  return file.way();
}

}  // namespace

void check_disk(Report& report, const fs::path& root, const std::string& path) {
  constexpr int64_t kLeast = int64_t{256} << 20;  // bytes of room, below which nothing is tried
  constexpr double kOfParameter = 12;             // bytes of bf16's optimizer states
  report.begin("disks");
  std::error_code error;
  const auto real = fs::canonical(path, error);
  const auto unusable = [&](const std::string& why) {
    report.check(false, Mark::problem, path, why,
                 "Name an existing folder on the disk that this user may write.",
                 "States cannot be offloaded there.");
  };
  if (error || !fs::is_directory(real)) return unusable(error ? error.message() : "no folder");
  const auto space = fs::space(real, error);
  if (error) return unusable(error.message());
  const auto free = static_cast<int64_t>(space.available);
  std::string way;
  try {
    if (free >= kLeast) way = try_disk(path);
  } catch (const Error& failure) {
    return unusable(failure.what());
  }

  const auto mount = mount_of(root, real);
  const auto& type = mount.type;
  const auto system = fmt::format("{} on {}", type, mount.source);
  const bool in_memory = type == "tmpfs" || type == "ramfs";
  if (in_memory) {
    report.check(false, Mark::problem, path, system, "Name a folder on a disk.",
                 "This file system lies in memory: each byte of states that is offloaded to it "
                 "takes a byte of the memory that it should free.");
  } else {
    constexpr std::array<std::string_view, 14> kOverNetwork{
        "nfs",  "nfs4", "cifs",   "smb3",           "smbfs",      "lustre",    "ceph",
        "gpfs", "9p",   "beegfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "afs"};
    report.check(std::find(kOverNetwork.begin(), kOverNetwork.end(), type) == kOverNetwork.end(),
                 Mark::advice, path, system, "Name a folder on a disk of this machine.",
                 "States go over the network, which all hosts that use it share.");
  }
  const auto parameters = static_cast<double>(free) / kOfParameter;
  report.check(
      free >= kLeast, Mark::problem, path + " room",
      fmt::format("{} of {} free: optimizer states of {:.2f}e9 parameters",
                  format_bytes(static_cast<double>(free)),
                  format_bytes(static_cast<double>(space.capacity)), parameters * 1e-9),
      "Free space there, or name another folder.",
      fmt::format("States of more than {:.0f}e6 parameters are refused.", parameters * 1e-6));
  if (way.empty()) return;
  report.check(way.find("direct") != std::string::npos || in_memory, Mark::advice, path + " way",
               way, "Name a folder on a file system with O_DIRECT (ext4, XFS).",
               "Each byte is copied through the page cache, which takes memory that offloading is "
               "to free.");
}

}  // namespace zero::app::checkup
