#include "zero/comm/arena.h"

#include <ATen/ceil_div.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/file_limit.h"

namespace zero::comm {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif
// Note [Regions are not aligned to each other]
// Ranks allocate alike, so equal arrays of theirs lie at equal offsets in their regions. Were
// regions a power of two apart, the addresses would differ in high bits alone, and AMD's
// first-level cache, which tells lines of a set apart by a hash of bits 12 to 27 of the address,
// could not hold the same element of two ranks at once: reading both, as reductions do, takes a
// third more time. This many bytes, times a rank, change two or more of those bits.
constexpr int64_t kSkew = int64_t{34} << 20;
constexpr int64_t kMostVirtual = int64_t{8} << 40;
// Below this an allocation cannot bring the machine down, and the look at the free memory costs
// more than it is worth.
constexpr int64_t kWatchedBytes = int64_t{8} << 20;
constexpr int64_t kPiece = int64_t{32} << 20;
constexpr int64_t kCounter = sizeof(int64_t);

// Reserves pages; returns 0 or an errno.
int reserve(int file, int64_t offset, int64_t bytes) {
  if (beyond_file_limit(offset + bytes)) return EFBIG;
  for (;;) {
    if (fallocate(file, FALLOC_FL_KEEP_SIZE, offset, bytes) == 0) return 0;
    if (errno != EINTR) return errno;
  }
}

struct Reservation {
  void* base = nullptr;
  size_t bytes = 0;
  void* aligned = nullptr;  // to a huge page
};

// Address space, without memory, for `bytes` bytes that start on a multiple of a huge page.
Reservation reserve_addresses(int64_t bytes) {
  Reservation space;
  space.bytes = static_cast<size_t>(bytes + kHugePage);
  space.base =
      mmap(nullptr, space.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space.base == MAP_FAILED) return {};
  const auto address = reinterpret_cast<uintptr_t>(space.base);
  constexpr auto kUnit = static_cast<uintptr_t>(kHugePage);
  space.aligned = reinterpret_cast<void*>(at::round_up(address, kUnit));
  return space;
}

}  // namespace

ArenaLayout ArenaLayout::choose(int ranks, int64_t control_bytes, int64_t physical_bytes) {
  const auto wanted =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * physical_bytes)));
  const auto most =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(kMostVirtual / ranks)));
  const auto pending = kCounter * ranks;
  return {at::round_up(at::round_up(control_bytes, kCounter) + pending, kPage),
          std::min(wanted, most) - kSkew, ranks};
}

std::shared_ptr<Mapping> Mapping::create(const ArenaLayout& layout) {
  Descriptor file(memfd_create("libzero", MFD_CLOEXEC));
  if (!file || beyond_file_limit(layout.total_bytes()) ||
      ftruncate(file.get(), layout.total_bytes()) != 0) {
    const int error = errno;
    throw OutOfMemory(fmt::format("Cannot make the shared memory of {} ranks (memfd of {}): {}.{}",
                                  layout.ranks,
                                  format_bytes(static_cast<double>(layout.total_bytes())),
                                  std::strerror(error), error == EFBIG ? file_limit_remedy() : ""));
  }
  if (const int error = reserve(file.get(), 0, layout.control_bytes); error != 0) {
    throw OutOfMemory(fmt::format("Cannot reserve {} of shared memory: {}.",
                                  format_bytes(static_cast<double>(layout.control_bytes)),
                                  std::strerror(error)));
  }
  return std::shared_ptr<Mapping>(new Mapping(std::move(file), layout));
}

std::shared_ptr<Mapping> Mapping::open(Descriptor file, const ArenaLayout& layout) {
  return std::shared_ptr<Mapping>(new Mapping(std::move(file), layout));
}

