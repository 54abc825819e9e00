// A rank that dies, is stopped or gives up is named alike on all hosts, without any calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/comm/watch_ranks.h"
#include "tests/support/message_of.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/comm/frame_link.h"
#include "zero/comm/host_watch.h"
#include "zero/comm/peers.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;
using test::WatchedRanks;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The limits are 1 s and 5 s; a machine under load gets more.
constexpr int64_t kDeathMs = 4000;
constexpr int64_t kSilenceMs = 12'000;

// Checks that the ranks, but those in `lost`, all say the same, and returns it.
std::string common_message(const WatchedRanks& ranks, const std::vector<int>& lost, int64_t since,
                           int64_t limit) {
  std::string message;
  int64_t slowest = 0;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (std::find(lost.begin(), lost.end(), rank) != lost.end()) continue;
    const auto result = ranks.result(rank);
    EXPECT_EQ(result.told, 1) << "rank " << rank;
    if (message.empty()) message = result.message;
    EXPECT_EQ(result.message, message) << "rank " << rank;
    slowest = std::max(slowest, result.at_ms - since);
  }
  EXPECT_LT(slowest, limit) << message;
  std::printf("    %lld ms: %s\n", static_cast<long long>(slowest), message.c_str());
  return message;
}

std::string died(const WatchedRanks& ranks, int rank, char host) {
  return "Rank " + std::to_string(rank) + " (pid " + std::to_string(ranks.pid(rank)) + ", host " +
         host + ") died.";
}

// Each rank in turn is killed, and all others name it.
void kill_each(int hosts, int ranks_a_host) {
  for (int victim = 0; victim < hosts * ranks_a_host; ++victim) {
    WatchedRanks ranks(hosts, ranks_a_host);
    ranks.wait_until_watched();
    const auto since = WatchedRanks::now_ms();
    ranks.signal(victim, SIGKILL);
    EXPECT_EQ(common_message(ranks, {victim}, since, kDeathMs),
              died(ranks, victim, static_cast<char>('a' + victim / ranks_a_host)));
  }
}

// Rank 0 judges, rank 2 is the next judge; rank 1 shares a host with the one, rank 3 with the
// other.
TEST(Watch, NamesAKilledRankOnAllHosts) { kill_each(3, 2); }

TEST(Watch, NamesAKilledRankOfTwo) { kill_each(2, 1); }

TEST(Watch, NamesARankThatEndsWithoutAWord) {
  WatchedRanks ranks(2, 2);
  ranks.wait_until_watched();
  const auto since = WatchedRanks::now_ms();
  ranks.order(3, "exit");
  EXPECT_EQ(common_message(ranks, {3}, since, kDeathMs), died(ranks, 3, 'b'));
}

TEST(Watch, NamesARankThatLeavesByAnException) {
  for (const int victim : {0, 3}) {
    WatchedRanks ranks(2, 2);
    ranks.wait_until_watched();
    const auto since = WatchedRanks::now_ms();
    ranks.order(victim, "throw");
    EXPECT_THAT(common_message(ranks, {victim}, since, kDeathMs),
                AllOf(StartsWith("Rank " + std::to_string(victim) + " (pid "),
                      HasSubstr("left because of an exception")));
    EXPECT_EQ(ranks.wait_for_end(victim), 3);
  }
}

TEST(Watch, PassesOnWhatARankReportsOfItself) {
  for (const int reporter : {0, 2, 3}) {
    WatchedRanks ranks(2, 2);
    ranks.wait_until_watched();
    const auto since = WatchedRanks::now_ms();
    ranks.order(reporter, "report The disk of this rank is full.");
    EXPECT_EQ(common_message(ranks, {}, since, kDeathMs), "The disk of this rank is full.");
  }
}

TEST(Watch, TakesASuspicionForTheTruthIfNobodyKnowsBetter) {
  WatchedRanks ranks(2, 2);
  ranks.wait_until_watched();
  const auto since = WatchedRanks::now_ms();
  ranks.order(1, "suspect 3");
  EXPECT_EQ(common_message(ranks, {}, since, kDeathMs),
            "The connection of rank 1 to rank 3 broke.");
}

