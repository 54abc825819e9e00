#include "tests/device/places.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <string_view>

namespace zero::simulated {

namespace {

struct Call {
  std::string function;  // without its arguments; empty where it is not known
  ptrdiff_t offset = 0;  // of the call in it
};

Call call_at(void* address) {
  Dl_info info{};
  char* const call = static_cast<char*>(address) - 1;  // it returns to what comes after
  if (dladdr(call, &info) == 0 || info.dli_sname == nullptr) return {};
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), &std::free);
  std::string name = status == 0 ? text.get() : info.dli_sname;
  constexpr std::string_view kUnnamed = "(anonymous namespace)";
  size_t end = name.find('(');
  while (end != std::string::npos && name.compare(end, kUnnamed.size(), kUnnamed) == 0)
    end = name.find('(', end + 1);
  return {name.substr(0, end), call - static_cast<char*>(info.dli_saddr)};
}

bool begins(const std::string& text, std::string_view with) { return text.rfind(with, 0) == 0; }

// The functions by which others let a stream wait.
bool is_means(const std::string& function) {
  constexpr std::array kMeans{"zero::StreamMark",   "zero::SideScope",       "zero::wait_for",
                              "zero::StreamMemory", "zero::PhasedReduction", "zero::comm::"};
  return std::any_of(kMeans.begin(), kMeans.end(),
                     [&](const char* with) { return begins(function, with); });
}

}  // namespace

std::vector<void*> calls_under_way() {
  std::vector<void*> calls(48);
  calls.resize(static_cast<size_t>(backtrace(calls.data(), static_cast<int>(calls.size()))));
  return calls;
}

std::string place_of(const std::vector<void*>& calls) {
  std::string by, in_libtorch;
  for (void* address : calls) {
    const Call call = call_at(address);
    if (begins(call.function, "zero::simulated::")) continue;
    if (in_libtorch.empty() && begins(call.function, "torch::")) in_libtorch = call.function;
    if (!begins(call.function, "zero::")) continue;
    if (is_means(call.function)) {
      if (by.empty()) by = " by " + call.function;
      continue;
    }
    if (!in_libtorch.empty() && by.empty()) break;  // a wait of LibTorch's own
    return call.function + " + " + std::to_string(call.offset) + by;
  }
  return in_libtorch.empty() ? "the test" : in_libtorch;
}

}  // namespace zero::simulated
