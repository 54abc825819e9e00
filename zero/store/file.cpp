#include "zero/store/file.h"

#include <ATen/ceil_div.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "zero/base/error.h"

namespace zero::store {

namespace {

constexpr int kThreads = 4;  // for each disk
constexpr int kMostUnderWay = 4096;

bool aligned(int64_t value) { return value % kAlignment == 0; }

// Returns the remedy for an error of a disk in the midst of a run.
std::string remedy(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return " Free space there, or name another folder.";
    case EIO:
    case EREMOTEIO:
      return " That disk is failing: the system's log says more. Put the states on another, and "
             "resume from a checkpoint.";
    default:
      return "";
  }
}

FileOptions checked(FileOptions options) {
  if (options.block_bytes < kAlignment || !aligned(options.block_bytes)) {
    throw ConfigError(fmt::format("aio.block_size is {}; it must be a multiple of {} bytes.",
                                  options.block_bytes, kAlignment));
  }
  if (options.queue_depth < 1 || options.queue_depth > kMostUnderWay) {
    throw ConfigError(fmt::format("aio.queue_depth is {}; it must be from 1 to {}.",
                                  options.queue_depth, kMostUnderWay));
  }
  return options;
}

std::vector<double> checked(const std::vector<std::string>& paths, std::vector<double> shares) {
  if (paths.empty()) throw ConfigError("No file is named for the states.");
  for (size_t i = 0; i < paths.size(); ++i) {
    if (std::find(paths.begin(), paths.begin() + static_cast<int64_t>(i), paths[i]) !=
        paths.begin() + static_cast<int64_t>(i)) {
      throw ConfigError(fmt::format("The file {} is named twice.", paths[i]));
    }
  }
  if (shares.empty()) shares.assign(paths.size(), 1);
  if (shares.size() != paths.size()) {
    throw ConfigError(fmt::format("{} files have {} shares; give one for each, or none.",
                                  paths.size(), shares.size()));
  }
  for (size_t i = 0; i < paths.size(); ++i) {
    if (!std::isfinite(shares[i]) || shares[i] <= 0) {
      throw ConfigError(
          fmt::format("The share of {} is {}; it must be more than 0.", paths[i], shares[i]));
    }
  }
  return shares;
}

}  // namespace

Transfer& Transfer::operator=(Transfer&& other) noexcept {
  if (this != &other) {
    drop();
    file_ = other.file_;
    request_ = std::move(other.request_);
    offset_ = other.offset_;
    memory_ = other.memory_;
    bytes_ = other.bytes_;
    write_ = other.write_;
    checks_ = other.checks_;
    unit_ = other.unit_;
  }
  return *this;
}

Transfer::~Transfer() { drop(); }

void Transfer::drop() {
  const auto request = std::exchange(request_, nullptr);
  if (!request || !file_->owner_.here()) return;
  file_->queue_->wait(*request);
  show(*request);
  if (write_ && request->error != 0) file_->lose(file_->failure(*request, true));
}

void Transfer::wait() {
  const auto request = std::exchange(request_, nullptr);
  if (!request) return;
  file_->queue_->wait(*request);
  show(*request);
  if (request->error != 0) throw StoreError(file_->failure(*request, write_));
  if (!write_ && checks_ == Checks::here) file_->verify(offset_, memory_, bytes_);
}

void Transfer::show(const Request& request) const {
  if (request.begun == 0) return;
  std::array<char, 32> label{};
  if (unit_ >= 0) fmt::format_to_n(label.data(), label.size() - 1, "unit {}", unit_);
  file_->options_.timeline->add(write_ ? Activity::disk_write : Activity::disk_read, label.data(),
                                request.begun, request.ended, bytes_);
}

bool Transfer::done() const { return !request_ || file_->queue_->done(*request_); }

File::File(std::string path, int64_t bytes, const FileOptions& options)
    : File(std::vector<std::string>{std::move(path)}, {}, bytes, options) {}

File::File(const std::vector<std::string>& paths, const std::vector<double>& shares, int64_t bytes,
           const FileOptions& options)
    : bytes_(at::round_up(bytes, kAlignment)),
      options_(checked(options)),
      stripes_(bytes_, options_.block_bytes, checked(paths, shares)) {
  for (size_t i = 0; i < paths.size(); ++i) {
    files_.push_back(
        std::make_unique<ReservedFile>(paths[i], stripes_.bytes_of(i), options_.direct));
  }
  if (options_.checksums) checksums_ = Checksums(bytes_);
  const auto disks = static_cast<int>(files_.size());
  const int depth = std::min(kMostUnderWay, options_.queue_depth * disks);
  if (options_.queue) {
    queue_ = options_.queue(depth);
  } else {
    if (options_.uring) queue_ = uring_queue(depth);
    if (!queue_) queue_ = thread_queue(std::min(kThreads * disks, depth));
  }
}

