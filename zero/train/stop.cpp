#include "zero/train/stop.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace zero::train {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};

// A signal handler can reach nothing else. Trainers of ranks that are threads all reset it.
std::atomic<int> received_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);

}  // namespace

// Note [Handlers have a stack of their own]
// Some matrix kernels that LibTorch calls use the stack pointer as one more register while they
// run, and leave it pointing into an array. The system writes the frame of a signal's handler below
// the stack pointer. Without a stack of its own a handler overwrites the array, and the process
// dies later in malloc, or trains on with wrong numbers. (Seen with LibTorch 2.11 on an AMD EPYC: a
// GPT-2 in fp32 that is sent a signal every 10 ms is dead within a second.)
StopSignals::StopSignals() : stack_(static_cast<size_t>(sysconf(_SC_SIGSTKSZ))) {
  received_signal = 0;
  const stack_t stack{.ss_sp = stack_.data(), .ss_flags = 0, .ss_size = stack_.size()};
  sigaltstack(&stack, &stack_before_);
  struct sigaction action {};
  action.sa_handler = [](int signal) { received_signal = signal; };
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART | SA_ONSTACK);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  sigaltstack(&stack_before_, nullptr);
}

int StopSignals::received() const { return received_signal; }

}  // namespace zero::train
