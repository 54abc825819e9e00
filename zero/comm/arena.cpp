#include "zero/comm/arena.h"

#include <ATen/ceil_div.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/file_limit.h"

namespace zero::comm {
namespace {

constexpr auto kPage = static_cast<int64_t>(MemoryMapping::kPage);
constexpr auto kHugePage = static_cast<int64_t>(MemoryMapping::kHugePage);
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
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// A smaller allocation cannot bring the machine down, and is not worth a look at the free memory.
constexpr int64_t kWatchedBytes = int64_t{8} << 20;
constexpr int64_t kPiece = int64_t{32} << 20;
// A refused rank looks again after the first of these times, in which a piece of another rank's
// arrives (that takes some 10 ms), and gives up after the second, since the rest of the machine may
// never stand still.
constexpr std::chrono::milliseconds kLookAgain{50};
constexpr std::chrono::seconds kLongestDoubt{1};
constexpr int64_t kNumber = sizeof(int64_t);
// The bytes of a rank's counters: how much it is about to take, and the ids of its limits.
constexpr int64_t kCounter = kNumber * static_cast<int64_t>(1 + kMemoryLimits);

// Reserves pages; returns 0 or an errno.
int reserve(int file, int64_t offset, int64_t bytes) {
  if (beyond_file_limit(offset + bytes)) return EFBIG;
  for (;;) {
    if (fallocate(file, FALLOC_FL_KEEP_SIZE, offset, bytes) == 0) return 0;
    if (errno != EINTR) return errno;
  }
}

// Returns the size of the control area with the ranks' counters behind it.
int64_t with_counters(int64_t control_bytes, int ranks) {
  return at::round_up(at::round_up(control_bytes, kCounter) + kCounter * ranks, kPage);
}

}  // namespace

ArenaLayout ArenaLayout::choose(int ranks, int64_t control_bytes, int64_t physical_bytes) {
  const auto wanted =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * physical_bytes)));
  const auto most =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(kMostVirtual / ranks)));
  return {with_counters(control_bytes, ranks), std::min(wanted, most) - kSkew, ranks};
}

bool ArenaLayout::valid(int64_t least_control_bytes) const {
  return ranks > 0 && control_bytes == with_counters(least_control_bytes, ranks) &&
         region_bytes > 0 && region_bytes % kPage == 0 && region_bytes <= kMostVirtual / ranks;
}

bool ArenaLayout::holds(int64_t offset, int64_t bytes, int first, int last) const {
  return bytes >= 0 && offset >= region_offset(first) && offset <= region_offset(last) &&
         bytes <= region_offset(last) - offset;
}

std::shared_ptr<Mapping> Mapping::create(const ArenaLayout& layout) {
  Descriptor file(memfd_create("libzero", MFD_CLOEXEC | MFD_ALLOW_SEALING));
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
  // From here on no holder of the file can make it shorter under its users.
  ensure(fcntl(file.get(), F_ADD_SEALS, kSeals) == 0, "the kernel does not seal a fresh memfd");
  return std::shared_ptr<Mapping>(new Mapping(std::move(file), layout));
}

std::shared_ptr<Mapping> Mapping::open(Descriptor file, const ArenaLayout& layout) {
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_size != layout.total_bytes() || status.st_uid != geteuid()) {
    throw CommError(
        fmt::format("The file that was passed as the shared memory of {} ranks is not that: it has "
                    "{} bytes and belongs to user {}, but {} bytes of user {} are expected.",
                    layout.ranks, status.st_size, status.st_uid, layout.total_bytes(), geteuid()));
  }
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw CommError(
        fmt::format("The file that was passed as the shared memory of {} ranks is not a memfd of a "
                    "size that is sealed.",
                    layout.ranks));
  }
  return std::shared_ptr<Mapping>(new Mapping(std::move(file), layout));
}