TEST(Watch, PrefersADeathToASuspicion) {
  WatchedRanks ranks(2, 2);
  ranks.wait_until_watched();
  const auto since = WatchedRanks::now_ms();
  ranks.order(1, "suspect 3");
  ranks.order(0, "suspect 3");
  ranks.signal(3, SIGKILL);
  EXPECT_EQ(common_message(ranks, {3}, since, kDeathMs), died(ranks, 3, 'b'));
}

TEST(Watch, NamesAStoppedRankWhichFindsTheVerdictWhenItGoesOn) {
  for (const int victim : {0, 1, 2, 3}) {
    WatchedRanks ranks(2, 2);
    ranks.wait_until_watched();
    const auto since = WatchedRanks::now_ms();
    ranks.signal(victim, SIGSTOP);
    const auto message = common_message(ranks, {victim}, since, kSilenceMs);
    EXPECT_EQ(message, "Rank " + std::to_string(victim) + " (pid " +
                           std::to_string(ranks.pid(victim)) + ", host " +
                           static_cast<char>('a' + victim / 2) + ") has been silent for 4 s.");
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(rank == victim ? 0 : ranks.wait_for_end(rank), 0) << "rank " << rank;
    }
    ranks.signal(victim, SIGCONT);
    EXPECT_EQ(ranks.result(victim).message, message);
  }
}

TEST(Watch, NamesAStoppedHost) {
  for (int host = 0; host < 3; ++host) {
    WatchedRanks ranks(3, 2);
    ranks.wait_until_watched();
    const auto since = WatchedRanks::now_ms();
    const int first = 2 * host;
    ranks.signal(first, SIGSTOP);
    ranks.signal(first + 1, SIGSTOP);
    EXPECT_EQ(common_message(ranks, {first, first + 1}, since, kSilenceMs),
              std::string("Host ") + static_cast<char>('a' + host) +
                  " has been silent for 4 s: ranks " + std::to_string(first) + "-" +
                  std::to_string(first + 1) + ".");
  }
}

TEST(Watch, NamesAllHostsButItsOwnTogether) {
  WatchedRanks ranks(3, 1);
  ranks.wait_until_watched();
  const auto since = WatchedRanks::now_ms();
  ranks.signal(1, SIGSTOP);
  ranks.signal(2, SIGSTOP);
  EXPECT_EQ(common_message(ranks, {1, 2}, since, kSilenceMs),
            "Hosts b and c have been silent for 4 s: ranks 1-2. Those are all the others: is the "
            "link of host a cut?");
}

TEST(Watch, OfARankThatHearsNoJudgeSaysSo) {
  WatchedRanks ranks(3, 1);
  ranks.wait_until_watched();
  const auto since = WatchedRanks::now_ms();
  ranks.signal(0, SIGSTOP);
  ranks.signal(1, SIGSTOP);
  EXPECT_EQ(common_message(ranks, {0, 1}, since, kSilenceMs),
            "Host c has heard nothing from hosts a and b for 4 s: is its link cut?");
}

TEST(Watch, SaysTheSameEverywhereOfTwoDeathsAtOnce) {
  for (const auto& [first, second] : {std::pair(0, 2), {2, 0}, {0, 5}, {3, 4}, {0, 1}}) {
    WatchedRanks ranks(3, 2);
    ranks.wait_until_watched();
    const auto since = WatchedRanks::now_ms();
    ranks.signal(first, SIGKILL);
    ranks.signal(second, SIGKILL);
    EXPECT_THAT(common_message(ranks, {first, second}, since, kDeathMs),
                AnyOf(died(ranks, first, static_cast<char>('a' + first / 2)),
                      died(ranks, second, static_cast<char>('a' + second / 2))));
  }
}

TEST(Watch, NamesARankThatNeverCame) {
  for (const int victim : {0, 1, 3}) {
    std::vector<std::string> orders(4);
    orders[static_cast<size_t>(victim)] = "die";
    WatchedRanks ranks(2, 2, orders, milliseconds(3000));
    EXPECT_EQ(ranks.wait_for_end(victim), 128 + SIGKILL);
    std::set<std::string> messages;
    for (int rank = 0; rank < 4; ++rank) {
      if (rank != victim) messages.insert(ranks.result(rank).message);
    }
    EXPECT_THAT(messages, ElementsAre("Within 3 s of the start nothing was heard of rank " +
                                      std::to_string(victim) + "."));
  }
}

