// Memory that streams use in turn, on a device that fails. A GPU after a fault refuses each later
// call; the caller must learn of the fault, and not of what its own unwinding met.
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/device/memory.h"

namespace zero {
namespace {

constexpr auto kType = c10::DeviceType::FPGA;  // no backend of LibTorch's takes this type
const c10::Device kDevice(kType, 0);

c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

// Its streams can be marked. Waiting for a mark fails as soon as `failed`.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device /*to*/) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device /*to*/) const override {}
  void uncheckedSetDevice(c10::Device /*to*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*of*/) const override { return stream(0); }
  c10::Stream exchangeStream(c10::Stream /*to*/) const override { return stream(0); }
  void record(void** /*event*/, const c10::Stream& /*on*/, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {}
  void block(void* /*event*/, const c10::Stream& /*waits*/) const override {
    ++waits;
    TORCH_CHECK(!failed, "the device has failed");
  }

  mutable int waits = 0;
  bool failed = false;
};

class StreamMemoryOfADevice : public ::testing::Test {
 protected:
  StreamMemoryOfADevice() { c10::impl::device_guard_impl_registry[kIndex] = &guard_; }
  ~StreamMemoryOfADevice() override {
    c10::impl::device_guard_impl_registry[kIndex] = nullptr;
    // The memory that stayed taken is held once, by nobody.
    for (auto* kept : kept_) {
      if (kept != nullptr) c10::raw::intrusive_ptr::decref(kept);
    }
  }

  // Memory that a stream beside this thread's has used.
  StreamMemory used_memory(int number) {
    const auto index = static_cast<size_t>(number);
    auto tensor = at::from_blob(
        bytes_.data(), {4}, [this, index](void*) { kept_[index] = nullptr; }, at::kFloat);
    kept_[index] = tensor.unsafeGetTensorImpl();
    StreamMemory memory(std::move(tensor));
    memory.used(stream(1));
    return memory;
  }
  bool freed(int number) const { return kept_[static_cast<size_t>(number)] == nullptr; }

  static constexpr auto kIndex = static_cast<size_t>(kType);
  std::array<float, 4> bytes_{};
  std::array<c10::TensorImpl*, 2> kept_{};
  Guard guard_;
};

TEST_F(StreamMemoryOfADevice, IsFreedBehindItsLastUser) {
  { const auto memory = used_memory(0); }
  EXPECT_TRUE(freed(0));
  EXPECT_EQ(guard_.waits, 1);
}

TEST_F(StreamMemoryOfADevice, ThatFailsStaysTakenAndHidesNotTheFault) {
  std::string told;
  try {
    const auto memory = used_memory(0);
    guard_.failed = true;
    throw Error("the fault");
  } catch (const Error& error) {
    told = error.what();
  }
  EXPECT_EQ(told, "the fault");
  EXPECT_EQ(guard_.waits, 1);
  EXPECT_FALSE(freed(0));  // its user may not have ended
}

TEST_F(StreamMemoryOfADevice, ThatFailsStaysTakenWhereOtherMemoryTakesItsPlace) {
  auto memory = used_memory(0);
  guard_.failed = true;
  memory = used_memory(1);
  EXPECT_FALSE(freed(0));
  EXPECT_FALSE(freed(1));
  guard_.failed = false;
  memory = StreamMemory();
  EXPECT_FALSE(freed(0));
  EXPECT_TRUE(freed(1));
}

}  // namespace
}  // namespace zero
