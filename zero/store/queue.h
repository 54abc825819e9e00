// Pieces of transfers, and the transfers that they belong to. Both ways to read and write files
// (io_uring and threads) use them.
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
  int error = 0;        ///< errno of the first byte that failed; kEnded if the file is too short
  int error_file = -1;  ///< descriptor of the file with that byte
  int64_t error_offset = 0;
  static constexpr int kEnded = -1;
  int64_t begun = 0;  ///< Timeline::now() at the start; 0 if no timeline records it
  int64_t ended = 0;  ///< Timeline::now() at the end; guarded by the queue
  /// Notes that a piece is done. Returns whether it was the last one.
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

/// A piece of a transfer: at most one block.
struct Piece {
  int file = -1;
  int64_t offset = 0;  ///< in the file, bytes
  std::byte* memory = nullptr;
  int64_t bytes = 0;
  bool write = false;
  std::shared_ptr<Request> request;
};

/// A queue does pieces in any order. Thread-safe. Its destructor waits for all of them.
class Queue {
 public:
  virtual ~Queue() = default;
  /// Adds each piece to the `pending` of its request; a piece that is done or has failed is taken
  /// off again.
  virtual void push(std::span<const Piece> pieces) = 0;
  /// Blocks until every piece of `request` is done, whether or not it failed.
  virtual void wait(Request& request) = 0;
  virtual bool done(const Request& request) = 0;
  virtual std::string_view name() const = 0;
};

/// Returns a queue that uses io_uring with `depth` pieces under way, or null if the system refuses
/// it.
std::unique_ptr<Queue> uring_queue(int depth);
/// Returns a queue of `threads` threads that call pread and pwrite.
std::unique_ptr<Queue> thread_queue(int threads);

}  // namespace zero::store
