#include "zero/base/host_memory.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"

namespace zero {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;

at::Tensor zeros(int64_t bytes, const std::shared_ptr<Ledger>& ledger, int64_t colour) {
  return host_zeros(bytes, at::kByte, ledger, Category::optimizer, colour);
}

// The array is the allocator's, as LibTorch's tensors are where it is installed.
at::Tensor allocated(int64_t numel) {
  auto memory = HostAllocator::instance().allocate(4 * static_cast<size_t>(numel));
  auto array = at::empty({0});
  array.storage().set_data_ptr_noswap(std::move(memory));
  array.storage().set_nbytes(4 * static_cast<size_t>(numel));
  return array.set_(array.storage(), 0, {numel}, {1});
}

TEST(HostMemory, OfAShortLifeIsChargedToTheLedgerAndNotToActivations) {
  const auto ledger = std::make_shared<Ledger>();
  const auto before = HostAllocator::instance().usage().used.current;
  for (const int64_t numel : {0, 5, 100'000}) {
    auto array = host_empty(numel, at::kBFloat16, ledger, Category::gradients);
    array.fill_(1);
    EXPECT_EQ(array.numel(), numel);
    EXPECT_EQ(ledger->usage(Category::gradients).current, 2 * numel);
    EXPECT_EQ(HostAllocator::instance().usage().used.current, before);
    const auto view = array.narrow(0, 0, numel / 2);
    array = at::Tensor();
    EXPECT_EQ(ledger->usage(Category::gradients).current, 2 * numel) << "a view holds the storage";
  }
  EXPECT_EQ(ledger->usage(Category::gradients).current, 0);
}

TEST(HostMemory, APartStaysInItsPlaceOrIsCopied) {
  const auto ledger = std::make_shared<Ledger>();
  constexpr int64_t kNumel = 300'000;
  constexpr int64_t kPart = 100'000;
  const auto expect_part = [&](at::Tensor array, int64_t begin, bool in_place) {
    array.copy_(at::arange(kNumel));
    const auto* place = array.const_data_ptr<float>() + begin;
    const auto expected = array.narrow(0, begin, kPart).clone();
    const auto before = HostAllocator::instance().usage().used.current;
    const auto bytes = in_place ? static_cast<int64_t>(array.nbytes()) / 4096 * 4096 : 0;
    const auto part = host_part(std::move(array), begin, kPart, ledger, Category::gradients);
    EXPECT_TRUE(at::equal(part, expected));
    EXPECT_EQ(part.const_data_ptr<float>() == place, in_place);
    EXPECT_EQ(ledger->usage(Category::gradients).current, 4 * kPart);
    EXPECT_LE(HostAllocator::instance().usage().used.current, before - bytes);
  };
  for (const int64_t begin : {int64_t{0}, kPart, 2 * kPart}) {
    expect_part(allocated(kNumel), begin, true);
    expect_part(at::from_blob(std::make_unique<float[]>(kNumel).release(), {kNumel},
                              [](void* data) { delete[] static_cast<float*>(data); }),
                begin, false);
  }
  EXPECT_EQ(ledger->usage(Category::gradients).current, 0);
}

TEST(HostMemory, OfAPartThatIsRefusedIsGivenBack) {
  const auto ledger = std::make_shared<Ledger>();
  const DeviceLimit limit(ledger, 100, {});
  const auto before = HostAllocator::instance().held().current;
  EXPECT_THROW(host_part(allocated(300'000), 0, 100'000, ledger, Category::gradients), OutOfMemory);
  EXPECT_EQ(HostAllocator::instance().held().current, before);
  EXPECT_EQ(ledger->total().current, 0);
}

TEST(HostPages, BeginOnAPageAndHaveRoomForWholeOnes) {
  const auto ledger = std::make_shared<Ledger>();
  const auto before = HostAllocator::instance().usage().used.current;
  for (const int64_t bytes : {int64_t{1}, kPage - 1, int64_t{70'001}, kHugePage + 5}) {
    const auto array = host_pages(bytes, ledger, Category::gathered_units);
    EXPECT_EQ(array.numel(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(array.data_ptr()) % kPage, 0U);
    EXPECT_EQ(ledger->usage(Category::gathered_units).current, bytes);
    EXPECT_EQ(HostAllocator::instance().usage().used.current, before) << "the ledger has it";
    std::memset(array.data_ptr(), 1, static_cast<size_t>((bytes + kPage - 1) / kPage * kPage));
  }
  EXPECT_EQ(ledger->usage(Category::gathered_units).current, 0);
}

TEST(HostZeros, OfDifferentColoursBeginOnDifferentPagesOfHugeOnes) {
  auto ledger = std::make_shared<Ledger>();
  {
    std::vector<at::Tensor> arrays;
    std::set<uintptr_t> offsets;
    for (const int64_t colour : {0, 1, 2, 3}) {
      auto& array = arrays.emplace_back(zeros(kHugePage + 5, ledger, colour));
      const auto address = reinterpret_cast<uintptr_t>(array.data_ptr());
      EXPECT_EQ(address % kPage, 0U) << colour;
      offsets.insert(address % kHugePage);
      EXPECT_EQ(array.numel(), kHugePage + 5);
      EXPECT_FALSE(array.any().item<bool>()) << colour;
      array.fill_(1);  // all of it is there
    }
    EXPECT_EQ(offsets.size(), 4U);
    EXPECT_TRUE(offsets.contains(0)) << "that of colour 0";
    EXPECT_EQ(ledger->total().current, 4 * (kHugePage + 5)) << "a colour is no memory";
  }
  EXPECT_EQ(ledger->total().current, 0);
}

TEST(HostZeros, ThatAreSmallHaveAPageOfTheirOwn) {
  const auto array = zeros(3, std::make_shared<Ledger>(), 2);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(array.data_ptr()) % kPage, 0U);
  EXPECT_FALSE(array.any().item<bool>());
}

}  // namespace
}  // namespace zero