Mapping::Mapping(Descriptor file, const ArenaLayout& layout)
    : file_(std::move(file)),
      layout_(layout),
      memory_({.bytes = static_cast<size_t>(layout.total_bytes()),
               .alignment = MemoryMapping::kHugePage,
               .counted = false,
               .file = file_.get(),
               .shared = true}) {
  if (memory_) return;
  throw OutOfMemory(fmt::format(
      "Cannot map {} of address space for the shared memory of {} ranks: {}. A limit on address "
      "space (ulimit -v) must be lifted; no memory is used by it.",
      format_bytes(static_cast<double>(layout_.total_bytes())), layout_.ranks,
      std::strerror(memory_.error())));
}

PrivateView::PrivateView(const Mapping& mapping, int64_t offset, int64_t bytes)
    : memory_({.bytes = static_cast<size_t>(at::round_up(bytes, kPage)),
               .alignment = MemoryMapping::kHugePage,
               .counted = false,
               .file = mapping.file(),
               .file_offset = offset}) {
  if (memory_.error() == 0) return;
  throw OutOfMemory(fmt::format("Cannot map {} of shared memory for reading: {}.",
                                format_bytes(static_cast<double>(bytes)),
                                std::strerror(memory_.error())));
}

void PrivateView::discard() {
  if (memory_) memory_.discard(0, memory_.bytes());
}

int64_t Mapping::offset_of(const void* address, int64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto first = reinterpret_cast<uintptr_t>(at(layout_.control_bytes));
  const auto last =
      reinterpret_cast<uintptr_t>(memory_.data()) + static_cast<uintptr_t>(layout_.total_bytes());
  if (begin < first || begin + static_cast<uintptr_t>(bytes) > last) return -1;
  return static_cast<int64_t>(begin - reinterpret_cast<uintptr_t>(memory_.data()));
}

std::atomic_ref<int64_t> Mapping::pending(int rank) const {
  auto* of_ranks = at(layout_.control_bytes) - kCounter * layout_.ranks;
  return std::atomic_ref<int64_t>(*reinterpret_cast<int64_t*>(of_ranks + kCounter * rank));
}

std::atomic_ref<int64_t> Mapping::limit_id(int rank, size_t which) const {
  auto* of_ranks = at(layout_.control_bytes) - kCounter * layout_.ranks;
  return std::atomic_ref<int64_t>(*reinterpret_cast<int64_t*>(
      of_ranks + kCounter * rank + kNumber * static_cast<int64_t>(1 + which)));
}

// Note [Pending memory]
// Ranks allocate at the same time, and memory that a rank has been granted is not missing from the
// host's before its pages are there. Two ranks that looked at the free memory only could each take
// more than half of it, and the kernel would kill one. So a rank first tells how much it is about
// to take, and counts the amounts of the others as taken.
// The pages are then reserved in pieces; each stops being pending when it is there. A rank that
// reads a count and then the memory may see a piece twice, but never misses one. So it looks again
// while the counts change, and is refused only when the free memory stands still as well, since a
// half-reserved piece changes it.
// Ranks that share this memory may be in different cgroups. What one takes is missing from the
// machine's memory and from that of its own group, but not from another group's. A rank that has
// not told its limits yet counts as in all of them.
class Arena::Grant {
 public:
  Grant(const Arena& arena, int64_t bytes)
      : mapping_(*arena.mapping_), rank_(arena.rank_), left_(bytes) {
    mapping_.pending(rank_).fetch_add(left_);
    const auto give_up = std::chrono::steady_clock::now() + kLongestDoubt;
    for (std::optional<int64_t> before;; before = refusing_->available) {
      while (!look(arena, bytes)) {
      }
      if (fits() || others_ == 0 || before == refusing_->available ||
          std::chrono::steady_clock::now() > give_up)
        break;
      std::this_thread::sleep_for(kLookAgain);
    }
  }
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;
  ~Grant() { taken(left_); }

