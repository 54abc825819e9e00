// The machine itself: that work is asynchronous, that it repeats by its seed, what memory and the
// host's waits do, and what misuse says.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/device/testing.h"
#include "tests/support/message_of.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using testing::HasSubstr;

Tensor ones(int64_t numel, int index = 0) {
  return torch::ones({numel}, torch::TensorOptions().device(device(index)));
}

// Stream 0 computes x in several kernels; stream 1 reads it. Returns whether the answer is right.
bool two_streams(bool wait) {
  const auto x = torch::zeros({1000}, torch::TensorOptions().device(device()));
  synchronize();
  for (int i = 0; i < 5; ++i) x.add_(1);
  if (wait) {
    c10::Event done(c10::kPrivateUse1);
    done.record(stream(0));
    done.block(stream(1));
  }
  Tensor y;
  {
    const c10::StreamGuard guard(stream(1));
    y = x * 2;
  }
  synchronize();
  return y.cpu().eq(10).all().item<bool>();
}

// As memory of the C library does that one rank gives back and another gets.
TEST(Machine, HostMemoryThatIsFreeMayBeAnotherHosts) {
  configure({});
  std::vector<float> memory(8);
  for (int index = 0; index < 2; ++index) {
    std::thread host([&memory, index] {
      const c10::DeviceGuard guard(device(index));
      const auto x = ones(8, index);
      torch::from_blob(memory.data(), {8}).copy_(x);
      torch::zeros({8}, torch::TensorOptions().pinned_memory(true)).copy_(x);
    });
    host.join();
  }
  EXPECT_EQ(reports(), "");
}

TEST(Machine, WhatDoesNotWaitIsWrongSooner) {
  for (const auto executor : {Executor::threads, Executor::seeded}) {
    int right = 0;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      configure({.executor = executor, .seed = seed, .delay = std::chrono::microseconds(500)});
      right += two_streams(false) ? 1 : 0;
      EXPECT_NE(reports(), "");
      EXPECT_TRUE(two_streams(true));
      EXPECT_EQ(reports(), "");
    }
    EXPECT_LT(right, 20);
  }
}

TEST(Machine, ASeedRepeatsItsOrder) {
  const auto sample = [](uint64_t seed) {
    configure({.executor = Executor::seeded, .seed = seed});
    return two_streams(false);
  };
  for (uint64_t seed = 0; seed < 20; ++seed) EXPECT_EQ(sample(seed), sample(seed));
}

TEST(Machine, NothingRunsBeforeAHostWaits) {
  configure({.executor = Executor::seeded});
  bool ran = false;
  launch("kernel", {}, [&] { ran = true; });
  EXPECT_FALSE(ran);
  stream(0).synchronize();
  EXPECT_TRUE(ran);
}

TEST(Machine, WaitsOfTheHostAreCountedByCause) {
  configure({});
  const auto pinned = torch::ones({8}, torch::TensorOptions().pinned_memory(true));
  const auto x = pinned.to(device(), /*non_blocking=*/true);
  c10::Event event(c10::kPrivateUse1);
  event.record(stream(0));
  EXPECT_EQ(counts().host_waits, 0);
  event.synchronize();
  stream(0).synchronize();
  EXPECT_EQ(x.sum().item<float>(), 8);
  const auto on_host = x.cpu();
  const auto nonzero = x.nonzero();
  const auto seen = counts().host_waits_by_cause;
  EXPECT_EQ(seen.at("event"), 1);
  EXPECT_EQ(seen.at("stream"), 1);
  EXPECT_EQ(seen.at("aten::_local_scalar_dense"), 1);
  EXPECT_EQ(seen.at("copy to the host"), 1);
  EXPECT_EQ(seen.at("aten::nonzero"), 1);
  EXPECT_EQ(counts().host_waits, 5);
  EXPECT_EQ(counts().own_waits_by_host[0], 2);
}

TEST(Machine, AHostWaitThatIsLeftOutIsReported) {
  const auto left_out = leave_out_each_host_wait(
      [] {
        const auto pinned = torch::zeros({8}, torch::TensorOptions().pinned_memory(true));
        {
          const auto x = ones(8);
          pinned.copy_(x, /*non_blocking=*/true);
          stream(0).synchronize();
          host_access("read", {pinned.data_ptr(), pinned.nbytes(), false});
        }
        const bool right = pinned.eq(1).all().item<bool>();
        synchronize();
        return right;
      },
      2);
  EXPECT_EQ(left_out.waits, 1);
  EXPECT_EQ(left_out.wrong_reported, 1);
}

TEST(Machine, AReportSaysWhatIsMissing) {
  configure({});
  const auto x = ones(100);
  synchronize();
  x.add_(1);
  {
    const c10::StreamGuard guard(stream(2));
    const auto y = x.narrow(0, 10, 10) * 2;
  }
  synchronize();
  const auto said = take_reports();
  ASSERT_EQ(said.size(), 1U);
  EXPECT_THAT(said[0], HasSubstr("race on 40 bytes, bytes 40 to 80 of a block of 512 (allocated on "
                                 "stream 0 of device 0): the read by aten::mul.out"));
  EXPECT_THAT(said[0], HasSubstr("(stream 2 of device 0, its task 1"));
  EXPECT_THAT(said[0], HasSubstr("is not ordered after the write by aten::add.out"));
  EXPECT_THAT(said[0], HasSubstr("Missing: stream 2 of device 0 has to wait for an event recorded "
                                 "on stream 0 of device 0 after its task "));
}

