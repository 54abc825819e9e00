// The disk tier: states in one file of each rank, updated block by block as they stream through a
// few buffers (ZeRO-Infinity, 2104.07857, section 6.2).
//
// Note [Streaming states]
// The states of a unit are arrays of one length: the low-precision parameters, the fp32 master
// weights (unless the parameter is its own master), and the optimizer's states. The update of an
// element needs that element alone, so the arrays pass through memory in blocks: while block n is
// updated, the blocks after it are read and the blocks before it are written back. After the last
// block of a step, the first blocks of the next step are read already. This is not possible if
// gradients lie on disk too, since they are not there yet, or if the order of the updates is not
// known so early. In a step that updates its unit, a block is read once and written once
// (low-precision parameters that are the rounded master are only written). The number and the size
// of the buffers do not depend on the model. Results are those of states in memory, bit for bit. A
// block is updated in parts that fit into a core's cache. The pages of a part are checked just
// before its update, and their checksums are computed again just after it, so that checksums need
// no transfer from memory of their own.
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

/// Holds arrays of states in files on one disk or several. Thread-safe.
class DiskTier final : public StateTier {
 public:
  /// The most elements of each array in a block: enough to keep a disk at its full speed, and few
  /// enough that some blocks take little memory.
  static constexpr int64_t kBlockNumel = 1 << 20;
  /// The elements of each array that are checked, updated and checksummed again while they are in a
  /// core's cache. There are more if that many elements are not whole pages.
  static constexpr int64_t kPartNumel = 1 << 14;
  /// An array has a whole number of entries for this many elements.
  static constexpr int64_t kEntryBlock = 64;

  struct Array {
    at::ScalarType dtype = at::kFloat;
    /// The array has this many entries, of `dtype`, for each kEntryBlock elements of the unit.
    /// Anything that is kept beside the elements (scales, for example) lies between them.
    int64_t entries = kEntryBlock;
    bool read = true;   ///< the update needs its old values
    bool write = true;  ///< the update changes it; otherwise something else does (gradients)
    /// The array has two copies, so that an update can run beside the next pass: see `flip`.
    bool doubled = false;
  };
  struct Unit {
    /// Elements of each array. It is a multiple of kEntryBlock if an array has another number of
    /// entries than elements.
    int64_t numel = 0;
    c10::SmallVector<Array, 4> arrays;
    bool updated = true;  ///< `for_each_block` will be called
  };
  struct Options {
    /// A private folder is made in each of these. States are striped over the folders in proportion
    /// to the measured speeds of their disks.
    std::vector<std::string> folders;
    int64_t buffer_count = 4;  ///< blocks in memory at a time
    bool read_ahead = true;
    bool write_behind = true;
    FileOptions file;
  };
  /// Elements [begin, end) of every array of a unit. The pointers are to element `begin`. The
  /// contents of an array that is not `read` are undefined, and the update must write all of them.
  struct Block {
    int64_t begin = 0;
    int64_t end = 0;
    c10::SmallVector<std::byte*, 4> arrays;
  };

  /// Reserves a file for all arrays, whose values are zero at first. Throws a StoreError that names
  /// the bytes if the disk does not have enough room.
  DiskTier(std::vector<Unit> units, const Options& options, const std::shared_ptr<Ledger>& ledger);

  /// Returns the bytes of memory that updates of all these units take: those of `buffer_count`
  /// blocks, or of fewer if there are no more.
  static int64_t update_memory(const std::vector<Unit>& units, int64_t buffer_count);

  /// Calls `update`, which may change the arrays that it gets, for every part of `unit`: blocks of
  /// about kPartNumel elements. With `at_once` several threads call it for several parts at a time;
  /// otherwise the parts come in order.
  void for_each_block(int64_t unit, const std::function<void(const Block&)>& update, bool at_once);

  /// Exchanges the two copies of a doubled array. An update uses the copy behind: it writes it if
  /// it changes the array, and otherwise reads it. Everything else uses the copy in front. So
  /// `flip` makes the result of this unit's update visible, once its writes are done
  /// (`wait_written`), or it gives the update new gradients.
  void flip(int64_t unit, int64_t array);
  /// Blocks until everything that the updates of this unit have written so far is on disk. Updates
  /// of other units may be under way.
  void wait_written(int64_t unit);
  /// Blocks until everything that updates have written is on disk, for all units. No unit may be
  /// updated meanwhile.
  void settle();
  /// From now on updates run beside something else, so the time that they wait is not counted. They
  /// run in the order that `upcoming` names: during an update, `upcoming(index)` returns the unit
  /// that is updated `index` + 1 updates later, or nothing if it is not known. Without this call
  /// updates run in the order of the units.
  void run_beside(std::function<std::optional<int64_t>(int64_t index)> upcoming) {
    upcoming_ = std::move(upcoming);
  }

