#include "zero/base/device_limit.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"

namespace zero {

namespace {

thread_local int host_scopes = 0;

std::string text(int64_t bytes) { return format_bytes(static_cast<double>(bytes)); }

}  // namespace

HostScope::HostScope() { ++host_scopes; }
HostScope::~HostScope() { --host_scopes; }
bool HostScope::active() { return host_scopes > 0; }

DeviceLimit::DeviceLimit(std::shared_ptr<Ledger> ledger, int64_t bytes,
                         std::vector<CheaperChoice> choices)
    : ledger_(std::move(ledger)), bytes_(bytes), choices_(std::move(choices)) {
  ledger_->add_limit(this);
}

DeviceLimit::~DeviceLimit() {
  HostAllocator::instance().remove_limit(this);
  ledger_->remove_limit(this);
}

void DeviceLimit::include_tensors() {
  tensors_ = true;
  HostAllocator::instance().add_limit(this);
}

int64_t DeviceLimit::held() const {
  return ledger_->device().current + (tensors_ ? HostAllocator::instance().used() : 0);
}

std::unique_lock<std::mutex> DeviceLimit::admit(int64_t request, std::string_view what) {
  std::unique_lock lock(mutex_);
  if (!HostScope::active() && held() + request > bytes_) throw OutOfMemory(refusal(request, what));
  return lock;
}

std::string DeviceLimit::advice(int64_t excess) const {
  const auto enough = std::find_if(choices_.begin(), choices_.end(),
                                   [&](const auto& choice) { return choice.bytes >= excess; });
  if (enough != choices_.end())
    return fmt::format("The next cheaper choice: {}, which frees about {}.", enough->what,
                       text(enough->bytes));
  const std::string activations =
      "a smaller micro-batch, shorter sequences or recomputation (activation_checkpointing.every, "
      "--recompute 1) lower the activations";
  if (choices_.empty())
    return fmt::format("All states are off the device already; {}.", activations);
  return fmt::format("Moving states is not enough ({} frees about {}); {}.", choices_.back().what,
                     text(choices_.back().bytes), activations);
}

std::string DeviceLimit::refusal(int64_t request, std::string_view what) const {
  std::string table;
  const auto row = [&](std::string_view category, int64_t bytes) {
    if (bytes > 0)
      table += fmt::format("{}{} {}", table.empty() ? "" : ", ", category, text(bytes));
  };
  for (size_t i = 0; i < kCategories; ++i) {
    const auto category = static_cast<Category>(i);
    if (!on_host(category)) row(name(category), ledger_->usage(category).current);
  }
  if (tensors_) row(name(Category::activations), HostAllocator::instance().used());
  const int64_t now = held();
  return fmt::format(
      "The device has no room for {} ({} bytes) of {}: of its {} (device_memory) {} are held ({}). "
      "{}",
      text(request), request, what, text(bytes_), text(now), table, advice(now + request - bytes_));
}

}  // namespace zero
