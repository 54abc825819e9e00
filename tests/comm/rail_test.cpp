// Rails between hosts that are threads of this process, over an in-process store and the loopback
// interface.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/gloo_rail.h"
#include "zero/comm/open_rail.h"
#include "zero/comm/plugin_rail.h"
#include "zero/comm/rail_address.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kLoopbackAddress = "127.0.0.1";
using Bytes = std::vector<std::byte>;

/// Runs `body` on every host with its end of a rail; rethrows the first failure.
void on_hosts(int hosts, const std::function<void(Rail&)>& body, PieceOptions options = {}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::latch done(hosts);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(hosts));
  std::vector<std::thread> threads;
  for (int host = 0; host < hosts; ++host) {
    threads.emplace_back([&, host] {
      std::unique_ptr<Rail> rail;
      try {
        rail = gloo_rail(store, host, hosts, kLoopbackAddress, options);
        body(*rail);
      } catch (...) {
        errors[static_cast<size_t>(host)] = std::current_exception();
        if (rail) rail->abort();
      }
      done.arrive_and_wait();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

/// Bytes that differ by message and place.
Bytes message(size_t size, int seed) {
  Bytes bytes(size);
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761U + 1;
  for (auto& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

constexpr size_t kMiB = size_t{1} << 20;

TEST(Rail, DeliversMessagesOfEverySize) {
  on_hosts(2, [](Rail& rail) {
    const int peer = 1 - rail.host();
    int seed = 0;
    for (const size_t size : {size_t{0}, size_t{1}, size_t{4097}, kMiB, kMiB + 1, 32 * kMiB}) {
      ++seed;
      if (rail.host() == 0) {
        const auto bytes = message(size, seed);
        rail.send(peer, Channel::gather, bytes)->wait();
      } else {
        Bytes bytes(size);
        rail.receive(peer, Channel::gather, bytes)->wait();
        EXPECT_TRUE(bytes == message(size, seed)) << size;
      }
    }
  });
}

TEST(Rail, KeepsTheOrderOfAChannel) {
  on_hosts(2, [](Rail& rail) {
    constexpr int kMessages = 200;
    const int peer = 1 - rail.host();
    std::vector<Bytes> bytes;
    std::vector<std::unique_ptr<Passage>> passages;
    for (int i = 0; i < kMessages; ++i) bytes.push_back(message(1000, i));
    if (rail.host() == 0) {
      for (const auto& one : bytes) passages.push_back(rail.send(peer, Channel::homeward, one));
      for (const auto& passage : passages) passage->wait();
    } else {
      std::vector<Bytes> received(kMessages, Bytes(1000));
      for (auto& one : received) passages.push_back(rail.receive(peer, Channel::homeward, one));
      // The passages are waited for in reverse order, which must make no difference.
      for (auto passage = passages.rbegin(); passage != passages.rend(); ++passage)
        (*passage)->wait();
      EXPECT_TRUE(received == bytes);
    }
  });
}

TEST(Rail, ChannelsDoNotWaitForEachOther) {
  on_hosts(2, [](Rail& rail) {
    const int peer = 1 - rail.host();
    const auto large = message(8 * kMiB, 1), small = message(16, 2);
    if (rail.host() == 0) {
      // Nobody receives the large one until the small one has been answered.
      const auto first = rail.send(peer, Channel::gather, large);
      rail.send(peer, Channel::control, small)->wait();
      Bytes answer(16);
      rail.receive(peer, Channel::control, answer)->wait();
      EXPECT_TRUE(answer == small);
      first->wait();
    } else {
      Bytes received(16);
      rail.receive(peer, Channel::control, received)->wait();
      rail.send(peer, Channel::control, received)->wait();
      Bytes whole(large.size());
      rail.receive(peer, Channel::gather, whole)->wait();
      EXPECT_TRUE(whole == large);
    }
  });
}

TEST(Rail, CountsPiecesBeyondTheEndOfTheirNumbers) {
  // Both ends begin just before tags run out of numbers, and go on past that.
  on_hosts(2,
           [](Rail& rail) {
             const int peer = 1 - rail.host();
             constexpr int kMessages = 40;
             for (int i = 0; i < kMessages; ++i) {
               const auto bytes = message(100, i);
               if (rail.host() == 0) {
                 rail.send(peer, Channel::gather, bytes)->wait();
               } else {
                 Bytes received(100);
                 rail.receive(peer, Channel::gather, received)->wait();
                 EXPECT_TRUE(received == bytes) << i;
               }
             }
           },
           {.piece_bytes = 16, .first_piece = (uint64_t{1} << 16) - 50});
}

TEST(Rail, ThreeHostsExchangeInAllDirectionsAtOnce) {
  on_hosts(3, [](Rail& rail) {
    constexpr int kRounds = 5;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Bytes> sent(3), received(3);
      std::vector<std::unique_ptr<Passage>> passages;
      const auto seed = [&](int from, int to) { return 100 * round + 10 * from + to; };
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == rail.host()) continue;
        const auto at = static_cast<size_t>(peer);
        sent[at] = message(3 * kMiB + 5, seed(rail.host(), peer));
        received[at].resize(sent[at].size());
        passages.push_back(rail.receive(peer, Channel::gather, received[at]));
        passages.push_back(rail.send(peer, Channel::gather, sent[at]));
      }
      for (const auto& passage : passages) passage->wait();
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == rail.host()) continue;
        EXPECT_TRUE(received[static_cast<size_t>(peer)] ==
                    message(3 * kMiB + 5, seed(peer, rail.host())));
      }
    }
    EXPECT_EQ(rail.sent_bytes(), static_cast<int64_t>(kRounds * 2 * (3 * kMiB + 5)));
  });
}