TEST(Watch, IsLeftInOrder) {
  WatchedRanks ranks(2, 2);
  ranks.wait_until_watched();
  for (const int rank : {3, 0, 1, 2}) {  // rank 0 and its store go before others
    ranks.order(rank, "end");
    EXPECT_EQ(ranks.result(rank).message, "ok");
    EXPECT_EQ(ranks.wait_for_end(rank), 0);
  }
}

TEST(Watch, NamesADeathWhileOthersEnd) {
  for (const int leaver : {0, 1, 2}) {
    WatchedRanks ranks(2, 2);
    ranks.wait_until_watched();
    ranks.order(leaver, "leave");
    std::this_thread::sleep_for(milliseconds(300));
    const auto since = WatchedRanks::now_ms();
    ranks.signal(3, SIGKILL);
    EXPECT_EQ(common_message(ranks, {leaver, 3}, since, kDeathMs), died(ranks, 3, 'b'));
  }
}

TEST(Watch, TellsThatASuspectHasLeft) {
  WatchedRanks ranks(2, 2);
  ranks.wait_until_watched();
  ranks.order(3, "leave");
  std::this_thread::sleep_for(milliseconds(300));
  const auto since = WatchedRanks::now_ms();
  ranks.order(1, "suspect 3");
  EXPECT_THAT(common_message(ranks, {3}, since, kDeathMs),
              AllOf(StartsWith("Rank 3 (pid "), HasSubstr("left the job while others went on")));
}

TEST(Watch, LetsRanksStopForTwoSeconds) {
  for (const int victim : {0, 2, 3}) {
    WatchedRanks ranks(2, 2);
    ranks.wait_until_watched();
    ranks.signal(victim, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(2000));
    ranks.signal(victim, SIGCONT);
    std::this_thread::sleep_for(milliseconds(3000));
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_FALSE(ranks.result_now(rank)) << ranks.result_now(rank)->message;
      ranks.order(rank, "end");
    }
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(ranks.result(rank).message, "ok");
  }
}

TEST(Watch, OwesNothingToAForkedChild) {
  WatchedRanks ranks(2, 2);
  ranks.wait_until_watched();
  for (int rank = 0; rank < 4; ++rank) ranks.order(rank, "fork");
  std::this_thread::sleep_for(milliseconds(1500));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_FALSE(ranks.result_now(rank)) << ranks.result_now(rank)->message;
    ranks.order(rank, "end");
  }
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(ranks.result(rank).message, "ok");
}

// --- Watches of one process, each a rank of a host of its own ---

HostWatch::Settings settings(int rank, int size) {
  return {.rank = rank,
          .size = size,
          .topology = {.hosts = size, .host = rank},
          .address = "127.0.0.1",
          .host = "h" + std::to_string(rank)};
}

class Watches {
 public:
  explicit Watches(int size) : watches_(static_cast<size_t>(size)) {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([this, rank, size] {
        watches_[static_cast<size_t>(rank)] = std::make_unique<HostWatch>(
            settings(rank, size), *store_, [](const Verdict&) {}, HostWatch::Look());
      });
    }
  }
  HostWatch& operator[](int rank) { return *watches_[static_cast<size_t>(rank)]; }
  c10d::Store& store() { return *store_; }
  void leave() {
    std::vector<std::jthread> threads;
    for (auto& watch : watches_) threads.emplace_back([&watch] { watch->leave(); });
  }

 private:
  c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<HostWatch>> watches_;
};

