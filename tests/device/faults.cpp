// Says what it means that the host touched memory of a device, before the process ends by it.
#include <unistd.h>

#include <csignal>
#include <string_view>

#include "tests/device/machine.h"

namespace zero::simulated {

namespace {

struct sigaction previous;

// Async-signal-safe: it writes and lets the handler before it (a sanitizer's, or none) see the same
// fault again.
void explain(int signal, siginfo_t* information, void* /*context*/) {
  if (Machine::instance().owns(information->si_addr)) {
    constexpr std::string_view kText =
        "simulated device: the host touched memory of a device. Only operators, copies and "
        "launched "
        "kernels may.\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, kText.data(), kText.size());
  }
  sigaction(signal, &previous, nullptr);
}

const bool installed = [] {
  Machine::instance();  // made now, not in the handler
  struct sigaction action {};
  action.sa_sigaction = &explain;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGSEGV, &action, &previous) == 0;
}();

}  // namespace

}  // namespace zero::simulated