TEST(Rail, CountsTheBytesThatItSends) {
  on_hosts(2, [](Rail& rail) {
    const int peer = 1 - rail.host();
    EXPECT_EQ(rail.sent_bytes(), 0);
    Bytes bytes(kMiB + 3);
    if (rail.host() == 0) {
      rail.send(peer, Channel::gather, bytes)->wait();
      rail.send(peer, Channel::control, std::span(bytes).first(7))->wait();
      rail.receive(peer, Channel::gather, std::span(bytes).first(9))->wait();
      EXPECT_EQ(rail.sent_bytes(), static_cast<int64_t>(kMiB + 10));
    } else {
      rail.receive(peer, Channel::gather, bytes)->wait();
      rail.receive(peer, Channel::control, std::span(bytes).first(7))->wait();
      rail.send(peer, Channel::gather, std::span(bytes).first(9))->wait();
      EXPECT_EQ(rail.sent_bytes(), 9);
    }
  });
}

TEST(Rail, ThreadsMayUseAChannelEach) {
  on_hosts(2, [](Rail& rail) {
    const int peer = 1 - rail.host();
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kChannels; ++i) {
      const auto channel = static_cast<Channel>(i);
      threads.emplace_back([&rail, peer, channel] {
        for (int i = 0; i < 20; ++i) {
          const auto seed = 100 * static_cast<int>(channel) + i;
          const auto bytes = message(50000, seed);
          Bytes received(bytes.size());
          const auto receives = rail.receive(peer, channel, received);
          rail.send(peer, channel, bytes)->wait();
          receives->wait();
          EXPECT_TRUE(received == bytes);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(Rail, AbortWakesEveryWaitAndRefusesLaterCalls) {
  on_hosts(2, [](Rail& rail) {
    if (rail.host() == 1) return;  // it is silent, but there
    Bytes received(2 * kMiB), sent(64 * kMiB);
    const auto receives = rail.receive(1, Channel::gather, received);
    const auto sends = rail.send(1, Channel::homeward, sent);  // nobody takes it
    auto waits = std::async(std::launch::async,
                            [&] { return zero::message_of<CommError>([&] { receives->wait(); }); });
    std::this_thread::sleep_for(milliseconds(50));
    rail.abort();
    EXPECT_THAT(waits.get(), AllOf(HasSubstr("aborted"), HasSubstr("gloo over 127.0.0.1 (tcp)"),
                                   HasSubstr("host 0 received 2.00 MiB from host 1")));
    EXPECT_THAT(zero::message_of<CommError>([&] { sends->wait(); }), HasSubstr("aborted"));
    EXPECT_THAT(zero::message_of<CommError>([&] { (void)rail.send(1, Channel::control, sent); }),
                HasSubstr("aborted"));
    rail.abort();  // once more is no harm
  });
}

TEST(Rail, APassageThatNobodyWaitsForAbortsIt) {
  on_hosts(2, [](Rail& rail) {
    if (rail.host() == 1) return;
    Bytes bytes(100);
    (void)rail.receive(1, Channel::gather, bytes);
    EXPECT_THAT(zero::message_of<CommError>([&] { (void)rail.send(1, Channel::control, bytes); }),
                HasSubstr("since host 0 received 100 B from host 1 and nobody waited"));
  });
}

TEST(Rail, AnAbortedReceiveLeavesItsMemoryAlone) {
  std::latch aborted(2);
  on_hosts(2, [&](Rail& rail) {
    const int peer = 1 - rail.host();
    if (rail.host() == 0) {
      Bytes received(16 * kMiB, std::byte{0});
      const auto passage = rail.receive(peer, Channel::gather, received);
      rail.abort();
      EXPECT_THROW(passage->wait(), CommError);
      std::fill(received.begin(), received.end(), std::byte{7});
      aborted.arrive_and_wait();
      EXPECT_TRUE(std::all_of(received.begin(), received.end(),
                              [](std::byte byte) { return byte == std::byte{7}; }));
    } else {
      const Bytes sent(16 * kMiB, std::byte{1});
      try {
        rail.send(peer, Channel::gather, sent)->wait();
      } catch (const CommError&) {  // the other's abort ends it
      }
      aborted.arrive_and_wait();
    }
  });
}

TEST(Rail, AHostThatGoesAwayIsNamed) {
  on_hosts(3, [](Rail& rail) {
    if (rail.host() == 0) return rail.abort();  // that closes its connections
    Bytes bytes(kMiB);
    EXPECT_THAT(
        zero::message_of<CommError>([&] { rail.receive(0, Channel::gather, bytes)->wait(); }),
        AllOf(HasSubstr("lost host 0"), HasSubstr("received 1.00 MiB from host 0"),
              Not(HasSubstr(".cc")), Not(HasSubstr("\n"))));
    // The other two still have each other.
    const int peer = 3 - rail.host();
    const auto sent = message(kMiB, rail.host());
    const auto receives = rail.receive(peer, Channel::gather, bytes);
    rail.send(peer, Channel::gather, sent)->wait();
    receives->wait();
    EXPECT_TRUE(bytes == message(kMiB, peer));
    // They lose each other too, though each has a broken connection already.
    if (rail.host() == 1) return rail.abort();
    EXPECT_THAT(
        zero::message_of<CommError>([&] { rail.receive(1, Channel::gather, bytes)->wait(); }),
        HasSubstr("lost host 1"));
  });
}

TEST(Rail, AHostThatGoesAwayInAMessageIsNamed) {
  // Some bytes have come, and more never will: see Note [Lost hosts]. The sender has messages
  // without end, so it goes away in one of them, however fast the machine is.
  on_hosts(2, [](Rail& rail) {
    const int peer = 1 - rail.host();
    Bytes bytes(64 * kMiB);
    if (rail.host() == 0) {
      auto sends = std::async(std::launch::async, [&] {
        for (;;) rail.send(peer, Channel::gather, bytes)->wait();
      });
      Bytes begun(1);
      rail.receive(peer, Channel::control, begun)->wait();
      rail.abort();
      EXPECT_THROW(sends.get(), CommError);
    } else {
      rail.receive(peer, Channel::gather, bytes)->wait();
      rail.send(peer, Channel::control, std::span(bytes).first(1))->wait();
      EXPECT_THAT(zero::message_of<CommError>([&] {
                    for (;;) rail.receive(peer, Channel::gather, bytes)->wait();
                  }),
                  HasSubstr("lost host 0"));
    }
  });
}

TEST(Rail, WhatArrivedBeforeItsSenderLeftIsDelivered) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::latch gone(2);
  const auto bytes = message(100000, 3);
  std::thread leaves([&] {
    {
      const auto rail = gloo_rail(store, 0, 2, kLoopbackAddress);
      rail->send(1, Channel::gather, bytes)->wait();
    }
    gone.arrive_and_wait();
  });
  const auto rail = gloo_rail(store, 1, 2, kLoopbackAddress);
  Bytes received(bytes.size());
  const auto passage = rail->receive(0, Channel::gather, received);
  gone.arrive_and_wait();
  std::this_thread::sleep_for(milliseconds(500));  // until the rail has seen that the other is gone
  passage->wait();
  EXPECT_TRUE(received == bytes);
  leaves.join();
}

/// A peer that has left looks so while the system still sends its last bytes: every connection has
/// ended but one, on which bytes are on their way.
class Tail {
 public:
  static constexpr Channel kBusy = Channel::gather;
  void ask(Channel channel) {
    const std::lock_guard lock(mutex_);
    if (channel == kBusy) ++asked_;
    changed_.notify_all();
  }
  void wait_until_asked(int times) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return asked_ >= times; });
  }
  void arrive() {
    const std::lock_guard lock(mutex_);
    arrived_ = true;
    changed_.notify_all();
  }
  void abort(bool& aborted) {
    const std::lock_guard lock(mutex_);
    aborted = true;
    changed_.notify_all();
  }
  bool wait(const bool& aborted) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ || aborted; });
    return arrived_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int asked_ = 0;
  bool arrived_ = false;
};

