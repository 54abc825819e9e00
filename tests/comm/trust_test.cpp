// Tests that ranks take memory from rank 0's process alone, and only possible values from peers.
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/support/message_of.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/token.h"

namespace zero::comm {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Token, IsRandomAndOfOneForm) {
  const auto token = random_token();
  EXPECT_TRUE(is_token(token));
  EXPECT_NE(token, random_token());
  EXPECT_FALSE(is_token(""));
  EXPECT_FALSE(is_token(token + "0"));
  EXPECT_FALSE(is_token(token.substr(1)));
  EXPECT_FALSE(is_token(std::string(32, 'A')));
  EXPECT_FALSE(is_token(std::string(31, 'a') + "/"));
}

// A process of its own that runs `body`, which makes only system calls, and then sleeps.
class Child {
 public:
  explicit Child(const std::function<void()>& body = [] {}) : pid_(fork()) {
    if (pid_ != 0) return;
    body();
    for (;;) pause();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { end(); }
  void end() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  /// Returns what a rank that is this process writes into the store.
  std::string record() const {
    const auto self = Process::self();
    return std::to_string(pid_) + "\n" + std::to_string(start_time(pid_).value_or(0)) + "\n" +
           self.host + "\n" + self.machine;
  }

 private:
  pid_t pid_;
};

ArenaLayout layout_of_two() { return ArenaLayout::choose(2, control_bytes(2), physical_memory()); }

std::string arena_record(const std::string& nonce, const ArenaLayout& layout) {
  return nonce + " " + std::to_string(layout.control_bytes) + " " +
         std::to_string(layout.region_bytes);
}

// Returns an abstract unix socket that listens (or connects) where rank 0 with this nonce would.
Descriptor socket_at(const std::string& nonce, decltype(&connect) use) {
  Descriptor descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const auto name = "libzero-" + nonce;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (use(descriptor.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return {};
  return descriptor;
}

// Returns the error of rank 1 of 2 after somebody has written in the name of rank 0.
std::string joiner_hears(const std::string& process, const std::string& arena) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("zero/comm/1/process/0", process);
  store->set("zero/comm/1/arena/0", arena);
  return zero::message_of<CommError>([&] { meet(*store, 1, 2, seconds(60)); });
}

TEST(Joiner, RefusesANonceOrALayoutThatNoRankWrites) {
  const Child rank_zero;
  const auto layout = layout_of_two();
  const auto nonce = random_token();
  auto changed = [&](int64_t control, int64_t region) {
    return arena_record(nonce, {control, region, 2});
  };
  for (const auto& arena :
       {arena_record(std::string(200, 'a'), layout), arena_record("abc", layout),
        arena_record(std::string(32, '/'), layout), std::string(), nonce,
        changed(layout.control_bytes, -4096), changed(layout.control_bytes, 0),
        changed(layout.control_bytes, int64_t{1} << 62),
        changed(layout.control_bytes, layout.region_bytes + 1), changed(0, layout.region_bytes),
        changed(layout.control_bytes + 4096, layout.region_bytes)}) {
    EXPECT_THAT(joiner_hears(rank_zero.record(), arena), HasSubstr("memory of rank 0")) << arena;
  }
}

TEST(Joiner, RefusesAProcessThatCannotBe) {
  const auto arena = arena_record(random_token(), layout_of_two());
  for (const std::string process : {"", "x", "-1\n5\nh\nm", "99999999999\n5\nh\nm", "5\n5\nh"}) {
    EXPECT_THAT(joiner_hears(process, arena), HasSubstr("process of rank 0")) << process;
  }
}

TEST(Joiner, TakesNothingFromAProcessThatIsNotRankZero) {
  const Child rank_zero;
  const auto nonce = random_token();
  const auto impostor = socket_at(nonce, bind);
  ASSERT_TRUE(impostor);
  ASSERT_EQ(listen(impostor.get(), 5), 0);
  EXPECT_THAT(joiner_hears(rank_zero.record(), arena_record(nonce, layout_of_two())),
              AllOf(HasSubstr("found process " + std::to_string(getpid())),
                    HasSubstr("takes no memory from there")));
}

void send_file(int socket, int fd) {
  char byte = 'z';
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  auto* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  sendmsg(socket, &message, MSG_NOSIGNAL);
}

TEST(Joiner, MapsOnlyAFileThatIsOfTheLayoutAndSealed) {
  const auto layout = layout_of_two();
  const auto memfd = [](int64_t bytes) {
    Descriptor file(memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(file.get(), bytes), 0);
    return file;
  };
  std::vector<Descriptor> files;
  files.push_back(memfd(4096));
  files.push_back(memfd(layout.total_bytes() + 4096));
  files.push_back(memfd(layout.total_bytes()));  // its maker could still cut it
  files.emplace_back(open("/dev/zero", O_RDWR | O_CLOEXEC));
  for (const auto& file : files) {
    const auto nonce = random_token();
    const Child rank_zero([&] {
      const auto listener = socket_at(nonce, bind);
      listen(listener.get(), 5);
      for (;;) {
        const Descriptor peer(accept(listener.get(), nullptr, nullptr));
        send_file(peer.get(), file.get());
      }
    });
    EXPECT_THAT(joiner_hears(rank_zero.record(), arena_record(nonce, layout)),
                HasSubstr("Rank 0 passed what is not its memory"));
  }
}

TEST(Host, GivesTheMemoryToRanksAlone) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  Child rank_one;
  store->set("zero/comm/1/process/1", rank_one.record());
  std::string message;
  std::thread rank_zero([&] {
    try {
      meet(*store, 0, 2, seconds(60));
    } catch (const CommError& error) {
      message = error.what();
    }
  });
  const auto nonce = store->get_to_str("zero/comm/1/arena/0").substr(0, 32);
  {
    const auto stranger = socket_at(nonce, connect);
    ASSERT_TRUE(stranger);
    char byte = 0;
    EXPECT_EQ(recv(stranger.get(), &byte, 1, 0), 0) << "the memory was passed to a stranger";
  }
  rank_one.end();
  rank_zero.join();
  EXPECT_THAT(message, HasSubstr("Rank 1"));
}

// Rank 0 calls over the real backend, while rank 1 is only its slot, into which `write` puts what
// it likes; all synchronisations find it there. Returns rank 0's error.
constexpr int64_t kBytes = int64_t{4} << 20;

std::string caller_hears(
    const std::function<void(Group&)>& call,
    const std::function<void(RankSlot& slot, const ArenaLayout& layout)>& write) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  Meeting peer;
  std::thread rank_one([&] { peer = meet(*store, 1, 2, seconds(60)); });
  const auto group = shared_memory_group(store, 0, 2, {.timeout = seconds(60)});
  rank_one.join();
  auto& slot = peer.peers->own();
  write(slot, peer.mapping->layout());
  slot.started.store(1);
  slot.ticks.store(1000);
  return zero::message_of<CommError>([&] { call(*group); });
}

