// Tried by Gloo.cmake: two threads send each other bytes over the loopback interface, and a wait is
// aborted. Exit status 0: it works.
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>

namespace {

using c10d::ProcessGroupGloo;

// `kept` ends with both threads: where one closes its connections first, the other's wait fails.
bool run(const c10::intrusive_ptr<c10d::Store>& store, int rank,
         c10::intrusive_ptr<ProcessGroupGloo>& kept) {
  auto options = c10::make_intrusive<ProcessGroupGloo::Options>(std::chrono::seconds(20));
  options->threads = 0;  // they would run collectives
  options->devices.push_back(ProcessGroupGloo::createDeviceForHostname("127.0.0.1", false));
  kept = c10::make_intrusive<ProcessGroupGloo>(store, rank, 2, options);
  const auto& gloo = kept;
  if (gloo->getRank() != rank || gloo->getSize() != 2 || gloo->getBackendName() != "gloo")
    return false;
  const int64_t size = 1 << 18;
  std::vector<at::Tensor> sent{at::full({size}, rank + 1, at::kByte)};
  std::vector<at::Tensor> received{at::zeros({size}, at::kByte)};
  const auto receives = gloo->recv(received, 1 - rank, 7);
  const auto sends = gloo->send(sent, 1 - rank, 7);
  if (!sends->wait() || !receives->wait()) return false;
  if (!received[0].eq(2 - rank).all().item<bool>()) return false;
  const auto never = gloo->recv(received, 1 - rank, 8);
  never->abort();
  return !never->wait();
}

}  // namespace

int main() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  bool works[2] = {false, false};
  c10::intrusive_ptr<ProcessGroupGloo> kept[2];
  const auto attempt = [&](int rank) {
    try {
      works[rank] = run(store, rank, kept[rank]);
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
    }
  };
  std::thread other(attempt, 1);
  attempt(0);
  other.join();
  return works[0] && works[1] ? 0 : 1;
}
