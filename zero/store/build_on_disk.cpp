#include "zero/store/build_on_disk.h"

#include <ATen/ceil_div.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/memory_mapping.h"
#include "zero/base/owner_process.h"
#include "zero/store/reserved_file.h"

namespace zero {

namespace {

// The number of blocks that stay in memory: one that is being filled, and one that is being
// written.
constexpr size_t kRecent = 2;

// Gives blocks that are mapped from a file without a name.
class MappedFile final : public BlockSource {
 public:
  explicit MappedFile(const std::string& folder);
  ~MappedFile() override { close(file_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  void* take(size_t bytes) override;
  void give(void* data) noexcept override;
  void check(void* data) override;

 private:
  struct Block {
    off_t offset = 0;
    MemoryMapping mapping;
  };
  void write_out(void* data);
  bool write_back(const Block& block);
  void refuse_if_lost() const;

  std::string folder_;
  OwnerProcess owner_;
  int file_ = -1;
  std::mutex mutex_;
  off_t end_ = 0;
  std::map<void*, Block> blocks_;
  std::deque<void*> recent_;
  int lost_ = 0;  // errno of a page that could not be written; the system reports it once
};

MappedFile::MappedFile(const std::string& folder) : folder_(folder) {
  constexpr mode_t kOwner = 0600;
  file_ = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kOwner);
  if (file_ < 0 && errno == EOPNOTSUPP) {
    auto path = folder + "/libzero-init-XXXXXX";
    file_ = mkostemp(path.data(), O_CLOEXEC);
    if (file_ >= 0) unlink(path.c_str());
  }
  if (file_ >= 0) return;
  const int error = errno;
  throw StoreError(fmt::format(
      "Cannot make a file in {} to build the model in: {} (errno {}). Name an existing folder that "
      "this user may write, on a disk with room for the model.",
      folder, std::strerror(error), error));
}

void* MappedFile::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  refuse_if_lost();
  const size_t whole = at::round_up(bytes, MemoryMapping::kPage);
  // Space is reserved so that a full disk is reported here, and not by a bus error later.
  store::reserve(file_, end_, static_cast<int64_t>(whole), "the model that is built in " + folder_,
                 store::Use::mapped);
  MemoryMapping mapping({.bytes = whole, .file = file_, .file_offset = end_, .shared = true});
  if (!mapping) {
    const int error = mapping.error();
    throw StoreError(fmt::format("Cannot map {} of the model that is built in {}: {} (errno {}).",
                                 format_bytes(static_cast<double>(bytes)), folder_,
                                 std::strerror(error), error));
  }
  void* const data = mapping.data();
  blocks_.emplace(data, Block{end_, std::move(mapping)});
  end_ += static_cast<off_t>(whole);
  recent_.push_back(data);
  if (recent_.size() > kRecent) {
    write_out(recent_.front());
    recent_.pop_front();
  }
  return data;
}

// Takes the block out of memory. It keeps its place in the file, and comes back when it is touched.
void MappedFile::write_out(void* data) {
  const auto block = blocks_.find(data);
  if (block == blocks_.end()) return;  // freed meanwhile
  if (!write_back(block->second)) return;
  const auto& [offset, mapping] = block->second;
  // This is advice. If the system refuses it, it takes the pages when it needs them.
  mapping.discard(0, mapping.bytes());
  posix_fadvise(file_, offset, static_cast<off_t>(mapping.bytes()), POSIX_FADV_DONTNEED);
}

// If a page cannot be written, the system drops it all the same and later reads something else in
// its place. It reports this once, to whoever has asked for the write, so the error is remembered
// here.
bool MappedFile::write_back(const Block& block) {
  int result = sync_file_range(
      file_, block.offset, static_cast<off_t>(block.mapping.bytes()),
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  if (result != 0 && (errno == ENOSYS || errno == EINVAL || errno == EPERM || errno == EOPNOTSUPP))
    result = fdatasync(file_);
  if (result != 0 && errno != EINTR && lost_ == 0) lost_ = errno;
  return lost_ == 0;
}

void MappedFile::refuse_if_lost() const {
  if (lost_ == 0) return;
  throw StoreError(fmt::format(
      "The model that is built in {} is incomplete: a part of it could not be written: {} (errno "
      "{}). {} Build the model again.",
      folder_, std::strerror(lost_), lost_,
      lost_ == ENOSPC || lost_ == EDQUOT
          ? "Free space there, or name another folder."
          : "That disk is failing: the system's log says more. Name a folder on another."));
}

void MappedFile::check(void* data) {
  const std::lock_guard lock(mutex_);
  if (const auto block = blocks_.find(data); block != blocks_.end()) write_back(block->second);
  refuse_if_lost();
}

void MappedFile::give(void* data) noexcept {
  if (!owner_.here()) return;  // the file belongs to the parent process too
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(data);
  const auto offset = block->second.offset;
  const auto length = static_cast<off_t>(block->second.mapping.bytes());
  blocks_.erase(block);
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
}

}  // namespace

BuildOnDisk::BuildOnDisk(const std::string& folder) {
  install_host_allocator();
  redirect_ = std::make_unique<BlockRedirect>(std::make_shared<MappedFile>(folder));
}

BuildOnDisk::~BuildOnDisk() = default;

}  // namespace zero