struct Lie {
  const char* name;
  Op op;
  std::function<void(CallRecord& record, const ArenaLayout& layout)> tell;
  const char* found;
};

class Caller : public ::testing::TestWithParam<Lie> {};

TEST_P(Caller, NamesThePeerWhosePlaceCannotBe) {
  const auto& lie = GetParam();
  const auto call = [&](Group& group) {
    const auto of = [&](int64_t bytes) {
      return group.empty(bytes / 4, at::kFloat, Category::gradients).zero_();
    };
    switch (lie.op) {
      case Op::all_gather:
        return group.all_gather(of(2 * kBytes), of(kBytes)).wait();
      case Op::reduce_scatter:
        return group.reduce_scatter(of(kBytes), of(2 * kBytes)).wait();
      case Op::all_reduce:
        return group.all_reduce(of(kBytes)).wait();
      case Op::broadcast:
        return group.broadcast(of(kBytes), 1).wait();
      case Op::all_to_all:
        return group.all_to_all(of(kBytes), of(kBytes)).wait();
      default:
        group.window(kBytes, 3, Category::parameters);
    }
  };
  const auto write = [&](RankSlot& slot, const ArenaLayout& layout) {
    CallRecord record;
    record.sequence = 1;
    record.op = lie.op;
    record.input_bytes = lie.op == Op::reduce_scatter ? 2 * kBytes : kBytes;
    record.output_bytes = lie.op == Op::all_gather ? 2 * kBytes : kBytes;
    record.input_dtype = record.output_dtype = static_cast<int8_t>(at::kFloat);
    record.root = lie.op == Op::broadcast ? 1 : 0;
    if (lie.op == Op::window) {
      record.output_bytes = 3;
      record.input_dtype = record.output_dtype = 0;
    }
    record.data_offset = layout.region_offset(1);
    record.output_offset = lie.op == Op::all_reduce ? record.data_offset : -1;
    lie.tell(record, layout);
    slot.calls[1].store(record);
  };
  EXPECT_THAT(caller_hears(call, write), AllOf(HasSubstr("Rank 1 has written"),
                                               HasSubstr(lie.found), HasSubstr(name(lie.op))));
}

