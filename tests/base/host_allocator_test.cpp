#include "zero/base/host_allocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/sysinfo.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/host_space.h"

namespace zero {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

/// Each test starts with nothing cached and its peaks at the current values.
class HostAllocatorTest : public testing::Test {
 protected:
  void SetUp() override {
    allocator.trim();
    allocator.reset_peaks();
    start = allocator.usage();
  }
  int64_t used() const { return allocator.usage().used.current - start.used.current; }
  int64_t reserved() const { return allocator.usage().reserved.current - start.reserved.current; }
  int64_t requests() const { return allocator.usage().system_requests - start.system_requests; }

  HostAllocator& allocator = HostAllocator::instance();
  HostMemory start;
};

TEST_F(HostAllocatorTest, AlignsBlocksToCacheLinesAndPages) {
  std::vector<c10::DataPtr> blocks;
  for (const size_t bytes : {size_t{1}, size_t{63}, size_t{1000}, size_t{65535}, size_t{65536},
                             size_t{100000}, kMiB, 2 * kMiB, 2 * kMiB + 1, 7 * kMiB}) {
    blocks.push_back(allocator.allocate(bytes));
    void* data = blocks.back().get();
    std::memset(data, 0xAB, bytes);
    const size_t alignment = bytes >= 65536 ? 4096 : 64;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % alignment, 0) << bytes;
    EXPECT_TRUE(allocator.is_simple_data_ptr(blocks.back()));
  }
}

TEST_F(HostAllocatorTest, GivesAFreedBlockOutAgainWithoutAskingTheSystem) {
  void* first = nullptr;
  {
    const auto block = allocator.allocate(5 * kMiB);
    first = block.get();
  }
  EXPECT_EQ(requests(), 1);
  for (int i = 0; i < 10; ++i) {
    const auto block = allocator.allocate(5 * kMiB - static_cast<size_t>(i) * 1000);
    EXPECT_EQ(block.get(), first);
  }
  EXPECT_EQ(requests(), 1);
}

TEST_F(HostAllocatorTest, CountsUsedAndReservedBytesAndTheirPeaks) {
  const auto size = static_cast<int64_t>(4 * kMiB);
  {
    const auto a = allocator.allocate(4 * kMiB);
    const auto b = allocator.allocate(4 * kMiB - 5);
    const auto small = allocator.allocate(1000);
    EXPECT_GE(used(), 2 * size + 1000);
    EXPECT_LE(used(), 2 * size + 1200);
    EXPECT_GE(reserved(), used());
    EXPECT_LE(reserved(), used() + size) << "whole huge pages";
  }
  EXPECT_EQ(used(), 0);
  EXPECT_GE(reserved(), 2 * size) << "two blocks stay";
  EXPECT_GE(allocator.usage().used.peak - start.used.current, 2 * size + 1000);
  allocator.reset_peaks();
  EXPECT_EQ(allocator.usage().used.peak, start.used.current);
  allocator.trim();
  EXPECT_EQ(reserved(), 0);
  EXPECT_GE(allocator.usage().reserved.peak - start.reserved.current, 2 * size);
}

TEST_F(HostAllocatorTest, KeepsReservedMemoryNearThePeakWhenSizesComeAndGo) {
  std::mt19937 random(7);
  std::vector<c10::DataPtr> held(20);
  for (size_t i = 0; i < 2000; ++i) {
    held[random() % held.size()] = allocator.allocate(1 + random() % (10 * kMiB));
    const auto now = allocator.usage();
    ASSERT_LE(now.reserved.current - start.reserved.current,
              now.used.peak / 8 * 9 + static_cast<int64_t>(40 * kMiB))
        << i;
  }
}

TEST_F(HostAllocatorTest, RepeatedStepsAskTheSystemForNothing) {
  const auto step = [&] {
    std::mt19937 random(11);
    std::vector<c10::DataPtr> held(30);
    for (int i = 0; i < 300; ++i)
      held[random() % held.size()] = allocator.allocate(kMiB + random() % (6 * kMiB));
  };
  step();
  step();
  const auto before = requests();
  for (int i = 0; i < 20; ++i) step();
  EXPECT_EQ(requests(), before);
}

