// The pager on a device: units are gathered from pinned memory on its own stream, ordered by events
// alone. Losses and gradients equal the CPU's, no wait is missing, none of the host's is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <vector>

#include "tests/device/models.h"
#include "tests/device/testing.h"
#include "zero/device/memory.h"
#include "zero/device/stream.h"
#include "zero/paging/pager.h"

namespace zero::simulated {
namespace {

// Units in the host's memory.
class PinnedSource final : public paging::UnitSource {
 public:
  PinnedSource(const partition::Layout& layout, const std::vector<Tensor>& parameters) {
    for (const auto& unit : layout.units()) {
      auto& whole = units_.emplace_back(
          at::zeros({unit.numel}, at::TensorOptions(at::kFloat).pinned_memory(true)));
      for (const auto& segment : unit.segments) {
        whole.narrow(0, segment.offset, segment.numel)
            .copy_(parameters[static_cast<size_t>(segment.parameter)].detach().flatten());
      }
    }
  }
  void gather(int64_t unit, void* destination) override {
    const auto& from = units_[static_cast<size_t>(unit)];
    tensor_at(destination, from.numel(), at::kFloat, device()).copy_(from, /*non_blocking=*/true);
  }
  void finish(int64_t /*unit*/) override {}

 private:
  std::vector<Tensor> units_;
};

struct Budget {
  int64_t units;     // of the largest size that may be live
  int64_t prefetch;  // of those
};

struct Outcome {
  std::vector<float> losses;
  std::vector<Tensor> gradients;
  paging::PagerCounts counts;
  int64_t host_waits = 0;  // in the steps
  Usage frames;
};

constexpr int kSteps = 4;

Outcome run(c10::Device on, std::optional<Budget> paged) {
  torch::manual_seed(5);
  Gpt model;
  model.to(on);
  model.train(false);  // dropout would draw on the host's generator
  const auto x = tokens().to(on);
  const auto y = tokens().to(on);
  const auto parameters = model.parameters();
  const auto ledger = std::make_shared<Ledger>();
  std::unique_ptr<partition::Layout> layout;
  std::unique_ptr<PinnedSource> source;
  std::unique_ptr<paging::Pager> pager;
  if (paged) {
    std::vector<partition::Parameter> list;
    for (const auto& p : model.named_parameters())
      list.push_back({p.key(), p.value().numel(), 4, 0});
    layout = std::make_unique<partition::Layout>(list, 1, 32 * 32 * 4);
    source = std::make_unique<PinnedSource>(*layout, parameters);
    int64_t largest = 0;
    for (const auto& unit : layout->units()) largest = std::max(largest, unit.bytes());
    pager = std::make_unique<paging::Pager>(
        *layout, parameters, *source, ledger,
        paging::PagerOptions{.device = on,
                             .budget_bytes = paged->units * largest,
                             .prefetch_bytes = paged->prefetch * largest});
  }
  synchronize();
  const auto waits = counts().host_waits;
  std::vector<Tensor> losses;
  for (int step = 0; step < kSteps; ++step) {
    for (const auto& p : parameters) p.mutable_grad() = Tensor();
    const auto loss = model.loss(x, y);
    loss.backward();
    losses.push_back(loss.detach());
    if (pager) pager->end_step();
  }
  Outcome outcome;
  outcome.host_waits = counts().host_waits - waits;
  for (const auto& loss : losses) outcome.losses.push_back(loss.item<float>());
  for (const auto& p : parameters) outcome.gradients.push_back(p.grad().cpu());
  if (pager) outcome.counts = pager->counts();
  outcome.frames = ledger->usage(Category::gathered_units);
  for (const auto& p : parameters) p.mutable_grad() = Tensor();
  pager.reset();
  EXPECT_EQ(ledger->total().current, 0);
  synchronize();
  return outcome;
}

bool equal(const Outcome& a, const Outcome& b) {
  return a.losses == b.losses &&
         std::equal(a.gradients.begin(), a.gradients.end(), b.gradients.begin(), b.gradients.end(),
                    [](const Tensor& x, const Tensor& y) { return at::equal(x, y); });
}

// A unit at a time, a few, and most of the model.
constexpr Budget kBudgets[] = {{0, 0}, {2, 1}, {4, 2}, {12, 4}};

TEST(PagerOnADevice, EqualsTheCpuAndWaitsForNothing) {
  const auto reference = run(at::kCPU, {});
  for (const Options& options : schedules(5)) {
    for (const auto& budget : kBudgets) {
      SCOPED_TRACE(describe(options) + ", " + std::to_string(budget.units) + " units");
      configure(options);
      const auto paged = run(device(), budget);
      EXPECT_TRUE(equal(paged, reference));
      EXPECT_EQ(paged.host_waits, 0);
      EXPECT_GT(paged.counts.gathers, kSteps);
      EXPECT_EQ(reports(), "");
    }
  }
}

TEST(PagerOnADevice, NoWaitIsNeedless) {
  const auto reference = run(at::kCPU, {});
  for (const auto& budget : kBudgets) {
    SCOPED_TRACE(std::to_string(budget.units) + " units");
    const auto left_out =
        leave_out_each_wait([&] { return equal(run(device(), budget), reference); }, 2);
    EXPECT_EQ(left_out.wrong_silent, 0) << left_out.missed.front();
    std::cout << budget.units << " units: " << left_out.waits << " waits, "
              << left_out.wrong_reported << " wrong, " << left_out.right_reported
              << " right by luck, " << left_out.right_silent << " implied by others\n";
  }
}

}  // namespace
}  // namespace zero::simulated
