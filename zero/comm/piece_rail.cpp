#include "zero/comm/piece_rail.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/thread.h"
#include "zero/comm/agreement.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

constexpr int kCounterBits = 16;

// Shortens a transport's message for a person: its first sentence, without the file and line that
// it begins with and the address of a socket.
std::string in_short(std::string text) {
  if (text.starts_with('[')) {
    const auto end = text.find("] ");
    if (end != std::string::npos) text.erase(0, end + 2);
  }
  text.erase(std::min(text.find('\n'), text.size()));
  text.erase(std::min(text.find(". "), text.size()));
  while (!text.empty() && (text.back() == '.' || text.back() == ' ')) text.pop_back();
  return text;
}

std::string reason_of(const std::exception_ptr& error) { return in_short(message_of(error)); }

class Message;

// A rail and its messages share this, since a message may outlive the rail.
struct Shared {
  std::mutex mutex;
  bool aborted = false;
  std::string why;  // the reason, if the rail aborted itself
  // The reason why a host's channel is lost, or "".
  std::vector<std::array<std::string, kChannels>> lost;
  std::unordered_set<Message*> under_way;
  std::unique_ptr<Carrier> carrier;
  PieceOptions options;
  int host = 0;

  void abort(std::string_view reason);
  std::string& lost_at(int peer, Channel channel) {
    return lost[static_cast<size_t>(peer)][static_cast<size_t>(channel)];
  }
};

// Describes a message under way, for errors.
struct Title {
  bool sends;
  int peer;
  Channel channel;
  size_t bytes;
  std::string text(int host) const {
    return sends ? fmt::format("host {} sent {} to host {}", host,
                               format_bytes(static_cast<double>(bytes)), peer)
                 : fmt::format("host {} received {} from host {}", host,
                               format_bytes(static_cast<double>(bytes)), peer);
  }
};

// The caller holds the mutex.
[[noreturn]] void throw_aborted(const Shared& shared, const Title& title) {
  throw CommError(fmt::format("The rail of host {} ({}) was aborted{}{} while {}.", shared.host,
                              shared.carrier->describe(), shared.why.empty() ? "" : ", since ",
                              shared.why, title.text(shared.host)));
}

[[noreturn]] void throw_lost(const Shared& shared, const Title& title, std::string_view why) {
  throw CommError(fmt::format("Host {} lost host {} while {} over {}: {}.", shared.host, title.peer,
                              title.text(shared.host), shared.carrier->describe(), why));
}

class Message final : public Passage {
 public:
  Message(std::shared_ptr<Shared> shared, Title title)
      : shared_(std::move(shared)), title_(title) {}
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  ~Message() override {
    if (pieces_.empty()) return;
    shared_->abort(fmt::format("{} and nobody waited for it", title_.text(shared_->host)));
    forget();
  }

  void add(std::unique_ptr<Piece> piece) { pieces_.push_back(std::move(piece)); }
  const Title& title() const { return title_; }

  // The caller holds the mutex.
  void abort_pieces() {
    for (const auto& piece : pieces_) piece->abort();
  }

  void wait() override {
    for (const auto& piece : pieces_) wait_for(*piece);
    forget();
  }