// A large block finds free memory in pieces, and none of it stays resident beside the block.
TEST_F(HostAllocatorTest, HolesDoNotKeepALargeBlockOut) {
  std::vector<c10::DataPtr> blocks;
  for (int i = 0; i < 64; ++i) {
    blocks.push_back(allocator.allocate(4 * kMiB));
    std::memset(blocks.back().get(), 1, 4 * kMiB);
  }
  for (size_t i = 0; i < blocks.size(); i += 2) blocks[i] = c10::DataPtr();
  EXPECT_EQ(used(), static_cast<int64_t>(128 * kMiB));
  const auto large = allocator.allocate(120 * kMiB);
  std::memset(large.get(), 2, 120 * kMiB);
  EXPECT_LE(reserved(), allocator.usage().used.peak / 8 * 9 + static_cast<int64_t>(36 * kMiB));
  for (size_t i = 1; i < blocks.size(); i += 2)
    EXPECT_EQ(static_cast<const char*>(blocks[i].get())[4 * kMiB - 1], 1);
}

TEST_F(HostAllocatorTest, CountsChargedBlocksInWhatIsReservedAlone) {
  for (const size_t bytes : {size_t{1000}, 4 * kMiB}) {
    allocator.trim();
    void* data = allocator.take_charged(bytes);
    std::memset(data, 1, bytes);
    EXPECT_EQ(used(), 0);
    EXPECT_GE(reserved(), static_cast<int64_t>(bytes));
    allocator.give_charged(data);
    EXPECT_EQ(used(), 0);
    allocator.trim();
    EXPECT_EQ(reserved(), 0);
  }
  // The allocator may keep as much resident as is used and charged together.
  allocator.reset_peaks();
  void* charged = allocator.take_charged(512 * kMiB);
  allocator.give_charged(charged);
  const auto before = requests();
  const auto block = allocator.allocate(512 * kMiB);
  EXPECT_EQ(requests(), before) << "it is kept for the next";
}

// Blocks come and go as in backward: activations go one by one, in the order opposite to that in
// which they came, while gradients that need other sizes come and stay.
TEST_F(HostAllocatorTest, LastingBlocksLeaveNoHolesBetweenThoseThatGo) {
  constexpr size_t kLayers = 32;
  const auto step = [&] {
    std::vector<c10::DataPtr> activations;
    for (size_t i = 0; i < kLayers; ++i) activations.push_back(allocator.allocate(9 * kMiB));
    activations.push_back(allocator.allocate(5 * kLayers * kMiB));  // logits
    std::vector<void*> gradients;
    while (!activations.empty()) {
      activations.pop_back();
      if (activations.empty()) break;
      for (const size_t size : {6 * kMiB, 7 * kMiB}) {
        const auto temporary = allocator.allocate(kMiB);
        gradients.push_back(allocator.take_charged(size));
      }
    }
    for (void* gradient : gradients) allocator.give_charged(gradient);
  };
  for (int i = 0; i < 3; ++i) step();
  EXPECT_LE(allocator.usage().reserved.peak - start.reserved.current,
            static_cast<int64_t>(14 * kLayers * kMiB + 2 * HostSpace::kHugePage));
  const auto before = requests();
  step();
  EXPECT_EQ(requests(), before);
}

TEST_F(HostAllocatorTest, KeepsAPartOfABlockAndGivesBackTheRest) {
  constexpr size_t kPage = 4096;
  const size_t whole = 40 * kMiB;
  struct Part {
    size_t begin, end;
  };
  for (const auto [begin, end] : {Part{0, 10 * kMiB}, Part{10 * kMiB + 192, 20 * kMiB + 64},
                                  Part{30 * kMiB, whole}, Part{5, whole - 5}, Part{64, 128}}) {
    auto block = allocator.allocate(whole);
    auto* const data = static_cast<unsigned char*>(block.get());
    std::memset(data, 3, whole);
    void* const kept = allocator.keep_charged(block, begin, end);
    EXPECT_EQ(block.get(), nullptr);
    EXPECT_EQ(kept, data + begin / kPage * kPage);
    EXPECT_EQ(used(), 0);
    // Others get the rest of the memory, and what is kept stays.
    std::vector<c10::DataPtr> others;
    const auto before = requests();
    for (const size_t rest : {begin / kPage * kPage, whole - (end + kPage - 1) / kPage * kPage}) {
      if (rest < 64 * kPage) continue;
      others.push_back(allocator.allocate(rest));
      std::memset(others.back().get(), 4, rest);
    }
    EXPECT_EQ(requests(), before);
    EXPECT_TRUE(std::all_of(data + begin, data + end, [](unsigned char c) { return c == 3; }));
    others.clear();
    allocator.give_charged(kept);
    EXPECT_EQ(allocator.allocate(whole).get(), data) << "in one piece again";
  }
}