  /// Says that the updates of a step are done. If nothing can be read ahead for the updates of the
  /// next step, the buffers are given back until then.
  void end_step();

  Tier tier() const override { return Tier::disk; }
  at::Tensor read(int64_t unit, int64_t array, partition::Range entries) override;
  void write(int64_t unit, int64_t array, partition::Range entries, const at::Tensor& values,
             Tier from) override;
  /// Read and write the copy behind of a doubled array, as `read` and `write` do the one in front.
  at::Tensor read_behind(int64_t unit, int64_t array, partition::Range entries);
  void write_behind(int64_t unit, int64_t array, partition::Range entries,
                    const at::Tensor& values);

  /// Starts to read all of an array, after the writes of it have ended. `to` begins on a multiple
  /// of kAlignment, has room for `whole_bytes` bytes, and must live until the transfer is done.
  Transfer start_read(int64_t unit, int64_t array, void* to);
  /// Starts to write all of an array that the update does not write. All reads of it must have
  /// ended, and the next read may begin only when the transfer is done.
  Transfer start_write(int64_t unit, int64_t array, const void* from);
  /// Returns the bytes that an array takes in the file: a multiple of kAlignment.
  int64_t whole_bytes(int64_t unit, int64_t array) const;

  /// Waits for a transfer that this tier has started, and counts the time.
  void wait(Transfer& transfer);
  /// Returns the milliseconds that were spent waiting for the disk, except by updates that run
  /// beside something else.
  double wait_ms() const { return static_cast<double>(clock_.nanoseconds.load()) / 1e6; }
  /// Returns the clock behind `wait_ms`. Code that waits for an update which runs beside it counts
  /// its time there.
  comm::WaitClock& clock() { return clock_; }

  /// Returns the bytes on disk.
  int64_t bytes() const { return file_->bytes(); }
  const File& file() const { return *file_; }

 private:
  // Locks the frames. When they are free again, `wait_written` is told.
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
    int64_t turn = 0;  // number of its last use, by which the oldest frame is found
    std::vector<Transfer> transfers;
    c10::SmallVector<int64_t, 4> read_from;  // for each array, its place in the file
  };

  const Unit& unit(int64_t index) const { return units_[static_cast<size_t>(index)]; }
  int64_t entries_of(int64_t unit, int64_t array, int64_t elements) const;
  int64_t array_bytes(int64_t unit, int64_t array, int64_t elements) const;
  int64_t blocks_of(int64_t unit) const;
  // The pages that `entries` of an array lie on. All of them are in one block.
  struct Pages {
    int64_t offset = 0;  // in the file
    int64_t bytes = 0;
    int64_t begin = 0;    // of the entries, in bytes from `offset`
    bool filled = false;  // the entries fill these pages completely
  };
  // Calls `visit` for each block's part of `entries` in one of the copies of an array.
  void for_each_part(int64_t unit, int64_t array, partition::Range entries, bool front,
                     const std::function<void(partition::Range, const Pages&)>& visit) const;
  at::Tensor read_copy(int64_t unit, int64_t array, partition::Range entries, bool front);
  void write_copy(int64_t unit, int64_t array, partition::Range entries, const at::Tensor& values,
                  bool front);
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
  std::vector<int64_t> base_;                        // place of each unit in the file, bytes
  std::vector<c10::SmallVector<uint8_t, 4>> front_;  // by unit and array: the copy in front
  int64_t block_numel_ = 0;
  int64_t part_numel_ = kPartNumel;
  int64_t frame_bytes_ = 0;
  int64_t turn_ = 0;
  comm::WaitClock clock_;
  // No array of the first blocks changes between two updates.
  bool ahead_to_next_step_ = true;
  std::shared_ptr<Ledger> ledger_;
  std::function<std::optional<int64_t>(int64_t)>
      upcoming_;              // if set, updates run beside something else
  std::mutex mutex_;          // guards the frames, for a long time; see FramesLock
  std::mutex written_mutex_;  // guards the next two members, for a short time; locked after mutex_
  std::vector<int64_t> unwritten_;  // frames that are being written, by unit
  bool frames_locked_ = false;
  std::condition_variable written_;  // tells that one of the two has changed
  std::vector<std::unique_ptr<Folder>> folders_;
  std::unique_ptr<File> file_;
  std::vector<Frame> frames_;  // declared after the file, so that their transfers end first
};

}  // namespace zero::store