 private:
  void wait_for(Piece& piece) {
    const auto began = std::chrono::steady_clock::now();
    std::exception_ptr error;
    bool done = false;
    if (!is_aborted()) {
      try {
        done = piece.wait(shared_->options.timeout);
        // The piece may have arrived before the host was lost.
        if (!done && !is_aborted()) done = piece.wait(milliseconds(1));
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (done) return;
    forget();  // nobody touches the memory from here on
    const bool late = std::chrono::steady_clock::now() - began >= shared_->options.timeout;
    fail(error, late);
  }

  [[noreturn]] void fail(const std::exception_ptr& error, bool late) {
    std::string lost;
    {
      const std::lock_guard lock(shared_->mutex);
      if (shared_->aborted) throw_aborted(*shared_, title_);
      lost = shared_->lost_at(title_.peer, title_.channel);
    }
    if (late) {
      const auto what = fmt::format("nothing moved for {} s while {}",
                                    std::chrono::duration<double>(shared_->options.timeout).count(),
                                    title_.text(shared_->host));
      shared_->abort(what);  // the rest of the message may come at any time
      throw CommError(fmt::format(
          "Over {} {}. Host {} does not answer, or the two hosts do not make the same calls.",
          shared_->carrier->describe(), what, title_.peer));
    }
    if (!lost.empty()) throw_lost(*shared_, title_, lost);
    throw_lost(*shared_, title_, error ? reason_of(error) : "the connection is closed");
  }

  bool is_aborted() const {
    const std::lock_guard lock(shared_->mutex);
    return shared_->aborted;
  }

  void forget() {
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->under_way.erase(this);
    }
    pieces_.clear();
  }

  std::shared_ptr<Shared> shared_;
  Title title_;
  std::vector<std::unique_ptr<Piece>> pieces_;
};

void Shared::abort(std::string_view reason) {
  {
    const std::lock_guard lock(mutex);
    if (aborted) return;
    aborted = true;
    why = reason;
    for (auto* message : under_way) message->abort_pieces();
  }
  carrier->close();
}

// Counts the pieces of one direction between two hosts, channel by channel.
struct Counters {
  std::array<uint64_t, kChannels> next{};
};

class PieceRail final : public Rail {
 public:
  PieceRail(std::unique_ptr<Carrier> carrier, int host, int hosts, PieceOptions options)
      : hosts_(hosts), shared_(std::make_shared<Shared>()) {
    ensure(options.piece_bytes > 0, "a piece has bytes");
    shared_->carrier = std::move(carrier);
    shared_->options = options;
    shared_->host = host;
    shared_->lost.resize(static_cast<size_t>(hosts));
    Counters first;
    first.next.fill(options.first_piece);
    sent_.assign(static_cast<size_t>(hosts), first);
    received_ = sent_;
    if (hosts > 1 && shared_->carrier->watches()) {
      watch_ =
          start_thread<CommError>(fmt::format("the rail of host {}", host), [this] { watch(); });
    }
  }

  PieceRail(const PieceRail&) = delete;
  PieceRail& operator=(const PieceRail&) = delete;
  ~PieceRail() override {
    bool busy = false;
    {
      const std::lock_guard lock(shared_->mutex);
      busy = !shared_->under_way.empty();
      ends_ = true;
    }
    wake_.notify_all();
    if (watch_.joinable()) watch_.join();
    if (busy) shared_->abort("it is gone");
  }

  int host() const override { return shared_->host; }
  int hosts() const override { return hosts_; }
  std::string describe() const override { return shared_->carrier->describe(); }
  int64_t sent_bytes() const override { return sent_bytes_.load(std::memory_order_relaxed); }
  void abort() override { shared_->abort(""); }

  std::unique_ptr<Passage> send(int host, Channel channel,
                                std::span<const std::byte> bytes) override {
    const Title title{true, host, channel, bytes.size()};
    auto passage = post(title, bytes, sent_, [&](int tag, auto piece) {
      return shared_->carrier->send(host, channel, tag, piece);
    });
    sent_bytes_.fetch_add(static_cast<int64_t>(bytes.size()), std::memory_order_relaxed);
    return passage;
  }

  std::unique_ptr<Passage> receive(int host, Channel channel, std::span<std::byte> bytes) override {
    const Title title{false, host, channel, bytes.size()};
    return post(title, bytes, received_, [&](int tag, auto piece) {
      return shared_->carrier->receive(host, channel, tag, piece);
    });
  }

