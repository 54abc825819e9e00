// The disk tier: states in one file of each rank, updated block by block as they stream through a
// few buffers (ZeRO-Infinity, 2104.07857, section 6.2).
//
// Note [Streaming states]
// The states of a unit are arrays of one length: the low-precision parameters, fp32 master weights
// (where the parameter is not its own), and the optimizer's. The update of an element needs that
// element alone, so the arrays pass through memory in blocks: while block n is updated, the blocks
// after it are read and the ones before it are written back. After the last block of a step the
// first ones of the next are read already (unless gradients, which are not there yet, lie on disk
// too, or the order of the updates is not known so early). A block is read once and written once in
// a step in which its unit is updated (low-precision parameters are only written, where they are
// the rounded master); the number and size of the buffers do not depend on the model. Results are
// those of states in memory, bit for bit. A block is updated in parts that fit into a core's cache,
// whose pages are checked just before and counted again just after: checksums cost no way to memory
// of their own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/ledger.h"
#include "zero/comm/wait_clock.h"
#include "zero/store/file.h"
#include "zero/store/folder.h"
#include "zero/store/state_tier.h"

namespace zero::store {

/// Thread-safe.
class DiskTier final : public StateTier {
 public:
  /// Elements of a block of each array, at most: large enough for a disk to be at its best, small
  /// enough that a few of them are little memory.
  static constexpr int64_t kBlockNumel = 1 << 20;
  /// Elements of each array that are checked, updated and counted again while they are in a core's
  /// cache. More where that many are no whole pages.
  static constexpr int64_t kPartNumel = 1 << 14;
  /// Elements that an array has a whole number of entries for.
  static constexpr int64_t kEntryBlock = 64;

  struct Array {
    at::ScalarType dtype = at::kFloat;
    /// Entries of it, of `dtype`, for each kEntryBlock elements of the unit: what is kept beside
    /// the elements lies between them.
    int64_t entries = kEntryBlock;
    bool read = true;   ///< the update needs its old values
    bool write = true;  ///< the update changes it; else something else does (gradients)
    /// Two copies, for an update beside the next pass: see `flip`.
    bool doubled = false;
  };
  struct Unit {
    int64_t numel = 0;  ///< elements of each array; where it has other entries, whole kEntryBlocks
    c10::SmallVector<Array, 4> arrays;
    bool updated = true;  ///< `for_each_block` will be called
  };
  struct Options {
    /// In each a private one is made; states are striped over them by their disks' measured speed.
    std::vector<std::string> folders;
    int64_t buffer_count = 4;  ///< blocks in memory at a time
    bool read_ahead = true;
    bool write_behind = true;
    FileOptions file;
  };
  /// Elements [begin, end) of every array of a unit; the pointers are to element `begin`. What an
  /// array that is not `read` holds is undefined; all of it must be written.
  struct Block {
    int64_t begin = 0;
    int64_t end = 0;
    c10::SmallVector<std::byte*, 4> arrays;
  };

  /// Reserves a file for all arrays, which are zero. Throws StoreError where the disk has not as
  /// much room, naming the bytes.
  DiskTier(std::vector<Unit> units, const Options& options, const std::shared_ptr<Ledger>& ledger);

  /// Calls `update`, which may change what it is given, for every part of `unit`: blocks of about
  /// kPartNumel elements. `at_once`: of several on as many threads, else in order.
  void for_each_block(int64_t unit, const std::function<void(const Block&)>& update, bool at_once);

  /// Exchanges the two copies of a doubled array. The update writes the copy behind, or reads it
  /// where it does not write; everything else reads and writes the copy in front. So the update of
  /// this unit, whose writes are done (`wait_written`), becomes visible, or the update gets new
  /// gradients.
  void flip(int64_t unit, int64_t array);
  /// Blocks until what the updates of this unit so far wrote is on disk. Others may be under way.
  void wait_written(int64_t unit);
  /// Blocks until this is so for all units, while none is updated.
  void settle();
  /// From now on updates run beside something else, so that their waiting is not counted, in the
  /// order that `upcoming` names while one is under way: its `index`-th is the `index`-th after
  /// that, or none where that is not known. Until then they run in the order of the units.
  void run_beside(std::function<std::optional<int64_t>(int64_t index)> upcoming) {
    upcoming_ = std::move(upcoming);
  }

  /// The updates of a step are done. Where nothing can be read ahead for the next step's, the
  /// buffers are given back until then.
  void end_step();

  Tier tier() const override { return Tier::disk; }
  at::Tensor read(int64_t unit, int64_t array, partition::Range entries) override;
  void write(int64_t unit, int64_t array, partition::Range entries, const at::Tensor& values,
             Tier from) override;