class TailCarrier final : public Carrier {
 public:
  explicit TailCarrier(Tail& tail) : tail_(tail) {}
  std::unique_ptr<Piece> send(int, Channel, int, std::span<const std::byte>) override {
    return std::make_unique<Part>(tail_);
  }
  std::unique_ptr<Piece> receive(int, Channel, int, std::span<std::byte>) override {
    return std::make_unique<Part>(tail_);
  }
  bool watches() const override { return true; }
  std::optional<std::string> trouble(int /*host*/, Channel channel) override {
    tail_.ask(channel);
    if (channel == Tail::kBusy) return std::nullopt;
    return "closed by the peer";
  }
  void close() override {}
  std::string describe() const override { return "a tail"; }

 private:
  class Part final : public Piece {
   public:
    explicit Part(Tail& tail) : tail_(tail) {}
    bool wait(milliseconds) override { return tail_.wait(aborted_); }
    void abort() override { tail_.abort(aborted_); }

   private:
    Tail& tail_;
    bool aborted_ = false;
  };

  Tail& tail_;
};

TEST(Rail, WhatIsStillOnItsWayFromAHostThatLeftIsWaitedFor) {
  Tail tail;
  const auto rail = piece_rail(std::make_unique<TailCarrier>(tail), 1, 2, {});
  Bytes bytes(10);
  const auto passage = rail->receive(0, Tail::kBusy, bytes);
  tail.wait_until_asked(3);  // so the other channels are known to have ended
  tail.arrive();
  EXPECT_NO_THROW(passage->wait());
  EXPECT_THAT(zero::message_of<CommError>([&] { (void)rail->receive(0, Channel::control, bytes); }),
              AllOf(HasSubstr("lost host 0"), HasSubstr("closed by the peer")));
}