 private:
  template <class Byte, class Start>
  std::unique_ptr<Passage> post(const Title& title, std::span<Byte> bytes,
                                std::vector<Counters>& counters, const Start& start) {
    ensure(title.peer >= 0 && title.peer < hosts_ && title.peer != shared_->host,
           "a message goes to another host of the rail");
    auto message = std::make_unique<Message>(shared_, title);
    check(title);
    auto& number =
        counters[static_cast<size_t>(title.peer)].next[static_cast<size_t>(title.channel)];
    try {
      while (!bytes.empty()) {
        const auto piece = bytes.first(std::min(bytes.size(), shared_->options.piece_bytes));
        message->add(start(tag(number++, piece.size()), piece));
        bytes = bytes.subspan(piece.size());
      }
    } catch (...) {
      const auto error = std::current_exception();
      check(title);
      throw_lost(*shared_, title, reason_of(error));
    }
    const std::lock_guard lock(shared_->mutex);
    shared_->under_way.insert(message.get());
    // If the trouble was noticed meanwhile, the wait will say so.
    if (shared_->aborted || !shared_->lost_at(title.peer, title.channel).empty())
      message->abort_pieces();
    return message;
  }

  // Throws if the rail was aborted or the host's channel is lost.
  void check(const Title& title) const {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->aborted) throw_aborted(*shared_, title);
    const auto& why = shared_->lost_at(title.peer, title.channel);
    if (!why.empty()) throw_lost(*shared_, title, why);
  }

  int tag(uint64_t number, size_t bytes) const {
    const int bits = shared_->carrier->tag_bits();
    const int counter_bits = std::min(bits, kCounterBits);
    const int check_bits = bits - counter_bits;
    const auto low = static_cast<uint32_t>(number & ((1U << counter_bits) - 1));
    const uint64_t mixed = static_cast<uint64_t>(bytes) * 0x9E3779B97F4A7C15U;
    const auto check = check_bits == 0 ? 0 : static_cast<uint32_t>(mixed >> (64 - check_bits));
    return static_cast<int>((check << counter_bits) | low);
  }

  // Note [Lost hosts]
  // Gloo reports a broken connection only to pieces that have not begun; a piece of which some
  // bytes have gone would be waited for until the time is up. So the rail asks a few times a
  // second, and wakes the waits. It asks channel by channel: a rank that leaves after its last call
  // closes all its connections at once, and the end of an idle one overtakes the bytes that the
  // system still has to send on another, which its peers are right to wait for. A rank that dies
  // closes them all too. The watch notices a link that is cut, which no connection tells
  // (host_watch.h).
  void watch() {
    constexpr milliseconds kInterval{200};
    std::unique_lock lock(shared_->mutex);
    while (!wake_.wait_for(lock, kInterval, [this] { return ends_ || shared_->aborted; })) {
      for (int host = 0; host < hosts_; ++host) {
        if (host == shared_->host) continue;
        for (size_t i = 0; i < kChannels; ++i) look_at(host, static_cast<Channel>(i));
      }
    }
  }

  // The caller holds the mutex.
  void look_at(int host, Channel channel) {
    auto& lost = shared_->lost_at(host, channel);
    if (!lost.empty()) return;
    const auto trouble = shared_->carrier->trouble(host, channel);
    if (!trouble) return;
    lost = in_short(*trouble);
    for (auto* message : shared_->under_way) {
      const auto& title = message->title();
      if (title.peer == host && title.channel == channel) message->abort_pieces();
    }
  }

  int hosts_;
  std::shared_ptr<Shared> shared_;
  std::vector<Counters> sent_, received_;  // by host
  std::atomic<int64_t> sent_bytes_{0};
  bool ends_ = false;
  std::condition_variable wake_;
  std::thread watch_;
};

}  // namespace

std::unique_ptr<Rail> piece_rail(std::unique_ptr<Carrier> carrier, int host, int hosts,
                                 PieceOptions options) {
  return std::make_unique<PieceRail>(std::move(carrier), host, hosts, options);
}

}  // namespace zero::comm