size_t entries(const char* folder) {
  const std::filesystem::directory_iterator begin(folder);
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

TEST(Watch, LeavesNothingBehind) {
  std::jthread([] {}).join();  // with the first thread a sanitizer may start one of its own
  const auto threads = entries("/proc/self/task");
  const auto descriptors = entries("/proc/self/fd");
  for (const bool trouble : {false, true}) {
    Watches watches(3);
    if (trouble) watches[1].report(1, "Rank 1 is tired.");
    watches.leave();
    EXPECT_EQ(entries("/proc/self/task"), threads);
  }
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
}

TEST(Watch, GivesEveryReportTheFirstWord) {
  Watches watches(3);
  const Verdict first{1, "Rank 1 is tired."};
  EXPECT_EQ(watches[1].report(1, first.message), first);
  EXPECT_EQ(watches[2].report(2, "Rank 2 is tired."), first);
  EXPECT_EQ(watches[0].report(2, "Rank 2 does not answer."), first);
  EXPECT_EQ(watches[0].verdict(), first);
  watches.leave();
  EXPECT_EQ(watches[2].report(2, "Late."), first);
}

TEST(Watch, MayBeLetGoByWhomItTells) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto threads = entries("/proc/self/task");
  std::unique_ptr<HostWatch> first, second;
  std::jthread thread(
      [&] { first = std::make_unique<HostWatch>(settings(0, 2), *store, HostWatch::OnTrouble()); });
  std::promise<void> made, gone;
  second = std::make_unique<HostWatch>(settings(1, 2), *store, [&](const Verdict&) {
    made.get_future().wait();
    second.reset();
    gone.set_value();
  });
  thread.join();
  first->report(0, "Rank 0 is tired.");
  made.set_value();
  gone.get_future().wait();
  first.reset();
  for (int i = 0; i < 1000 && entries("/proc/self/task") > threads; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(entries("/proc/self/task"), threads);
}

TEST(Watch, SaysWhatTheHostSees) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const Verdict seen{1, "Rank 1 (pid 7, host h1) died."};
  std::atomic<bool> met = false;  // before that, the constructor would throw the verdict
  std::unique_ptr<HostWatch> other;
  std::jthread thread([&] {
    other = std::make_unique<HostWatch>(settings(1, 2), *store, HostWatch::OnTrouble(),
                                        [&] { return met ? std::optional(seen) : std::nullopt; });
  });
  const HostWatch watch(settings(0, 2), *store, HostWatch::OnTrouble());
  met = true;
  for (int i = 0; i < 1000 && !watch.verdict(); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(watch.verdict(), seen);
  thread.join();
}

void write(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, value);
}

TEST(Watch, SaysWhichAddressCannotBeReached) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto wrong = settings(0, 2);
  wrong.address = "192.0.2.7";  // an address for documentation, which nobody has
  EXPECT_THAT(
      zero::message_of<CommError>([&] { HostWatch(wrong, *store, HostWatch::OnTrouble()); }),
      HasSubstr("192.0.2.7"));
  write(*store, "zero/watch/2/0", std::string(32, 'a') + " 127.0.0.1 1 0 7 h0");
  auto early = settings(1, 3);
  early.topology.hosts = 3;
  early.arrival = milliseconds(300);
  store->add("zero/watch/generation/1", 1);
  EXPECT_THAT(
      zero::message_of<CommError>([&] { HostWatch(early, *store, HostWatch::OnTrouble()); }),
      AllOf(HasSubstr("Rank 1 on host h1 cannot reach the watch of rank 0 at 127.0.0.1:1"),
            HasSubstr("firewall")));
}

// It has no connection to rank 0, but rank 0 has one to it.
TEST(Watch, TellsAJudgeThatAnotherCannotReachIt) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::string heard;
  std::jthread first([&] {
    heard = zero::message_of<CommError>([&] {
      HostWatch watch(settings(0, 2), *store, HostWatch::OnTrouble());
      for (int i = 0; i < 1000 && !watch.verdict(); ++i)
        std::this_thread::sleep_for(milliseconds(20));
      throw CommError(watch.verdict() ? watch.verdict()->message : "nothing");
    });
  });
  const std::string key = "zero/watch/1/0";
  std::istringstream said(store->get_to_str(key));
  std::string token, address, port, rest;
  said >> token >> address >> port;
  std::getline(said, rest);
  write(*store, key, token + " " + address + " 1" + rest);
  const auto own = zero::message_of<CommError>(
      [&] { HostWatch(settings(1, 2), *store, HostWatch::OnTrouble()); });
  EXPECT_THAT(own, HasSubstr("Rank 1 on host h1 cannot reach the watch of rank 0 at 127.0.0.1:1"));
  first.join();
  EXPECT_EQ(heard, own);
}

TEST(Watch, BelievesOnlyWhatARankWrites) {
  for (const auto* said : {"", "7", "token 127.0.0.1 80 0 7 h0",
                           "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 127.0.0.1 80 9 7 h0",
                           "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 127.0.0.1 99999 0 7 h0",
                           "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 127.0.0.1 80 0 -7 h0"}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    write(*store, "zero/watch/1/0", said);
    EXPECT_THAT(zero::message_of<CommError>(
                    [&] { HostWatch(settings(1, 2), *store, HostWatch::OnTrouble()); }),
                HasSubstr("not what a rank writes"))
        << said;
  }
}