TEST(Rail, SilenceIsReportedWhenTheTimeIsUp) {
  on_hosts(
      2,
      [](Rail& rail) {
        if (rail.host() == 0) {
          std::this_thread::sleep_for(milliseconds(900));
          return;
        }
        Bytes bytes(10);
        EXPECT_THAT(
            zero::message_of<CommError>([&] { rail.receive(0, Channel::gather, bytes)->wait(); }),
            AllOf(HasSubstr("nothing moved for 2 s"), HasSubstr("Host 0 does not answer")));
      },
      {.timeout = milliseconds(2000)});
}

TEST(Rail, EndsThatDisagreeAboutASizeSayThatNothingMoved) {
  on_hosts(2,
           [](Rail& rail) {
             Bytes bytes(kMiB);
             const auto error = zero::message_of<CommError>([&] {
               if (rail.host() == 0) {
                 rail.send(1, Channel::gather, bytes)->wait();
               } else {
                 rail.receive(0, Channel::gather, std::span(bytes).first(1000))->wait();
               }
             });
             EXPECT_THAT(error, ::testing::AnyOf(HasSubstr("do not make the same calls"),
                                                 HasSubstr("lost host")));
           },
           {.timeout = milliseconds(2000)});
}

TEST(Rail, HostsThatDoNotComeAreNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(zero::message_of<CommError>([&] {
                (void)gloo_rail(store, 1, 4, kLoopbackAddress, {.timeout = milliseconds(200)});
              }),
              HasSubstr("Host 1 waited 0.2 s for hosts 0, 2, 3 to connect"));
}