  /// Starts to read all of an array, after writes of it have ended. `to`, on a multiple of
  /// kAlignment, has room for `whole_bytes` bytes and lives until the transfer is done.
  Transfer start_read(int64_t unit, int64_t array, void* to);
  /// Starts to write all of an array that the update does not write. All reads of it have ended,
  /// and the next begins only once the transfer is done.
  Transfer start_write(int64_t unit, int64_t array, const void* from);
  /// Bytes that an array takes in the file: a multiple of kAlignment.
  int64_t whole_bytes(int64_t unit, int64_t array) const;
  int64_t array_count(int64_t unit) const {
    return static_cast<int64_t>(this->unit(unit).arrays.size());
  }

  /// Waits for a transfer of this, and counts the time.
  void wait(Transfer& transfer);
  /// Milliseconds spent waiting for the disk, except by updates that run beside something else.
  double wait_ms() const { return static_cast<double>(clock_.nanoseconds.load()) / 1e6; }
  /// Counts the time of others that wait for an update beside.
  comm::WaitClock& clock() { return clock_; }

  /// Bytes on disk.
  int64_t bytes() const { return file_->bytes(); }
  const File& file() const { return *file_; }

 private:
  // Holds the frames, and tells `wait_written` when they are free.
  class FramesLock {
   public:
    explicit FramesLock(DiskTier& tier);
    ~FramesLock();
    FramesLock(const FramesLock&) = delete;
    FramesLock& operator=(const FramesLock&) = delete;

   private:
    DiskTier& tier_;
  };
  struct Position {
    int64_t unit = 0;
    int64_t block = 0;
    bool operator==(const Position&) const = default;
  };
  enum class Use : uint8_t { none, reading, updating, writing };
  struct Frame {
    at::Tensor memory;
    Position position;
    Use use = Use::none;
    int64_t turn = 0;  // of its last use, to find the oldest
    std::vector<Transfer> transfers;
    c10::SmallVector<int64_t, 4> read_from;  // by array: where in the file
  };

  const Unit& unit(int64_t index) const { return units_[static_cast<size_t>(index)]; }
  int64_t entries_of(int64_t unit, int64_t array, int64_t elements) const;
  int64_t array_bytes(int64_t unit, int64_t array, int64_t elements) const;
  int64_t blocks_of(int64_t unit) const;
  // Pages of a block that `entries` of an array lie on, all of them in one block.
  struct Pages {
    int64_t offset = 0;  // in the file
    int64_t bytes = 0;
    int64_t begin = 0;    // of the entries, in bytes from `offset` on
    bool filled = false;  // by the entries alone
  };
  // Calls `visit` for the part of `entries` in each block.
  void for_each_part(int64_t unit, int64_t array, partition::Range entries,
                     const std::function<void(partition::Range, const Pages&)>& visit) const;
  std::optional<int64_t> next_in_order(int64_t unit, int64_t index) const;
  int64_t offset(Position position, int64_t array, bool front = true) const;
  int64_t bytes_of(Position position, int64_t array) const;
  std::byte* memory(const Frame& frame, int64_t unit, int64_t array) const;
  Frame* find(Position position, Use use);
  Frame* free_frame();
  Frame& take(Position position);
  void start_reading(Frame& frame, Position position);
  void start_writing(Frame& frame);
  void read_ahead(Position position);
  bool updates(int64_t unit) const;
  void update_part(const Frame& frame, int64_t part,
                   const std::function<void(const Block&)>& update);
  void finish(Frame& frame);
  void* buffer(Frame& frame);
  void finish_all();

  std::vector<Unit> units_;
  Options options_;
  std::vector<int64_t> base_;                        // of each unit in the file, bytes
  std::vector<c10::SmallVector<uint8_t, 4>> front_;  // by unit and array: the copy in front
  int64_t block_numel_ = 0;
  int64_t part_numel_ = kPartNumel;
  int64_t frame_bytes_ = 0;
  int64_t turn_ = 0;
  comm::WaitClock clock_;
  bool ahead_to_next_step_ = true;  // no array of the first blocks changes between two updates
  std::shared_ptr<Ledger> ledger_;
  std::function<std::optional<int64_t>(int64_t)>
      upcoming_;                    // set: updates run beside something else
  std::mutex mutex_;                // of the frames, long; see FramesLock
  std::mutex written_mutex_;        // of the next two, short; taken after it
  std::vector<int64_t> unwritten_;  // by unit: frames that are written
  bool frames_locked_ = false;
  std::condition_variable written_;  // one of them has changed
  std::vector<std::unique_ptr<Folder>> folders_;
  std::unique_ptr<File> file_;
  std::vector<Frame> frames_;  // after the file: their transfers end first
};

}  // namespace zero::store