Mapping::Mapping(Descriptor file, const ArenaLayout& layout)
    : file_(std::move(file)), layout_(layout) {
  const auto space = reserve_addresses(layout_.total_bytes());
  reserved_ = space.base;
  reserved_bytes_ = space.bytes;
  void* base =
      space.base == nullptr
          ? MAP_FAILED
          : mmap(space.aligned, static_cast<size_t>(layout_.total_bytes()), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file_.get(), 0);
  if (base == MAP_FAILED) {
    if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
    throw OutOfMemory(fmt::format(
        "Cannot map {} of address space for the shared memory of {} ranks: {}. A limit on "
        "address space (ulimit -v) must be lifted; no memory is used by it.",
        format_bytes(static_cast<double>(layout_.total_bytes())), layout_.ranks,
        std::strerror(errno)));
  }
  base_ = static_cast<std::byte*>(base);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(reserved_, reserved_bytes_);
}

PrivateView::PrivateView(std::shared_ptr<Mapping> mapping, int64_t offset, int64_t bytes)
    : mapping_(std::move(mapping)), bytes_(static_cast<size_t>(at::round_up(bytes, kPage))) {
  if (bytes_ == 0) return;
  const auto space = reserve_addresses(static_cast<int64_t>(bytes_));
  reserved_ = space.base;
  reserved_bytes_ = space.bytes;
  void* data = space.base == nullptr
                   ? MAP_FAILED
                   : mmap(space.aligned, bytes_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, mapping_->file(), offset);
  if (data == MAP_FAILED) {
    const int error = errno;
    if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
    throw OutOfMemory(fmt::format("Cannot map {} of shared memory for reading: {}.",
                                  format_bytes(static_cast<double>(bytes)), std::strerror(error)));
  }
  data_ = static_cast<std::byte*>(data);
}

PrivateView::~PrivateView() {
  if (data_ != nullptr) munmap(reserved_, reserved_bytes_);
}

void PrivateView::discard() {
  if (data_ != nullptr) madvise(data_, bytes_, MADV_DONTNEED);
}

int64_t Mapping::offset_of(const void* address, int64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto first = reinterpret_cast<uintptr_t>(at(layout_.control_bytes));
  const auto last =
      reinterpret_cast<uintptr_t>(base_) + static_cast<uintptr_t>(layout_.total_bytes());
  if (begin < first || begin + static_cast<uintptr_t>(bytes) > last) return -1;
  return static_cast<int64_t>(begin - reinterpret_cast<uintptr_t>(base_));
}

std::atomic_ref<int64_t> Mapping::pending(int rank) const {
  auto* of_ranks = at(layout_.control_bytes) - kCounter * layout_.ranks;
  return std::atomic_ref<int64_t>(*reinterpret_cast<int64_t*>(of_ranks + kCounter * rank));
}

// Note [Pending memory]
// Ranks allocate at the same time, and what one has been granted is not missing from the host's
// memory before its pages are there: two of them that looked at the memory alone could each take
// more than half of it, and the kernel would kill one. So a rank says first how much it is about to
// take, and counts what the others say as taken. The pages are then reserved in pieces, each of
// which stops being pending when it is there. A rank that reads a count and then the memory may see
// a piece twice, but never misses one; so it looks again while the counts change.
class Arena::Grant {
 public:
  Grant(const Arena& arena, int64_t bytes)
      : mapping_(*arena.mapping_), rank_(arena.rank_), left_(bytes) {
    mapping_.pending(rank_).fetch_add(left_);
    for (bool changes = true; changes && !fits_;) {
      others_ = of_others();
      memory_ = arena.memory_();
      fits_ = bytes <= memory_.available - others_;
      changes = of_others() != others_;
    }
  }
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;
  ~Grant() { taken(left_); }

  bool fits() const { return fits_; }
  std::string refusal() const {
    return fmt::format("only {} can be had of {}{}",
                       format_bytes(static_cast<double>(memory_.available)), memory_.reason,
                       others_ == 0
                           ? ""
                           : fmt::format(", and other ranks of this host are taking {} of them",
                                         format_bytes(static_cast<double>(others_))));
  }
  void taken(int64_t bytes) {
    mapping_.pending(rank_).fetch_sub(bytes);
    left_ -= bytes;
  }

