// A rank that forks while it trains, and whose child exits by way of every destructor: what
// fork_test runs. Its own folder, for states on disk, is the first argument.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "tests/engine/net.h"
#include "zero/comm/group.h"
#include "zero/store/build_on_disk.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string folder = argv[1];
  const std::string_view tier = argv[2];
  const bool forks = std::string_view(argv[3]) == "fork";
  // Static, as in programs that keep these for as long as they run: the child destroys them too.
  static const auto group = zero::init();
  static const auto net = std::make_shared<zero::Net>();
  static at::Tensor on_disk;
  {
    const zero::BuildOnDisk scope(folder);
    on_disk = torch::ones({1 << 16});
  }
  auto config = zero::config(tier == "window" ? 3 : 2);
  if (tier == "disk") {
    config.stage = 3;
    config.offload_param.device = zero::OffloadDevice::nvme;
    config.offload_param.nvme_path = folder;
    config.offload_optimizer.device = zero::OffloadDevice::nvme;
    config.offload_optimizer.nvme_path = folder;
  }
  static zero::Engine engine(net, zero::AdamW{.lr = 1e-2}, config, group);
  zero::train(engine, *net, 2);
  if (forks) {
    const pid_t child = fork();
    if (child == 0) std::exit(0);
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
      fmt::print("the child ended with {}\n", status);
      return 1;
    }
  }
  zero::train(engine, *net, 2, 2);
  double sum = on_disk.sum().item<double>();
  for (const auto& weight : zero::weights(engine)) {
    sum += weight.to(at::kDouble).abs().sum().item<double>();
  }
  fmt::print("weights {:a}\n", sum);
  return 0;
}