  bool fits() const { return !refusing_; }
  std::string refusal() const {
    return fmt::format("only {} can be had of {}{}",
                       format_bytes(static_cast<double>(refusing_->available)), refusing_->reason,
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
  // Returns true if the counts stood still, so that the result is true.
  bool look(const Arena& arena, int64_t bytes) {
    const auto before = of_others({});
    const auto limits = arena.limits_();
    for (size_t i = 0; i < std::min(limits.size(), kMemoryLimits); ++i) {
      mapping_.limit_id(rank_, i).store(limits[i].id);
    }
    refusing_.reset();
    for (const auto& limit : limits) {
      others_ = of_others(limit);
      if (bytes <= limit.available - others_) continue;
      refusing_ = limit;
      break;
    }
    return of_others({}) == before || fits();
  }
  // Returns how much the other ranks are about to take of the memory that `limit` limits.
  int64_t of_others(const MemoryLimit& limit) const {
    int64_t sum = 0;
    for (int rank = 0; rank < mapping_.layout().ranks; ++rank) {
      if (rank != rank_ && shares(rank, limit.id)) sum += mapping_.pending(rank).load();
    }
    return sum;
  }
  bool shares(int rank, int64_t id) const {
    const bool known = mapping_.limit_id(rank, 0).load() != 0;
    if (id == 0 || !known) return true;
    for (size_t i = 0; i < kMemoryLimits; ++i) {
      if (mapping_.limit_id(rank, i).load() == id) return true;
    }
    return false;
  }

  const Mapping& mapping_;
  int rank_;
  int64_t left_;
  std::optional<MemoryLimit> refusing_;
  int64_t others_ = 0;  // bytes that they take of the refusing limit
};

Arena::Arena(std::shared_ptr<Mapping> mapping, int rank, std::optional<int> number,
             std::function<std::vector<MemoryLimit>()> limits)
    : mapping_(std::move(mapping)),
      rank_(rank),
      number_(number.value_or(rank)),
      limits_(std::move(limits)),
      heap_(static_cast<size_t>(mapping_->layout().region_offset(rank)),
            static_cast<size_t>(mapping_->layout().region_bytes)) {}

int64_t Arena::allocate(int64_t bytes) {
  const auto refuse = [&](const std::string& why) {
    throw OutOfMemory(
        fmt::format("Cannot allocate {} of shared memory on rank {} ({} in use there): {}.",
                    format_bytes(static_cast<double>(bytes)), number_,
                    format_bytes(static_cast<double>(allocated_bytes())), why));
  };
  const auto rounded = bytes > mapping_->layout().region_bytes ? bytes : at::round_up(bytes, kPage);
  const auto alignment = rounded >= kHugePage ? kHugePage : kPage;
  std::optional<Grant> grant;
  if (rounded >= kWatchedBytes) {
    // fallocate would wake the kernel's out-of-memory killer instead of failing.
    grant.emplace(*this, rounded);
    if (!grant->fits()) refuse(grant->refusal());
  }
  std::optional<size_t> place;
  {
    const std::lock_guard lock(mutex_);
    place = heap_.best_fit(static_cast<size_t>(rounded), static_cast<size_t>(alignment));
    if (place) heap_.take(*place, static_cast<size_t>(rounded));
  }
  if (!place) refuse("this rank's region is full");
  const auto offset = static_cast<int64_t>(*place);
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
  // Asks for huge pages expressly, since systems leave those of shared memory switched off. If the
  // kernel refuses, the pages stay small.
  if (rounded >= kHugePage)
    madvise(mapping_->at(offset), static_cast<size_t>(rounded / kHugePage * kHugePage),
            MADV_COLLAPSE);
  return offset;
}

void Arena::free(int64_t offset) noexcept {
  if (!owner_.here()) return;
  const std::lock_guard lock(mutex_);
  const auto bytes = static_cast<int64_t>(heap_.size_of(static_cast<size_t>(offset)));
  ensure(bytes > 0, "a block of the arena is freed twice");
  while (fallocate(mapping_->file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes) !=
         0) {
    ensure(errno == EINTR, "the kernel refuses to free shared memory");
  }
  heap_.give(static_cast<size_t>(offset));
}

int64_t Arena::allocated_bytes() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(heap_.used());
}

int64_t physical_memory() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<int64_t>(sysconf(_SC_PAGE_SIZE));
}

}  // namespace zero::comm
