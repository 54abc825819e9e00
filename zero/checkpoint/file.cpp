#include "zero/checkpoint/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/file_limit.h"

namespace zero {
namespace {

constexpr size_t kBuffer = size_t{4} << 20;
// O_DIRECT wants addresses, offsets and sizes that are multiples of the disk's blocks.
constexpr size_t kAligned = 4096;

std::filesystem::path folder_of(const std::filesystem::path& path) {
  const auto folder = path.parent_path();
  return folder.empty() ? std::filesystem::path(".") : folder;
}

}  // namespace

OutputFile::OutputFile(std::filesystem::path path, Fail fail)
    : path_(std::move(path)),
      fail_(fail),
      buffer_(static_cast<std::byte*>(std::aligned_alloc(kAligned, kBuffer)), &std::free) {
  ensure(buffer_ != nullptr, "no memory for the buffer of a file");
  std::error_code unknown;  // creating it says what is wrong
  const auto there = std::filesystem::status(path_, unknown);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) {
    fail_(
        fmt::format("Cannot write {}: it is no regular file. Give another name.", path_.string()));
  }
  temporary_ = path_;
  temporary_ += fmt::format(".{}.tmp", ::getpid());
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) report("create");
}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  if (owner_.here()) ::unlink(temporary_.c_str());
}

void OutputFile::report(const char* what) const {
  const int code = errno;
  const std::string remedy =
      code == ENOSPC || code == EDQUOT  ? " Free some space, or write to another disk."
      : code == EFBIG && largest_file() ? file_limit_remedy()
                                        : " Check that the folder exists and may be written.";
  fail_(fmt::format("Cannot {} {}: {}.{}", what, path_.string(), std::strerror(code), remedy));
  std::abort();  // `fail_` throws
}

void OutputFile::put(uint64_t offset, const std::byte* data, size_t size) {
  if (size > 0 && beyond_file_limit(static_cast<int64_t>(offset + size))) report("write");
  while (size > 0) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    set_direct((address | offset | size) % kAligned == 0);
    const auto written = ::pwrite(descriptor_, data, size, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EINVAL && direct_ && may_be_direct_) {
      may_be_direct_ = false;
      continue;
    }
    if (written < 0) report("write");
    data += written;
    offset += static_cast<uint64_t>(written);
    size -= static_cast<size_t>(written);
  }
}

// Makes the next write one that passes the page cache by, if it can.
void OutputFile::set_direct(bool direct) {
  direct = direct && may_be_direct_;
  if (direct == direct_) return;
  const int flags = ::fcntl(descriptor_, F_GETFL);
  const bool set = flags >= 0 && ::fcntl(descriptor_, F_SETFL,
                                         direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
  if (set) direct_ = direct;
  if (!set) may_be_direct_ = false;
}

void OutputFile::flush() {
  put(size_ - buffered_, buffer_.get(), buffered_);
  buffered_ = 0;
}

void OutputFile::sum(const std::byte* data, size_t size) {
  while (size > 0) {
    const size_t part = std::min<size_t>(size, kSummedBlock - sums_.bytes % kSummedBlock);
    block_.add({data, part});
    sums_.bytes += part;
    if (sums_.bytes % kSummedBlock == 0) sums_.blocks.push_back(block_.take());
    data += part;
    size -= part;
  }
}

void OutputFile::write(const void* data, size_t size) {
  const auto* from = static_cast<const std::byte*>(data);
  sum(from, size);
  while (size > 0) {
    const size_t part = std::min(size, kBuffer - buffered_);
    std::memcpy(buffer_.get() + buffered_, from, part);
    buffered_ += part;
    size_ += part;
    from += part;
    size -= part;
    if (buffered_ == kBuffer) flush();
  }
}

void OutputFile::write_at(uint64_t offset, const void* data, size_t size) {
  flush();
  put(offset, static_cast<const std::byte*>(data), size);
  size_ = std::max(size_, offset + size);
}

void OutputFile::commit() {
  flush();
  if (sums_.bytes % kSummedBlock != 0) sums_.blocks.push_back(block_.take());
  if (::fsync(descriptor_) != 0) report("sync");
  // Network file systems report a failed write only here.
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int code = errno;
    ::unlink(temporary_.c_str());
    errno = code;
    report("complete");
  }
  sync_folder(folder_of(path_), fail_);
}

void sync_folder(const std::filesystem::path& folder, Fail fail) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = descriptor >= 0 && ::fsync(descriptor) == 0;
  const int code = errno;
  if (descriptor >= 0) ::close(descriptor);
  // Some file systems cannot sync a folder; they say so with EINVAL.
  if (!synced && code != EINVAL) {
    fail(fmt::format("Cannot sync the folder {}: {}.", folder.string(), std::strerror(code)));
  }
}

InputFile::InputFile(std::filesystem::path path, Fail fail)
    : path_(std::move(path)),
      fail_(fail),
      descriptor_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status {};
  const char* reason = nullptr;
  if (!descriptor_ || ::fstat(descriptor_.get(), &status) != 0) {
    reason = std::strerror(errno);
  } else if (!S_ISREG(status.st_mode)) {
    reason = S_ISDIR(status.st_mode) ? "it is a folder" : "it is not a regular file";
  }
  if (reason != nullptr) fail_(fmt::format("Cannot read {}: {}.", path_.string(), reason));
  size_ = static_cast<uint64_t>(status.st_size);
}

void InputFile::read_at(uint64_t offset, void* data, size_t size) const {
  auto* to = static_cast<std::byte*>(data);
  while (size > 0) {
    const auto got = ::pread(descriptor_.get(), to, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      fail_(fmt::format("Cannot read {} at byte {}: {}.", path_.string(), offset,
                        std::strerror(errno)));
    }
    if (got == 0) {
      fail_(fmt::format(
          "{} ends at byte {} and had {} bytes when it was opened: it was truncated meanwhile. "
          "Replace a file that is in use by renaming another over it.",
          path_.string(), offset, size_));
    }
    to += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

void InputFile::will_need(uint64_t offset, uint64_t size) const {
  // The system follows a hint for as many bytes as it reads ahead, 128 KiB by default, and leaves
  // out what is beyond. It is only a hint: a failure changes nothing.
  constexpr uint64_t kPiece = uint64_t{128} << 10;
  for (const uint64_t end = offset + size; offset < end; offset += kPiece) {
    (void)::posix_fadvise(descriptor_.get(), static_cast<off_t>(offset),
                          static_cast<off_t>(std::min(kPiece, end - offset)), POSIX_FADV_WILLNEED);
  }
}

std::string read_file(const std::filesystem::path& path, Fail fail) {
  const InputFile file(path, fail);
  std::string bytes(file.size(), '\0');
  file.read_at(0, bytes.data(), bytes.size());
  return bytes;
}

void write_file(const std::filesystem::path& path, std::string_view bytes, Fail fail) {
  OutputFile file(path, fail);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

void copy_files(const std::filesystem::path& from, const std::filesystem::path& to,
                std::span<const std::string_view> names, Fail fail) {
  for (const auto name : names) {
    std::error_code error;
    if (std::filesystem::exists(from / name, error))
      write_file(to / name, read_file(from / name, fail), fail);
  }
}

}  // namespace zero
