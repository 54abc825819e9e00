// Saving, loading and converting a checkpoint take memory for a buffer, whatever the model's size.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/host_allocator.h"
#include "zero/checkpoint/foreign/checkpoint_view.h"
#include "zero/checkpoint/foreign/export.h"
#include "zero/comm/group.h"
#include "zero/config/config.h"

namespace zero {
namespace {

constexpr int64_t kTensors = 16;
constexpr int64_t kTensorBytes = int64_t{1} << 20;  // of fp32

struct Wide : nn::Module {
  Wide() {
    for (int64_t i = 0; i < kTensors; ++i)
      register_parameter(fmt::format("w{}", i), torch::full({512, 512}, 0.01 * (i + 1)));
  }
};

// Returns the most bytes of tensors that `body` holds beyond what is held before. The allocator
// counts tensors once it is installed.
int64_t peak_of(const std::function<void()>& body) {
  auto& allocator = HostAllocator::instance();
  const int64_t before = allocator.held().current;
  allocator.reset_peaks();
  body();
  return allocator.held().peak - before;
}

// All states take 48 such tensors: weights and two moments each.
TEST(CheckpointMemory, ConvertingHoldsAFewTensorsAtATime) {
  install_host_allocator();
  const TemporaryFolder folder;
  const auto own = folder.path() / "own";
  comm::run_as_threads(2, [&](auto group) {
    Engine engine(std::make_shared<Wide>(), AdamW{}, config(3), group);
    engine.save(own);
  });
  const auto expect_few = [&](const char* what, const std::function<void()>& body) {
    const int64_t peak = peak_of(body);
    EXPECT_GE(peak, kTensorBytes) << what;
    EXPECT_LE(peak, 4 * kTensorBytes) << what;
  };
  using namespace foreign;
  const auto view = [&](const char* name) { return view_checkpoint(folder.path() / name); };
  const auto to = [&](const char* name) { return folder.path() / name; };
  expect_few("reshard", [&] { write_checkpoint(view("own"), to("three"), 3); });
  expect_few("hf", [&] { export_huggingface(view("own"), to("hf"), int64_t{5} << 30); });
  expect_few("deepspeed", [&] { export_deepspeed(view("own"), to("deepspeed")); });
  expect_few("dcp", [&] { export_distributed(view("own"), to("dcp")); });
  for (const char* form : {"hf", "deepspeed", "dcp"})
    expect_few(form, [&] { write_checkpoint(view(form), to("imported"), 2); });
  EXPECT_EQ(differences(view("imported"), view("own"), 0), std::vector<std::string>{});
}

// The ranks are threads and share the allocator. Each may hold a slice of one tensor, and a copy of
// it in another form.
TEST(CheckpointMemory, SavingAndLoadingHoldABufferForEachRank) {
  install_host_allocator();
  const TemporaryFolder folder;
  const auto path = folder.path() / "own";
  for (const bool bf16 : {false, true}) {
    comm::run_as_threads(2, [&](auto group) {
      Engine engine(std::make_shared<Wide>(), AdamW{}, config(3, bf16), group);
      const auto expect_little = [&](const char* what, const std::function<void()>& body) {
        const auto together = [&] {
          group->barrier("the beginning");
          body();
          group->barrier("the end");
        };
        if (group->rank() == 0) {
          EXPECT_LE(peak_of(together), 2 * kTensorBytes) << what;
        } else {
          together();
        }
      };
      expect_little("save", [&] { engine.save(path); });
      expect_little("load", [&] { engine.load(path); });
    });
  }
}

}  // namespace
}  // namespace zero
