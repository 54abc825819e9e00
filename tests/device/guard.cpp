// Devices, streams, events and hooks, as LibTorch asks a backend for them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "tests/device/allocators.h"
#include "tests/device/machine.h"

namespace zero::simulated {

namespace {

Machine& machine() { return Machine::instance(); }
Mark& mark_of(void* event) { return *static_cast<Mark*>(event); }
int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

c10::Stream stream_of(Actor actor) { return stream(actor % kStreams, device_of(actor)); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(exchange_current_device(to.index()));
  }
  c10::Device getDevice() const override { return device(current_device()); }
  void setDevice(c10::Device to) const override { exchange_current_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    exchange_current_device(to.index());
  }

  c10::Stream getStream(c10::Device of) const override {
    return stream_of(current_actor(index_of(of)));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(0, index_of(of)); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool /*high_priority*/) const override {
    return getNewStream(of, 0);
  }
  // Streams are given in turns: there are a few, and two owners may get the same one, as elsewhere.
  c10::Stream getNewStream(c10::Device of, int /*priority*/) const override {
    static std::array<std::atomic<int>, kDevices> next{};
    const int index = index_of(of);
    return stream(1 + next[static_cast<size_t>(index)]++ % (kStreams - 1), index);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream_of(exchange_current_actor(actor_of(to)));
  }
  bool queryStream(const c10::Stream& of) const override { return machine().idle(actor_of(of)); }
  void synchronizeStream(const c10::Stream& of) const override {
    machine().host_wait_for_stream(actor_of(of), "stream", true);
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    machine().host_wait_for_device(index, "device");
  }

  void record(void** event, const c10::Stream& on, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Mark;
    mark_of(*event) = machine().record(actor_of(on));
  }
  void block(void* event, const c10::Stream& waits) const override {
    if (event != nullptr) machine().wait(actor_of(waits), mark_of(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || machine().query(mark_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) machine().host_wait(mark_of(event), "event", true);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    device_allocator().recordStream(data, on);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_current_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return device(machine().device_of_pointer(pointer));
  }
  // Its numbers are the CPU's, so that what is random can be compared with the CPU too.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::createCPUGenerator();
  }
  bool isPinnedPtr(const void* pointer) const override { return machine().pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = device_allocator().allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) device_allocator().copy_data(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Before the first backward pass of the process: autograd counts the devices then.
const Guard guard_implementation;
const c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::kPrivateUse1, &guard_implementation);
const bool registered = [] {
  c10::register_privateuse1_backend("simulated");
  c10::SetAllocator(c10::kPrivateUse1, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

}  // namespace zero::simulated