File::~File() {
  // The threads or the ring of a forked child's copy are its parent's.
  if (!owner_.here()) (void)queue_.release();
  queue_.reset();  // waits
}

FileCounts File::counts() const {
  FileCounts sum;
  for (const auto& file : files_) {
    const auto counts = file->counts();
    sum.read += counts.read;
    sum.written += counts.written;
  }
  return sum;
}

std::string File::way() const {
  const auto direct =
      std::count_if(files_.begin(), files_.end(), [](const auto& file) { return file->direct(); });
  return fmt::format("{}, {}", queue_->name(),
                     direct == 0                                     ? "buffered"
                     : direct == static_cast<int64_t>(files_.size()) ? "direct"
                                                                     : "partly direct");
}

Transfer File::read(int64_t offset, void* to, int64_t bytes, Checks checks, int64_t unit) {
  return start(offset, static_cast<std::byte*>(to), bytes, false, checks, unit);
}

Transfer File::write(int64_t offset, const void* from, int64_t bytes, Checks checks, int64_t unit) {
  // The queue's pieces have one kind of pointer; a write only reads from it.
  return start(offset, static_cast<std::byte*>(const_cast<void*>(from)), bytes, true, checks, unit);
}

void File::record(int64_t offset, const std::byte* memory, int64_t bytes) {
  if (options_.checksums) checksums_.record(offset, memory, bytes);
}

Transfer File::start(int64_t offset, std::byte* memory, int64_t bytes, bool write, Checks checks,
                     int64_t unit) {
  ensure(offset >= 0 && bytes >= 0 && offset + bytes <= bytes_, "a transfer beyond its file");
  ensure(aligned(offset) && aligned(bytes) && aligned(reinterpret_cast<intptr_t>(memory)),
         "a transfer that is not aligned");
  if (lost_) {
    const std::lock_guard lock(mutex_);
    throw StoreError(what_lost_);
  }
  if (write && checks == Checks::here) record(offset, memory, bytes);
  Transfer transfer;
  transfer.file_ = this;
  transfer.request_ = std::make_shared<Request>();
  transfer.offset_ = offset;
  transfer.memory_ = memory;
  transfer.bytes_ = bytes;
  transfer.write_ = write;
  transfer.checks_ = checks;
  transfer.unit_ = unit;
  if (options_.timeline && options_.timeline->keeps()) transfer.request_->begun = Timeline::now();
  std::vector<Piece> pieces;
  for (int64_t at = 0; at < bytes;) {
    const auto [file, there] = stripes_.place(offset + at);
    const auto size =
        std::min({options_.block_bytes, bytes - at, stripes_.contiguous(offset + at)});
    files_[file]->count(size, write);
    pieces.push_back({.file = files_[file]->descriptor(),
                      .offset = there,
                      .memory = memory + at,
                      .bytes = size,
                      .write = write,
                      .request = transfer.request_});
    at += size;
  }
  queue_->push(pieces);
  return transfer;
}

std::string File::failure(const Request& request, bool write) const {
  const auto file = std::find_if(files_.begin(), files_.end(), [&](const auto& candidate) {
    return candidate->descriptor() == request.error_file;
  });
  ensure(file != files_.end(), "a failure in a file that is not ours");
  const auto reason =
      request.error == Request::kEnded
          ? fmt::format(
                "the file ends there, though {} were reserved; something else has "
                "truncated it",
                format_bytes(static_cast<double>((*file)->bytes())))
          : fmt::format("{} (errno {})", std::strerror(request.error), request.error);
  return fmt::format("Cannot {} {} at byte {}: {}.{}", write ? "write" : "read", (*file)->path(),
                     request.error_offset, reason, remedy(request.error));
}

void File::verify(int64_t offset, const std::byte* memory, int64_t bytes) const {
  if (!options_.checksums) return;
  const int64_t page = checksums_.first_difference(offset, memory, bytes);
  if (page < 0) return;
  const auto [file, there] = stripes_.place(page);
  throw StoreError(fmt::format(
      "{} holds other bytes at byte {} than were written there: a page of {} bytes is torn or "
      "rotten, or something else has written to the file. Check that disk, put the states on "
      "another, and resume from a checkpoint.",
      files_[file]->path(), there, kAlignment));
}

void File::lose(const std::string& failure) {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  what_lost_ = failure + " The states on disk are incomplete: resume from a checkpoint.";
  lost_ = true;
}

}  // namespace zero::store
