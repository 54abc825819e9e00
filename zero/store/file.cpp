#include "zero/store/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "zero/base/error.h"

namespace zero::store {

namespace {

constexpr int kThreads = 4;

bool aligned(int64_t value) { return value % kAlignment == 0; }

std::string reason(int error) { return fmt::format("{} (errno {})", std::strerror(error), error); }

std::string remedy(int error) {
  switch (error) {
    case ENOENT:
      return " Make the folder first, or name another.";
    case EACCES:
    case EROFS:
      return " Name a folder that this user may write.";
    default:
      return "";
  }
}

// Of the disk, or -1 where it does not say.
int64_t free_bytes(int file) {
  struct statvfs disk {};
  if (fstatvfs(file, &disk) != 0) return -1;
  return static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
}

// 0, or an errno.
int reserve(int file, int64_t bytes) {
  if (bytes == 0) return 0;
  while (fallocate(file, 0, 0, bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP) return errno;
    // A file system that cannot reserve: at least see that there is room now.
    const int64_t left = free_bytes(file);
    if (left >= 0 && left < bytes) return ENOSPC;
    return ftruncate(file, bytes) == 0 ? 0 : errno;
  }
  return 0;
}

}  // namespace

Transfer& Transfer::operator=(Transfer&& other) noexcept {
  if (this != &other) {
    if (request_) file_->queue_->wait(*request_);
    file_ = other.file_;
    request_ = std::move(other.request_);
    write_ = other.write_;
  }
  return *this;
}

Transfer::~Transfer() {
  if (request_) file_->queue_->wait(*request_);
}

void Transfer::wait() {
  const auto request = std::exchange(request_, nullptr);
  if (!request) return;
  file_->queue_->wait(*request);
  if (request->error == 0) return;
  throw StoreError(
      fmt::format("Cannot {} {} at byte {}: {}.", write_ ? "write" : "read", file_->path_,
                  request->error_offset,
                  request->error == Request::kEnded
                      ? fmt::format("the file ends there, though {} were reserved; something else "
                                    "has truncated it",
                                    format_bytes(static_cast<double>(file_->bytes_)))
                      : reason(request->error)));
}

bool Transfer::done() const { return !request_ || file_->queue_->done(*request_); }

File::File(std::string path, int64_t bytes, const FileOptions& options)
    : path_(std::move(path)),
      bytes_((bytes + kAlignment - 1) / kAlignment * kAlignment),
      options_(options) {
  if (options.block_bytes < kAlignment || !aligned(options.block_bytes)) {
    throw ConfigError(fmt::format("aio.block_size is {}; it must be a multiple of {} bytes.",
                                  options.block_bytes, kAlignment));
  }
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    throw ConfigError(
        fmt::format("aio.queue_depth is {}; it must be from 1 to 4096.", options.queue_depth));
  }
  constexpr int kFlags = O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC;
  constexpr mode_t kOwner = 0600;
  if (options.direct) file_ = open(path_.c_str(), kFlags | O_DIRECT, kOwner);
  direct_ = file_ >= 0;
  if (file_ < 0) file_ = open(path_.c_str(), kFlags, kOwner);
  if (file_ < 0) {
    const int error = errno;
    throw StoreError(
        fmt::format("Cannot make the file {}: {}.{}", path_, reason(error), remedy(error)));
  }
  const int64_t left = free_bytes(file_);
  if (const int error = reserve(file_, bytes_); error != 0) {
    close(file_);
    unlink(path_.c_str());
    throw StoreError(fmt::format(
        "Cannot reserve {} for {}: {}.{} Free space there, or name another folder.",
        format_bytes(static_cast<double>(bytes_)), path_, reason(error),
        left < 0 ? ""
                 : fmt::format(" The disk has {} left.", format_bytes(static_cast<double>(left)))));
  }
  if (options.uring) queue_ = uring_queue(options.queue_depth);
  if (!queue_) queue_ = thread_queue(std::min(kThreads, options.queue_depth));
}

File::~File() {
  queue_.reset();  // waits
  close(file_);
  unlink(path_.c_str());
}

std::string File::way() const {
  return fmt::format("{}, {}", queue_->name(), direct_ ? "direct" : "buffered");
}

Transfer File::read(int64_t offset, void* to, int64_t bytes) {
  counts_.read += bytes;
  return start(offset, static_cast<std::byte*>(to), bytes, false);
}

Transfer File::write(int64_t offset, const void* from, int64_t bytes) {
  counts_.written += bytes;
  // The queue's pieces have one kind of pointer; a write only reads from it.
  return start(offset, static_cast<std::byte*>(const_cast<void*>(from)), bytes, true);
}

Transfer File::start(int64_t offset, std::byte* memory, int64_t bytes, bool write) {
  ensure(offset >= 0 && bytes >= 0 && offset + bytes <= bytes_, "a transfer beyond its file");
  ensure(aligned(offset) && aligned(bytes) && aligned(reinterpret_cast<intptr_t>(memory)),
         "a transfer that is not aligned");
  auto request = std::make_shared<Request>();
  std::vector<Piece> pieces;
  for (int64_t at = 0; at < bytes; at += options_.block_bytes) {
    pieces.push_back({.file = file_,
                      .offset = offset + at,
                      .memory = memory + at,
                      .bytes = std::min(options_.block_bytes, bytes - at),
                      .write = write,
                      .request = request});
  }
  queue_->push(pieces);
  return {*this, std::move(request), write};
}

}  // namespace zero::store
