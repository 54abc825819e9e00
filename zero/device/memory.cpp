#include "zero/device/memory.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <exception>
#include <utility>

#if __has_include(<torch/headeronly/version.h>)
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/host_memory.h"
#include "zero/device/stream.h"

namespace zero {

namespace {

// Memory of LibTorch's allocators, with a charge.
at::Tensor charged(int64_t numel, const at::TensorOptions& options, std::shared_ptr<Ledger> ledger,
                   Category category) {
  const int64_t bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  at::Tensor memory;
  try {
    memory = at::empty({numel}, options);
  } catch (const c10::OutOfMemoryError& error) {
    auto why = on_host(category) ? "" : ledger->refusal(bytes, name(category));
    if (why.empty()) {
      why = fmt::format("{} has no {} left for {}: {}", options.device().str(),
                        format_bytes(static_cast<double>(bytes)), name(category),
                        error.what_without_backtrace());
    }
    throw OutOfMemory(why);
  }
  auto charge = std::make_shared<Charge>(std::move(ledger), category, bytes);
  void* data = memory.mutable_data_ptr();
  return at::from_blob(
      data, {numel}, [memory = std::move(memory), charge = std::move(charge)](void*) {}, options,
      options.device());
}

// LibTorch 2.9 was the first whose allocators of devices have one interface.
#if __has_include(<torch/headeronly/version.h>)
c10::DeviceAllocator* allocator_of(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  return dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
}
#endif

}  // namespace

at::Tensor device_empty(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category) {
  if (!is_asynchronous(device)) return host_empty(numel, dtype, std::move(ledger), category);
  return charged(numel, at::TensorOptions(dtype).device(device), std::move(ledger), category);
}

at::Tensor device_zeros(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category, int64_t colour) {
  if (!is_asynchronous(device))
    return host_zeros(numel, dtype, std::move(ledger), category, colour);
  return device_empty(numel, dtype, device, std::move(ledger), category).zero_();
}

at::Tensor pinned_zeros(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category, int64_t colour) {
  if (!is_asynchronous(device))
    return host_zeros(numel, dtype, std::move(ledger), category, colour);
  return charged(numel, at::TensorOptions(dtype).pinned_memory(true), std::move(ledger), category)
      .zero_();
}

DeviceMemory device_memory(c10::Device device) {
  DeviceMemory memory;
#if __has_include(<torch/headeronly/version.h>)
  auto* const allocator = allocator_of(device);
  if (allocator == nullptr) return memory;
  if (!allocator->initialized()) at::globalContext().lazyInitDevice(device.type());
  const auto index = device.has_index() ? device.index() : current_stream(device)->device_index();
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator->getDeviceStats(index);
  memory.tensors = {stats.allocated_bytes[kAll].current, stats.allocated_bytes[kAll].peak};
  memory.reserved = stats.reserved_bytes[kAll].current;
  const auto ask = [&](auto& of) {  // allocators know it since LibTorch 2.10
    if constexpr (requires { of.getMemoryInfo(index); }) {
      const auto [free, total] = of.getMemoryInfo(index);
      memory.free = static_cast<int64_t>(free);
      memory.total = static_cast<int64_t>(total);
    }
  };
  try {
    ask(*allocator);
  } catch (const c10::NotImplementedError&) {  // stays unknown
  }
#endif
  return memory;
}

Usage other_tensors(c10::Device device, const Ledger& ledger) {
  if (!is_asynchronous(device)) return HostAllocator::instance().usage().used;
  const auto all = device_memory(device).tensors;
  const int64_t counted = ledger.own_memory();
  return {std::max<int64_t>(0, all.current - counted), std::max<int64_t>(0, all.peak - counted)};
}

void reset_peak_memory(c10::Device device) {
  if (!is_asynchronous(device)) return HostAllocator::instance().reset_peaks();
#if __has_include(<torch/headeronly/version.h>)
  auto* const allocator = allocator_of(device);
  if (allocator != nullptr && allocator->initialized()) allocator->resetPeakStats(device.index());
#endif
}

StreamMemory::StreamMemory(at::Tensor memory)
    : memory_(std::move(memory)), home_(current_stream(memory_.device())) {}

StreamMemory& StreamMemory::operator=(StreamMemory&& other) noexcept {
  release();
  memory_ = std::move(other.memory_);
  home_ = other.home_;
  last_uses_ = std::move(other.last_uses_);
  return *this;
}

StreamMemory::~StreamMemory() { release(); }

void StreamMemory::used() {
  if (memory_.defined()) last_uses_.record(memory_.device());
}

void StreamMemory::release() noexcept {
  if (!memory_.defined()) return;
  try {
    const StreamScope on(home_);
    last_uses_.wait();
    memory_ = at::Tensor();
  } catch (const std::exception&) {
    // The device has failed, and the caller most likely unwinds for that. The memory stays taken,
    // since its last users may not have ended.
    (void)memory_.unsafeReleaseTensorImpl();
  }
}

at::Tensor tensor_at(void* data, int64_t numel, at::ScalarType dtype, c10::Device device) {
  return at::from_blob(
      data, {numel}, [](void*) {}, at::TensorOptions(dtype).device(device), device);
}

}  // namespace zero
