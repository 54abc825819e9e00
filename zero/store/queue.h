// Pieces of transfers, and the transfers that they belong to: the two ways of doing file I/O share
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "zero/base/timeline.h"

namespace zero::store {

/// A transfer of a file that has been started; `File` hands it out as a Transfer.
struct Request {
  int64_t pending = 0;  ///< pieces that are not done; guarded by the queue
  int error = 0;        ///< errno of the first byte that failed; kEnded: the file is too short
  int error_file = -1;  ///< the descriptor of the file it is in
  int64_t error_offset = 0;
  static constexpr int kEnded = -1;
  int64_t begun = 0;  ///< Timeline::now(); 0: nobody wants to know
  int64_t ended = 0;  ///< the same; guarded by the queue
  /// A piece is done. True of the last one.
  bool complete() {
    if (--pending > 0) return false;
    if (begun != 0) ended = Timeline::now();
    return true;
  }
  void fail(int reason, int file, int64_t offset) {
    if (error != 0 && std::pair(error_file, error_offset) < std::pair(file, offset)) return;
    error = reason;
    error_file = file;
    error_offset = offset;
  }
};

/// A piece of a transfer, at most a block.
struct Piece {
  int file = -1;
  int64_t offset = 0;  ///< in the file, bytes
  std::byte* memory = nullptr;
  int64_t bytes = 0;
  bool write = false;
  std::shared_ptr<Request> request;
};

/// Does pieces in any order. Thread-safe. Destroying it waits for all of them.
class Queue {
 public:
  virtual ~Queue() = default;
  /// Adds each piece to its request's `pending`, and takes it off when it is done or has failed.
  virtual void push(std::span<const Piece> pieces) = 0;
  /// Blocks until every piece of `request` is done, whether or not it failed.
  virtual void wait(Request& request) = 0;
  virtual bool done(const Request& request) = 0;
  virtual std::string_view name() const = 0;
};

/// io_uring with `depth` pieces under way; null where the system refuses it.
std::unique_ptr<Queue> uring_queue(int depth);
/// `threads` threads that call pread and pwrite.
std::unique_ptr<Queue> thread_queue(int threads);

}  // namespace zero::store
