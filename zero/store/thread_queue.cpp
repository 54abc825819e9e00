#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/thread.h"
#include "zero/store/queue.h"

namespace zero::store {

namespace {

class ThreadQueue final : public Queue {
 public:
  explicit ThreadQueue(int threads) {
    try {
      for (int i = 0; i < threads; ++i)
        workers_.push_back(start_thread<StoreError>("states on disk", [this] { work(); }));
    } catch (...) {  // threads that have started must not outlive the queue
      close();
      throw;
    }
  }
  ThreadQueue(const ThreadQueue&) = delete;
  ThreadQueue& operator=(const ThreadQueue&) = delete;

  ~ThreadQueue() override { close(); }

  void push(std::span<const Piece> pieces) override {
    {
      const std::lock_guard lock(mutex_);
      for (const auto& piece : pieces) {
        ++piece.request->pending;
        waiting_.push_back(piece);
      }
    }
    arrived_.notify_all();
  }

  void wait(Request& request) override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return request.pending == 0; });
  }

  bool done(const Request& request) override {
    const std::lock_guard lock(mutex_);
    return request.pending == 0;
  }

  std::string_view name() const override { return "threads"; }

 private:
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    arrived_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  // Returns 0, an errno or kEnded. `piece.offset` is then the place where it stopped.
  static int transfer(Piece& piece) {
    while (piece.bytes > 0) {
      const auto bytes = static_cast<size_t>(piece.bytes);
      const auto moved = piece.write ? pwrite(piece.file, piece.memory, bytes, piece.offset)
                                     : pread(piece.file, piece.memory, bytes, piece.offset);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) return errno;
      if (moved == 0) return Request::kEnded;
      piece.offset += moved;
      piece.memory += moved;
      piece.bytes -= moved;
    }
    return 0;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      arrived_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Piece piece = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      const int error = transfer(piece);
      lock.lock();
      auto& request = *piece.request;
      if (error != 0) request.fail(error, piece.file, piece.offset);
      if (request.complete()) finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable finished_;
  std::deque<Piece> waiting_;
  std::vector<std::thread> workers_;
  bool closing_ = false;
};

}  // namespace

std::unique_ptr<Queue> thread_queue(int threads) { return std::make_unique<ThreadQueue>(threads); }

}  // namespace zero::store