 private:
  int64_t of_others() const {
    int64_t sum = 0;
    for (int rank = 0; rank < mapping_.layout().ranks; ++rank) {
      if (rank != rank_) sum += mapping_.pending(rank).load();
    }
    return sum;
  }

  const Mapping& mapping_;
  int rank_;
  int64_t left_;
  int64_t others_ = 0;
  MemoryLimit memory_;
  bool fits_ = false;
};

Arena::Arena(std::shared_ptr<Mapping> mapping, int rank, std::function<MemoryLimit()> memory)
    : mapping_(std::move(mapping)), rank_(rank), memory_(std::move(memory)) {
  holes_.emplace(mapping_->layout().region_offset(rank_), mapping_->layout().region_bytes);
}

int64_t Arena::allocate(int64_t bytes) {
  const auto refuse = [&](const std::string& why) {
    throw OutOfMemory(
        fmt::format("Cannot allocate {} of shared memory on rank {} ({} in use there): {}.",
                    format_bytes(static_cast<double>(bytes)), rank_,
                    format_bytes(static_cast<double>(allocated_bytes())), why));
  };
  const auto rounded = bytes > mapping_->layout().region_bytes ? bytes : at::round_up(bytes, kPage);
  const auto alignment = rounded >= kHugePage ? kHugePage : kPage;
  std::optional<Grant> grant;
  if (rounded >= kWatchedBytes) {
    // fallocate beyond what is there would call the kernel's out-of-memory killer instead of
    // failing.
    grant.emplace(*this, rounded);
    if (!grant->fits()) refuse(grant->refusal());
  }
  int64_t offset = -1;
  {
    const std::lock_guard lock(mutex_);
    auto best = holes_.end();
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      const auto skipped = at::round_up(hole->first, alignment) - hole->first;
      if (hole->second >= skipped + rounded &&
          (best == holes_.end() || hole->second < best->second))
        best = hole;
    }
    if (best != holes_.end()) {
      const auto [begin, length] = *best;
      offset = at::round_up(begin, alignment);
      holes_.erase(best);
      if (offset > begin) holes_.emplace(begin, offset - begin);
      if (const auto rest = begin + length - offset - rounded; rest > 0)
        holes_.emplace(offset + rounded, rest);
      blocks_.emplace(offset, rounded);
      allocated_ += rounded;
    }
  }
  if (offset < 0) refuse("this rank's region is full");
  int error = 0;
  for (int64_t done = 0; done < rounded && error == 0;) {
    const auto piece = std::min(rounded - done, kPiece);
    error = reserve(mapping_->file(), offset + done, piece);
    if (error == 0 && grant) grant->taken(piece);
    done += piece;
  }
  if (error != 0) {
    free(offset);
    refuse(std::strerror(error) + (error == EFBIG ? "." + file_limit_remedy() : std::string()));
  }
  // Asked for outright, since systems leave huge pages of shared memory switched off. A refusal
  // leaves small pages.
  if (rounded >= kHugePage)
    madvise(mapping_->at(offset), static_cast<size_t>(rounded / kHugePage * kHugePage),
            MADV_COLLAPSE);
  return offset;
}

void Arena::free(int64_t offset) noexcept {
  if (!owner_.here()) return;
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(offset);
  ensure(block != blocks_.end(), "a block of the arena is freed twice");
  auto [begin, bytes] = *block;
  blocks_.erase(block);
  allocated_ -= bytes;
  while (fallocate(mapping_->file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, bytes) !=
         0) {
    ensure(errno == EINTR, "the kernel refuses to free shared memory");
  }
  auto next = holes_.lower_bound(begin);
  if (next != holes_.end() && begin + bytes == next->first) {
    bytes += next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      previous->second += bytes;
      return;
    }
  }
  holes_.emplace(begin, bytes);
}

int64_t Arena::allocated_bytes() const {
  const std::lock_guard lock(mutex_);
  return allocated_;
}

int64_t physical_memory() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<int64_t>(sysconf(_SC_PAGE_SIZE));
}

}  // namespace zero::comm