TEST(Machine, ColumnsOfAMatrixAreApart) {
  for (const int64_t first : {3, 4, 5}) {  // the side stream's column; the main stream has 0 to 3
    configure({});
    const auto x = ones(8 * 10).view({10, 8});
    synchronize();
    x.narrow(1, 0, 4).mul_(2);
    {
      const c10::StreamGuard guard(stream(1));
      x.narrow(1, first, 3).mul_(3);
    }
    EXPECT_EQ(reports().empty(), first >= 4) << "from column " << first;
    synchronize();
  }
}

TEST(Machine, FreedMemoryIsPoisoned) {
  configure({});
  auto x = ones(1024);
  const auto alias = at::from_blob(x.data_ptr(), {1024}, torch::TensorOptions().device(device()));
  x = Tensor();
  EXPECT_TRUE(alias.isnan().all().item<bool>());
  EXPECT_THAT(reports(), HasSubstr("memory that is not allocated: aten::isnan"));
  const auto fresh = torch::empty({2000}, torch::TensorOptions().device(device()));
  EXPECT_TRUE(fresh.isnan().all().item<bool>());
}

TEST(Machine, MemoryEnds) {
  configure({.memory_bytes = size_t{1} << 20U});
  auto& allocator = *dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::kPrivateUse1));
  allocator.emptyCache();
  allocator.resetPeakStats(0);
  const auto allocated = [&] { return allocator.getDeviceStats(0).allocated_bytes[0]; };
  const auto before = allocated().current;
  {
    const auto x = ones(1024);
    EXPECT_EQ(allocated().current - before, 4096);
    EXPECT_THAT(message_of<c10::OutOfMemoryError>([] { ones(1 << 18); }),
                HasSubstr("out of memory. Tried to allocate 1048576 bytes; device 0 has 1048576"));
  }
  EXPECT_EQ(allocated().current, before);
  EXPECT_EQ(allocated().peak - before, 4096);
  configure({});
}

TEST(Machine, AFailureOfATaskLeavesTheNextWait) {
  for (const Options& options : schedules(1)) {
    configure(options);
    launch("kernel", {}, [] { throw std::runtime_error("broken"); });
    EXPECT_THAT(message_of<c10::Error>([] { stream(0).synchronize(); }),
                HasSubstr("a task failed. kernel: broken"));
    synchronize();
  }
  // An index out of range, which a device finds out late too.
  const auto rows = ones(8).view({4, 2});
  const auto index = torch::tensor({7}).to(device());
  const auto picked = rows.index_select(0, index);
  EXPECT_THAT(message_of<c10::Error>([] { stream(0).synchronize(); }), HasSubstr("index_select"));
}

TEST(Machine, TensorsOfTheHostAreRefusedAsOnAGpu) {
  configure({});
  const auto x = ones(9).view({3, 3});
  EXPECT_THAT(message_of<c10::Error>([&] {
                x.mm(torch::ones({3, 3}));
              }),
              HasSubstr("aten::mm.out is given a tensor of the host of sizes [3, 3]"));
  EXPECT_EQ(x.add(torch::tensor(2.0F)).sum().item<float>(), 27);  // a number is none
}

TEST(Machine, DevicesAreApart) {
  configure({});
  const auto x = ones(9, 0).view({3, 3}), y = ones(9, 1).view({3, 3});
  EXPECT_EQ(y.device(), device(1));
  EXPECT_EQ((y + y).device(), device(1));
  EXPECT_THAT(message_of<c10::Error>([&] { x.mm(y); }),
              HasSubstr("tensors of the devices 0 and 1"));
  const auto moved = (x * 3).to(device(1));
  EXPECT_TRUE(at::equal(moved.cpu(), torch::full({3, 3}, 3.0)));
  const c10::DeviceGuard guard(device(2));
  EXPECT_EQ(torch::ones({2}, torch::TensorOptions().device(c10::kPrivateUse1)).device(), device(2));
  synchronize();
  EXPECT_EQ(reports(), "");
}

// A host of one device does not know what another has waited for, but a thread that changes its
// device does.
TEST(Machine, HostsAreApart) {
  const auto add = [](const Tensor& x) {
    const c10::StreamGuard side(stream(1));
    const c10::DeviceGuard other_host(device(1));
    x.add_(1);
  };
  for (const bool met : {true, false}) {
    configure({});
    const auto x = ones(8);
    synchronize();
    x.add_(1);
    stream(0).synchronize();
    if (met) hosts_met();
    std::thread([&] {
      const c10::impl::VirtualGuardImpl guard(c10::kPrivateUse1);
      guard.setDevice(device(1));
      launch("read", {{x.const_data_ptr(), x.nbytes(), false}}, [] {});
    }).join();
    EXPECT_EQ(reports().empty(), met);
    synchronize();
  }
  const auto x = ones(8);
  stream(0).synchronize();
  add(x);
  EXPECT_EQ(reports(), "");
  synchronize();
}

TEST(MachineDeathTest, AnAccessOfTheHostFaults) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  configure({});
  const auto x = ones(8);
  synchronize();
  EXPECT_DEATH(
      {
        const volatile float* bytes = x.data_ptr<float>();
        static_cast<void>(bytes[0]);
      },
      "the host touched memory of a device");
}

}  // namespace
}  // namespace zero::simulated
