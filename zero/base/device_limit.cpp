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
                         std::vector<CheaperChoice> choices, std::function<Usage()> allocated)
    : ledger_(std::move(ledger)),
      bytes_(bytes),
      choices_(std::move(choices)),
      allocated_(std::move(allocated)) {
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
  if (allocated_) return allocated_().current;
  return ledger_->device().current + (tensors_ ? HostAllocator::instance().used() : 0);
}

std::unique_lock<std::mutex> DeviceLimit::admit(int64_t request, std::string_view what) {
  std::unique_lock lock(mutex_);
  if (!allocated_ && !HostScope::active() && held() + request > bytes_)
    throw OutOfMemory(refusal(request, what));
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
    const bool staging = allocated_ && category == Category::communication;
    if (!on_host(category) && !staging) row(name(category), ledger_->usage(category).current);
  }
  const int64_t now = allocated_ && request == 0 ? allocated_().peak : held();
  if (allocated_) {
    row(name(Category::activations), now - ledger_->own_memory());
  } else if (tensors_) {
    row(name(Category::activations), HostAllocator::instance().used());
  }
  const auto asked = request > 0 ? fmt::format("{} ({} bytes) of {}", text(request), request, what)
                                 : std::string(what);
  return fmt::format("The device has no room for {}: of its {}{} {} are held ({}). {}", asked,
                     text(bytes_), allocated_ ? "" : " (device_memory)", text(now), table,
                     advice(std::max<int64_t>(1, now + request - bytes_)));
}

}  // namespace zero
