#include <liburing.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/store/queue.h"

namespace zero::store {

namespace {

// The kernel works on submitted pieces by itself. If there are more than `depth` pieces, the rest
// waits in `backlog_` until the next push or wait. If several threads wait, one of them sleeps in
// the kernel, with the mutex free for others to push, and tells the rest what it saw. While
// `reaping_` is set no other thread takes completions, since the sleeping thread could otherwise
// wait for one that is gone.
class UringQueue final : public Queue {
 public:
  explicit UringQueue(io_uring ring, int depth) : ring_(ring), slots_(static_cast<size_t>(depth)) {
    for (size_t i = 0; i < slots_.size(); ++i) free_.push_back(i);
  }
  UringQueue(const UringQueue&) = delete;
  UringQueue& operator=(const UringQueue&) = delete;

  ~UringQueue() override {
    const std::lock_guard lock(mutex_);
    submit();
    while (free_.size() < slots_.size()) {
      sleep();
      reap();
      submit();
    }
    io_uring_queue_exit(&ring_);
  }

  void push(std::span<const Piece> pieces) override {
    const std::lock_guard lock(mutex_);
    for (const auto& piece : pieces) {
      ++piece.request->pending;
      backlog_.push_back(piece);
    }
    if (!reaping_) reap();
    submit();
  }

  void wait(Request& request) override {
    std::unique_lock lock(mutex_);
    while (request.pending > 0) {
      if (reaping_) {
        reaped_.wait(lock);
        continue;
      }
      reaping_ = true;
      lock.unlock();
      sleep();
      lock.lock();
      reap();
      submit();
      reaping_ = false;
      reaped_.notify_all();
    }
  }

  bool done(const Request& request) override {
    const std::lock_guard lock(mutex_);
    if (!reaping_) {
      reap();
      submit();
    }
    return request.pending == 0;
  }

  std::string_view name() const override { return "io_uring"; }

 private:
  void submit() {
    while (!backlog_.empty() && !free_.empty()) {
      auto* entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      const size_t slot = free_.back();
      free_.pop_back();
      auto& piece = slots_[slot] = std::move(backlog_.front());
      backlog_.pop_front();
      const auto bytes = static_cast<unsigned>(piece.bytes);
      const auto offset = static_cast<uint64_t>(piece.offset);
      if (piece.write) {
        io_uring_prep_write(entry, piece.file, piece.memory, bytes, offset);
      } else {
        io_uring_prep_read(entry, piece.file, piece.memory, bytes, offset);
      }
      io_uring_sqe_set_data64(entry, slot);
    }
    while (io_uring_sq_ready(&ring_) > 0) {
      const int status = io_uring_submit(&ring_);
      ensure(status >= 0 || status == -EINTR || status == -EAGAIN,
             "io_uring does not take what it took before");
    }
  }

  // Sleeps until a piece completes. At least one must be under way.
  void sleep() {
    io_uring_cqe* completion = nullptr;
    int status = 0;
    do status = io_uring_wait_cqe(&ring_, &completion);
    while (status == -EINTR);
    ensure(status == 0, "io_uring completes nothing");
  }

  void reap() {
    io_uring_cqe* completion = nullptr;
    while (io_uring_peek_cqe(&ring_, &completion) == 0) {
      const auto slot = static_cast<size_t>(io_uring_cqe_get_data64(completion));
      const int result = completion->res;
      io_uring_cqe_seen(&ring_, completion);
      finish(slot, result);
    }
  }

  void finish(size_t slot, int result) {
    Piece piece = std::move(slots_[slot]);
    slots_[slot] = {};
    free_.push_back(slot);
    if (result == -EINTR || result == -EAGAIN) {
      backlog_.push_front(std::move(piece));
      return;
    }
    if (result > 0 && result < piece.bytes) {
      piece.offset += result;
      piece.memory += result;
      piece.bytes -= result;
      backlog_.push_front(std::move(piece));
      return;
    }
    auto& request = *piece.request;
    if (result <= 0)
      request.fail(result == 0 ? Request::kEnded : -result, piece.file, piece.offset);
    request.complete();
  }

  std::mutex mutex_;
  std::condition_variable reaped_;
  bool reaping_ = false;
  io_uring ring_;
  std::vector<Piece> slots_;  // pieces under way
  std::vector<size_t> free_;
  std::deque<Piece> backlog_;
};

}  // namespace

std::unique_ptr<Queue> uring_queue(int depth) {
  io_uring ring{};
  if (io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0) != 0) return nullptr;
  // Reading and writing without a vector of buffers came with Linux 5.6.
  auto* probe = io_uring_get_probe_ring(&ring);
  const bool enough = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  if (probe != nullptr) io_uring_free_probe(probe);
  if (!enough) {
    io_uring_queue_exit(&ring);
    return nullptr;
  }
  return std::make_unique<UringQueue>(ring, depth);
}

}  // namespace zero::store