TEST(Rail, AnAddressThatIsNotThisHostsIsNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(zero::message_of<CommError>([&] {
                (void)gloo_rail(store, 0, 1, "192.0.2.1", {.timeout = milliseconds(200)});
              }),
              AllOf(HasSubstr("192.0.2.1"), HasSubstr("ZERO_INTERFACE")));
}

TEST(Rail, HasADescription) {
  on_hosts(2, [](Rail& rail) {
    EXPECT_EQ(rail.hosts(), 2);
    EXPECT_EQ(rail.describe(), "gloo over 127.0.0.1 (tcp)");
  });
}

/// Sets a variable of the environment while it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(RailAddress, IsTheOneTowardsTheStore) {
  EXPECT_EQ(rail_address("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(rail_address("localhost"), address_towards("localhost"));
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.0.0.1"));
  EXPECT_FALSE(is_loopback("fd00::1"));
}

TEST(RailAddress, RefusesALoopbackInterfaceWhereTheStoreIsElsewhere) {
  const Variable interface("ZERO_INTERFACE", "lo");
  EXPECT_EQ(rail_address("127.0.0.1"), "127.0.0.1");
  EXPECT_THAT(zero::message_of<Error>([] { (void)rail_address("192.0.2.1"); }),
              ::testing::AnyOf(AllOf(HasSubstr("ZERO_INTERFACE is 'lo'"), HasSubstr("192.0.2.1")),
                               HasSubstr("No route leads")));
}

TEST(RailAddress, NamesTheInterfacesThatThereAre) {
  const Variable interface("GLOO_SOCKET_IFNAME", "eth77");
  EXPECT_THAT(zero::message_of<ConfigError>([] { (void)rail_address("127.0.0.1"); }),
              AllOf(HasSubstr("GLOO_SOCKET_IFNAME is 'eth77'"), HasSubstr("lo")));
}

TEST(RailTransport, IsRefusedByNameWhereRailsDoNotKnowIt) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error = [&] {
    return zero::message_of<ConfigError>([&] { (void)gloo_rail(store, 0, 1, kLoopbackAddress); });
  };
  const Variable transport("GLOO_DEVICE_TRANSPORT", "UV");
  EXPECT_THAT(error(), HasSubstr("GLOO_DEVICE_TRANSPORT is 'UV'"));
  const Variable encrypted("GLOO_DEVICE_TRANSPORT", "TCP_TLS");
  EXPECT_THAT(error(), AllOf(HasSubstr("encrypts nothing"), HasSubstr("ZERO_INTERFACE")));
}

TEST(RailTransport, IsChosenByAVariable) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error = [&] {
    return zero::message_of<Error>([&] { (void)open_rail(store, {.address = kLoopbackAddress}); });
  };
  EXPECT_EQ(open_rail(store, {.address = kLoopbackAddress})->describe(),
            "gloo over 127.0.0.1 (tcp)");
  const Variable unknown("ZERO_TRANSPORT", "openmp");
  EXPECT_THAT(error(),
              AllOf(HasSubstr("ZERO_TRANSPORT is 'openmp'"), HasSubstr("Did you mean 'openmpi'?")));
  const Variable either("ZERO_TRANSPORT", "mpi");
  EXPECT_THAT(error(), HasSubstr("no mpirun has started this process"));
}

TEST(RailTransport, APluginThatIsNotThereIsNamedWithItsPackage) {
  EXPECT_THAT(
      zero::message_of<CommError>([] { (void)plugin_rail("mvapich", {0}, 0); }),
      AllOf(HasSubstr("libzero_rail_mvapich.so cannot be loaded"), HasSubstr("libmvapich-dev")));
}

}  // namespace
}  // namespace zero::comm
