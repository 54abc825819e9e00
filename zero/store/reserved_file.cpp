#include "zero/store/reserved_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/file_limit.h"

namespace zero::store {

namespace {

// Returns the free bytes of the disk, or -1 if the system does not tell them.
int64_t free_bytes(int file) {
  struct statvfs disk {};
  if (fstatvfs(file, &disk) != 0 || disk.f_blocks == 0) return -1;
  return static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
}

// Returns 0 or an errno. If the disk has too little room, nothing is tried: the attempt would fill
// the disk for a moment, and another program would fail.
int try_to_reserve(int file, int64_t offset, int64_t bytes, Use use) {
  if (bytes == 0) return 0;
  if (beyond_file_limit(offset + bytes)) return EFBIG;
  if (const int64_t left = free_bytes(file); left >= 0 && left < bytes) return ENOSPC;
  while (fallocate(file, 0, offset, bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP) return errno;
    // This file system cannot reserve. A later write reports its failure, so it is enough that
    // there is room now. A write to mapped memory would end the process instead, so mapped bytes
    // are written here.
    if (use == Use::mapped) return posix_fallocate(file, offset, bytes);
    return ftruncate(file, offset + bytes) == 0 ? 0 : errno;
  }
  return 0;
}

std::string remedy_of_open(int error) {
  switch (error) {
    case ENOENT:
      return " Make the folder first, or name another.";
    case EACCES:
    case EPERM:
    case EROFS:
      return " Name a folder that this user may write.";
    default:
      return "";
  }
}

std::string remedy_of_reserve(int error, int64_t left) {
  if (error == EFBIG && largest_file()) return file_limit_remedy();
  return fmt::format(
      "{} Free space there, or name another folder.",
      left < 0 ? ""
               : fmt::format(" The disk has {} left.", format_bytes(static_cast<double>(left))));
}

}  // namespace

void reserve(int file, int64_t offset, int64_t bytes, const std::string& what, Use use) {
  const int error = try_to_reserve(file, offset, bytes, use);
  if (error == 0) return;
  throw StoreError(fmt::format("Cannot reserve {} for {}: {} (errno {}).{}",
                               format_bytes(static_cast<double>(bytes)), what, std::strerror(error),
                               error, remedy_of_reserve(error, free_bytes(file))));
}

ReservedFile::ReservedFile(std::string path, int64_t bytes, bool direct)
    : path_(std::move(path)), bytes_(bytes) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC;
  constexpr mode_t kOwner = 0600;
  if (direct) descriptor_ = open(path_.c_str(), kFlags | O_DIRECT, kOwner);
  direct_ = descriptor_ >= 0;
  if (descriptor_ < 0) descriptor_ = open(path_.c_str(), kFlags, kOwner);
  if (descriptor_ < 0) {
    const int error = errno;
    throw StoreError(fmt::format("Cannot make the file {}: {} (errno {}).{}", path_,
                                 std::strerror(error), error, remedy_of_open(error)));
  }
  try {
    reserve(descriptor_, 0, bytes_, path_);
  } catch (const StoreError&) {
    close(descriptor_);
    unlink(path_.c_str());
    throw;
  }
}

ReservedFile::~ReservedFile() {
  close(descriptor_);
  if (owner_.here()) unlink(path_.c_str());
}

}  // namespace zero::store
