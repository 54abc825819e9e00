// A rank that meets the others as its environment says. init_test runs it under each launcher.
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "zero/base/error.h"
#include "zero/comm/group.h"

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "sum";
  try {
    zero::comm::GroupOptions options;
    if (const char* seconds = std::getenv("TEST_TIMEOUT_S"))
      options.timeout = std::chrono::seconds(std::atoi(seconds));
    const auto group = zero::init(options);
    if (mode == "die" && group->rank() == 1) raise(SIGKILL);
    for (int round = 0; round < (mode == "die" ? 1000000 : 1); ++round) {
      auto tensor = at::full({3}, group->rank() + 1, at::kFloat);
      group->all_reduce(tensor, "ranks").wait();
      if (mode == "sum") {
        fmt::print("rank {} of {} sum {}\n", group->rank(), group->size(), tensor[0].item<float>());
      }
    }
    if (mode == "again") {  // a second group, whether the first still lives or not
      const auto second = zero::init(options);
      second->barrier();
      fmt::print("again {}\n", second->size());
    }
    if (mode == "farewell") {  // rank 0 leaves while its last bytes are still on their way
      auto tensor = at::full({8 << 20}, group->rank() == 0 ? 7 : 0, at::kFloat);
      group->broadcast(tensor, 0, "farewell").wait();
      fmt::print("farewell {}\n", tensor[-1].item<float>());
    }
    return 0;
  } catch (const zero::ConfigError& error) {
    fmt::print(stderr, "config: {}\n", error.what());
    return 2;
  } catch (const zero::Error& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
}