TEST_F(HostAllocatorTest, KeepsNoPartOfWhatIsNotItsOwn) {
  auto small = allocator.allocate(1000);
  EXPECT_EQ(allocator.keep_charged(small, 0, 100), nullptr);
  EXPECT_NE(small.get(), nullptr);
  std::vector<char> memory(100000);
  c10::DataPtr foreign(memory.data(), c10::kCPU);
  EXPECT_EQ(allocator.keep_charged(foreign, 0, 100), nullptr);
  EXPECT_EQ(foreign.get(), memory.data());
}

TEST_F(HostAllocatorTest, RefusesMoreThanTheMachineHas) {
  struct sysinfo info {};
  ASSERT_EQ(sysinfo(&info), 0);
  const size_t machine = (info.totalram + info.totalswap) * info.mem_unit;
  const auto half = allocator.allocate(machine / 2);  // nobody touches it
  EXPECT_THROW(allocator.allocate(machine / 2 + kMiB), OutOfMemory);
  EXPECT_NO_THROW(allocator.allocate(machine / 4));
}

TEST_F(HostAllocatorTest, NamesTheBytesThatTheSystemRefused) {
  for (const size_t power : {48, 60, 63}) {
    EXPECT_THAT([&] { allocator.allocate((size_t{1} << power) + 5); },
                testing::ThrowsMessage<OutOfMemory>(
                    testing::HasSubstr(std::to_string((size_t{1} << power) + 5))));
  }
  EXPECT_EQ(used(), 0);
}

TEST_F(HostAllocatorTest, KeepsThreadsApart) {
  std::atomic<int> torn{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 generator(seed);
      std::vector<std::pair<c10::DataPtr, size_t>> mine;
      for (int i = 0; i < 2000; ++i) {
        if (mine.size() > 8 || (!mine.empty() && generator() % 2 == 0)) {
          const auto victim = mine.begin() + static_cast<int64_t>(generator() % mine.size());
          const auto* bytes = static_cast<const unsigned char*>(victim->first.get());
          if (bytes[0] != seed || bytes[victim->second - 1] != seed) ++torn;
          mine.erase(victim);
        } else {
          const size_t size = size_t{1} << (6 + generator() % 13);
          mine.emplace_back(allocator.allocate(size), size);
          auto* bytes = static_cast<unsigned char*>(mine.back().first.get());
          bytes[0] = bytes[size - 1] = static_cast<unsigned char>(seed);
        }
        if (i % 500 == 0) allocator.trim();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(used(), 0);
}

TEST_F(HostAllocatorTest, ServesRawAllocations) {
  for (const size_t bytes : {size_t{100}, 3 * kMiB}) {
    void* data = allocator.raw_allocate(bytes);
    std::memset(data, 1, bytes);
    allocator.raw_deallocate(data);
  }
  EXPECT_EQ(used(), 0);
}

TEST_F(HostAllocatorTest, ServesLibTorchAndLeavesOlderTensorsAlone) {
  auto older = torch::ones({1 << 20});
  install_host_allocator();
  install_host_allocator();
  const auto empty = torch::empty({0});
  auto newer = torch::ones({1 << 20});
  EXPECT_EQ(used(), int64_t{4} << 20);
  EXPECT_EQ((older + newer).sum().item<float>(), float{2 << 20});
  older.resize_({1 << 21});
  EXPECT_EQ(older[5].item<float>(), 1);
  EXPECT_EQ(used(), int64_t{4} << 20) << "a tensor is resized by the allocator that made it";
  older = newer = torch::Tensor();
}

#if defined(__SANITIZE_ADDRESS__)
TEST_F(HostAllocatorTest, LetsAddressSanitizerFindUseAfterFreeAndOverflow) {
  EXPECT_DEATH(
      {
        auto block = allocator.allocate(kMiB);
        auto* data = static_cast<volatile char*>(block.get());
        block = c10::DataPtr();
        data[5] = 1;
      },
      "AddressSanitizer: use-after-poison");
  EXPECT_DEATH(
      {
        const auto block = allocator.allocate(kMiB + 8);
        static_cast<volatile char*>(block.get())[kMiB + 8] = 1;
      },
      "AddressSanitizer: use-after-poison");
}
#endif

}  // namespace
}  // namespace zero