void beyond_the_end(CallRecord& record, const ArenaLayout& layout) {
  record.data_offset = layout.total_bytes() - 64;
}

INSTANTIATE_TEST_SUITE_P(
    Places, Caller,
    ::testing::Values(
        Lie{"AllGather", Op::all_gather, beyond_the_end, "its input"},
        Lie{"ReduceScatter", Op::reduce_scatter, beyond_the_end, "its input"},
        Lie{"AllReduce", Op::all_reduce, beyond_the_end, "its input"},
        Lie{"Broadcast", Op::broadcast, beyond_the_end, "its input"},
        Lie{"AllToAll", Op::all_to_all, beyond_the_end, "its input"},
        Lie{"FarAway", Op::all_gather,
            [](auto& record, auto&) {
              record.data_offset = std::numeric_limits<int64_t>::max() - 8;
            },
            "its input"},
        Lie{"ControlRegion", Op::all_gather, [](auto& record, auto&) { record.data_offset = 0; },
            "its input"},
        Lie{"NoStaging", Op::all_gather, [](auto& record, auto&) { record.data_offset = -1; },
            "its staging buffer"},
        Lie{"StagingBeyondTheEnd", Op::all_gather,
            [](auto& record, const auto& layout) {
              record.data_offset = -1;
              record.staging_offset = layout.total_bytes() - 64;
            },
            "its staging buffer"},
        Lie{"NoOutput", Op::all_reduce, [](auto& record, auto&) { record.output_offset = -1; },
            "its output"},
        Lie{"OutputBeyondTheEnd", Op::reduce_scatter,
            [](auto& record, const auto& layout) {
              record.output_offset = layout.total_bytes() - 64;
            },
            "its output"},
        Lie{"WindowBeyondTheEnd", Op::window,
            [](auto& record, const auto& layout) { record.data_offset = layout.total_bytes(); },
            "its block of the window"},
        Lie{"WindowOfAnotherRank", Op::window,
            [](auto& record, const auto& layout) { record.data_offset = layout.region_offset(0); },
            "its block of the window"},
        Lie{"WindowOffThePage", Op::window,
            [](auto& record, const auto& layout) {
              record.data_offset = layout.region_offset(1) + 8;
            },
            "its block of the window"}),
    [](const auto& info) { return info.param.name; });

TEST(Caller, NamesAPeerWhosePiecesCannotBe) {
  const auto call = [](Group& group) {
    const auto output = group.empty(kBytes / 4, at::kFloat, Category::gradients);
    const auto input = group.empty(kBytes / 2, at::kFloat, Category::gradients).zero_();
    group.reduce_scatter(output, input).wait();
  };
  const auto write = [](RankSlot& slot, const ArenaLayout& layout) {
    CallRecord record;
    record.sequence = 1;
    record.op = Op::reduce_scatter;
    record.input_bytes = 2 * kBytes;
    record.output_bytes = kBytes;
    record.input_dtype = record.output_dtype = static_cast<int8_t>(at::kFloat);
    record.data_offset = layout.region_offset(1);
    record.output_offset = layout.region_offset(1) + 2 * kBytes;
    slot.calls[1].store(record);
    slot.claimed.store(-5'000'000'000);
  };
  EXPECT_THAT(caller_hears(call, write), HasSubstr("Rank 1 has written -5000000000 as the pieces"));
}

TEST(Caller, DescribesACallThatDoesNotExist) {
  const auto write = [](RankSlot& slot, const ArenaLayout&) {
    CallRecord record;
    record.sequence = 1;
    record.op = static_cast<Op>(200);
    record.input_dtype = 99;
    slot.calls[1].store(record);
  };
  EXPECT_THAT(caller_hears([](Group& group) { group.barrier(); }, write),
              HasSubstr("an unknown collective #1"));
}

TEST(Caller, BlamesTheRankThatBlamesNobodyThatExists) {
  const auto write = [](RankSlot& slot, const ArenaLayout&) {
    Failure failure;
    failure.origin = int64_t{1} << 40;
    failure.message = FixedText<2040>("the disk is full");
    slot.failure.store(failure);
    slot.state.store(static_cast<uint32_t>(RankState::failed));
  };
  const auto call = [](Group& group) {
    try {
      group.barrier();
    } catch (const PeerError& error) {
      EXPECT_EQ(error.origin(), 1);
      throw;
    }
  };
  EXPECT_THAT(caller_hears(call, write), HasSubstr("the disk is full"));
}

}  // namespace
}  // namespace zero::comm