// A connection to the watch of rank 0.
FrameLink intrude(c10d::Store& store, std::string& token) {
  std::istringstream words(store.get_to_str("zero/watch/1/0"));
  std::string address;
  uint16_t port = 0;
  words >> token >> address >> port;
  Descriptor connection(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(connection.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  return FrameLink(std::move(connection));
}

bool is_closed_soon(FrameLink& link) {
  for (int i = 0; i < 1000 && !link.closed(); ++i) {
    link.receive();
    std::this_thread::sleep_for(milliseconds(5));
  }
  return link.closed();
}

TEST(Watch, ClosesTheDoorToStrangers) {
  Watches watches(2);
  std::string token;
  for (const int rank : {-1, 0, 1, 2}) {  // rank 1 is there already
    auto link = intrude(watches.store(), token);
    link.send(Frame::Kind::hello, rank, token + " 1 7 h1");
    EXPECT_TRUE(is_closed_soon(link)) << rank;
  }
  for (const auto kind : {Frame::Kind::verdict, Frame::Kind::report, Frame::Kind::leave}) {
    auto link = intrude(watches.store(), token);
    link.send(kind, 1, "Rank 1 died.");
    EXPECT_TRUE(is_closed_soon(link));
  }
  auto wrong = intrude(watches.store(), token);
  wrong.send(Frame::Kind::hello, 1, std::string(32, '0') + " 1 7 h1");
  EXPECT_TRUE(is_closed_soon(wrong));
  auto garbage = intrude(watches.store(), token);
  EXPECT_GT(::send(garbage.socket(), "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL), 0);
  EXPECT_TRUE(is_closed_soon(garbage));
  EXPECT_FALSE(watches[0].verdict());
  EXPECT_FALSE(watches[1].verdict());
  watches.leave();
}

// --- Frames ---

TEST(Frames, ArriveWholeHoweverTheyAreCut) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  FrameLink receiver{Descriptor(ends[0])};
  Descriptor raw(ends[1]);
  int bytes_ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, bytes_ends), 0);
  FrameLink sender{Descriptor(bytes_ends[0])};
  const Descriptor tap(bytes_ends[1]);
  sender.send(Frame::Kind::report, 3, "Rank 3 is tired.");
  sender.send(Frame::Kind::beat, 2);
  std::string bytes(10'000, '\0');
  const auto got = recv(tap.get(), bytes.data(), bytes.size(), 0);
  ASSERT_GT(got, 0);
  bytes.resize(static_cast<size_t>(got));
  std::vector<Frame> frames;
  for (const char byte : bytes) {
    ASSERT_EQ(::send(raw.get(), &byte, 1, 0), 1);
    for (auto& frame : receiver.receive()) {
      if (frame.kind != Frame::Kind::beat || frame.origin == 2) frames.push_back(frame);
    }
  }
  ASSERT_EQ(frames.size(), 2U);
  EXPECT_EQ(frames[0].kind, Frame::Kind::report);
  EXPECT_EQ(frames[0].origin, 3);
  EXPECT_EQ(frames[0].text, "Rank 3 is tired.");
  EXPECT_EQ(frames[1].kind, Frame::Kind::beat);
  EXPECT_FALSE(receiver.closed());
  raw.close();
  receiver.receive();
  EXPECT_TRUE(receiver.closed());
}

TEST(Frames, OfAPeerThatTakesNothingStayBounded) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  FrameLink sender{Descriptor(ends[0])};
  FrameLink receiver{Descriptor(ends[1])};
  const std::string text(FrameLink::kLongestText + 100, 'x');
  for (int i = 0; i < 10'000; ++i) sender.send(Frame::Kind::report, i, text);
  EXPECT_TRUE(sender.has_unsent());
  size_t received = 0;
  for (int i = 0; i < 10'000 && (sender.has_unsent() || i < 10); ++i) {
    for (const auto& frame : receiver.receive()) {
      if (frame.kind == Frame::Kind::beat) continue;  // the beats that follow other frames
      EXPECT_EQ(frame.origin, static_cast<int>(received++));
      EXPECT_EQ(frame.text.size(), FrameLink::kLongestText);
    }
    sender.flush();
  }
  EXPECT_FALSE(sender.has_unsent());
  EXPECT_LT(received, 5000U);
}

}  // namespace
}  // namespace zero::comm
