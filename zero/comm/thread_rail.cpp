#include "zero/comm/thread_rail.h"

#include <fmt/format.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "zero/base/error.h"

namespace zero::comm {
namespace {

// The ends of a rail share this.
struct Exchange {
  struct Message {
    std::byte* memory = nullptr;  // the memory of the end that came first
    size_t bytes = 0;
    bool arrived = false;
  };
  using Way = std::tuple<int, int, Channel>;  // from, to
  struct Waiting {
    std::deque<std::shared_ptr<Message>> sends;
    std::deque<std::shared_ptr<Message>> receives;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Way, Waiting> ways;
  bool aborted = false;
};

class ThreadPassage final : public Passage {
 public:
  ThreadPassage(std::shared_ptr<Exchange> exchange, std::shared_ptr<Exchange::Message> message)
      : exchange_(std::move(exchange)), message_(std::move(message)) {}
  void wait() override {
    std::unique_lock lock(exchange_->mutex);
    exchange_->changed.wait(lock, [&] { return message_->arrived || exchange_->aborted; });
    if (!message_->arrived) throw CommError("The rail between threads was aborted.");
  }

 private:
  std::shared_ptr<Exchange> exchange_;
  std::shared_ptr<Exchange::Message> message_;
};

class ThreadRail final : public Rail {
 public:
  ThreadRail(std::shared_ptr<Exchange> exchange, int host, int hosts)
      : exchange_(std::move(exchange)), host_(host), hosts_(hosts) {}
  int host() const override { return host_; }
  int hosts() const override { return hosts_; }

  std::unique_ptr<Passage> send(int host, Channel channel,
                                std::span<const std::byte> bytes) override {
    const std::lock_guard lock(exchange_->mutex);
    sent_ += static_cast<int64_t>(bytes.size());
    auto& way = exchange_->ways[{host_, host, channel}];
    // The bytes are only read.
    return post(way.receives, way.sends, const_cast<std::byte*>(bytes.data()), bytes.size(), true);
  }

  std::unique_ptr<Passage> receive(int host, Channel channel, std::span<std::byte> bytes) override {
    const std::lock_guard lock(exchange_->mutex);
    auto& way = exchange_->ways[{host, host_, channel}];
    return post(way.sends, way.receives, bytes.data(), bytes.size(), false);
  }

  void abort() override {
    const std::lock_guard lock(exchange_->mutex);
    exchange_->aborted = true;
    exchange_->changed.notify_all();
  }

  int64_t sent_bytes() const override {
    const std::lock_guard lock(exchange_->mutex);
    return sent_;
  }
  std::string describe() const override { return "threads of one process"; }

 private:
  using Queue = std::deque<std::shared_ptr<Exchange::Message>>;

  // The caller holds the mutex.
  std::unique_ptr<Passage> post(Queue& others, Queue& own, std::byte* memory, size_t bytes,
                                bool sends) {
    if (exchange_->aborted) throw CommError("The rail between threads was aborted.");
    if (others.empty() || others.front()->bytes != bytes) {
      own.push_back(std::make_shared<Exchange::Message>(Exchange::Message{memory, bytes}));
      return std::make_unique<ThreadPassage>(exchange_, own.back());
    }
    auto message = std::move(others.front());
    others.pop_front();
    if (sends) {
      std::memcpy(message->memory, memory, bytes);
    } else {
      std::memcpy(memory, message->memory, bytes);
    }
    message->arrived = true;
    exchange_->changed.notify_all();
    return std::make_unique<ThreadPassage>(exchange_, std::move(message));
  }

  std::shared_ptr<Exchange> exchange_;
  int host_;
  int hosts_;
  int64_t sent_ = 0;
};

}  // namespace

std::vector<std::shared_ptr<Rail>> thread_rail(int hosts) {
  const auto exchange = std::make_shared<Exchange>();
  std::vector<std::shared_ptr<Rail>> ends;
  for (int host = 0; host < hosts; ++host)
    ends.push_back(std::make_shared<ThreadRail>(exchange, host, hosts));
  return ends;
}

}  // namespace zero::comm
