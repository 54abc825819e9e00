// The schedule of a small engine, ZeRO-3 of two ranks: parameters are gathered on a side stream
// into a few slots, gradients are reduced there, slices are updated. All is ordered by events; the
// host waits for nothing in a step. Then each of its waits is left out in turn: no result may be
// wrong without a report.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <deque>
#include <iostream>
#include <memory>
#include <vector>

#include "tests/device/collectives.h"
#include "tests/device/testing.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using c10::Event;
using c10::StreamGuard;

constexpr int kRanks = 2;
constexpr int64_t kWidth = 16, kBatch = 4;
constexpr size_t kLayers = 4, kSlots = 3;
constexpr int kSteps = 3;
constexpr double kRate = 0.01;

enum class Slip {
  none,
  reduce_without_gradient,
  gradient_freed,
  gather_without_update,
  slot_without_last_use
};

// A full parameter's place, and when its last user has ended.
struct Slot {
  Tensor memory;
  Event last_use{c10::kPrivateUse1};
};

struct Layer {
  Tensor slice, gradient;  // this rank's part
  Slot* slot = nullptr;    // while it is gathered
  Event gathered{c10::kPrivateUse1};
};

class Rank {
 public:
  Rank(int rank, Collectives& collectives, const std::vector<Tensor>& weights, Slip slip)
      : rank_(rank),
        compute_(stream(0, rank)),
        side_(stream(1, rank)),
        collectives_(collectives),
        slip_(slip) {
    for (const Tensor& weight : weights) {
      Layer layer;
      layer.slice = weight.flatten().chunk(kRanks)[static_cast<size_t>(rank)].to(device(rank));
      layer.gradient = at::zeros_like(layer.slice);
      layers_.push_back(std::move(layer));
    }
    for (size_t i = 0; i < kSlots; ++i) {
      slots_.push_back(std::make_unique<Slot>());
      slots_.back()->memory = at::zeros({kWidth, kWidth}, at::TensorOptions().device(device(rank)));
      free_.push_back(slots_.back().get());
    }
    compute_.synchronize();
  }

  // Returns the loss.
  Tensor step(const Tensor& x) {
    std::vector<Tensor> h{x};
    for (size_t i = 0; i < kLayers; ++i) {
      const Tensor w = use(i);
      if (i + 1 < kLayers) gather(i + 1);
      h.push_back(at::relu(h[i].mm(w)));
      release(i);
    }
    Tensor g = h[kLayers] * 2;
    for (size_t i = kLayers; i-- > 0;) {
      const Tensor w = use(i);
      if (i > 0) gather(i - 1);
      const Tensor before_relu = g * h[i + 1].gt(0);
      reduce(i, h[i].t().mm(before_relu));
      g = before_relu.mm(w.t());
      release(i);
    }
    order(compute_, side_);
    for (Layer& layer : layers_) layer.slice.sub_(layer.gradient, kRate);
    if (slip_ != Slip::gather_without_update) order(side_, compute_);
    return h[kLayers].pow(2).sum();
  }

  std::vector<Tensor> slices() const {
    std::vector<Tensor> all;
    for (const Layer& layer : layers_) all.push_back(layer.slice.cpu());
    return all;
  }

 private:
  static void order(const c10::Stream& waits, const c10::Stream& after) {
    Event event(c10::kPrivateUse1);
    event.record(after);
    event.block(waits);
  }

  void gather(size_t index) {
    Layer& layer = layers_[index];
    if (layer.slot != nullptr) return;
    layer.slot = free_.front();
    free_.pop_front();
    if (slip_ != Slip::slot_without_last_use) layer.slot->last_use.block(side_);
    const StreamGuard guard(side_);
    collectives_.all_gather(rank_, layer.slice, layer.slot->memory);
    layer.gathered.record(side_);
  }

  Tensor use(size_t index) {
    gather(index);
    layers_[index].gathered.block(compute_);
    return layers_[index].slot->memory;
  }

  void release(size_t index) {
    Slot* slot = std::exchange(layers_[index].slot, nullptr);
    slot->last_use.record(compute_);
    free_.push_back(slot);
  }

  void reduce(size_t index, Tensor gradient) {
    if (slip_ != Slip::reduce_without_gradient) order(side_, compute_);
    const StreamGuard guard(side_);
    collectives_.reduce_scatter(rank_, gradient, layers_[index].gradient);
    if (slip_ != Slip::gradient_freed) gradient.record_stream(side_);
  }

  int rank_;
  c10::Stream compute_, side_;
  Collectives& collectives_;
  Slip slip_;
  std::vector<Layer> layers_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::deque<Slot*> free_;
};

struct Result {
  std::vector<float> losses;
  std::vector<Tensor> weights;
  int64_t host_waits = 0;  // in the steps
  bool operator==(const Result& other) const {
    if (losses != other.losses || weights.size() != other.weights.size()) return false;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!at::equal(weights[i], other.weights[i])) return false;
    }
    return true;
  }
};

std::vector<Tensor> initial_weights() {
  torch::manual_seed(3);
  std::vector<Tensor> weights;
  for (size_t i = 0; i < kLayers; ++i) weights.push_back(torch::randn({kWidth, kWidth}) * 0.4);
  return weights;
}
Tensor batch(int rank) {
  torch::manual_seed(10 + rank);
  return torch::randn({kBatch, kWidth});
}

Result on_one_cpu() {
  auto weights = initial_weights();
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Tensor> sums(kLayers);
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<Tensor> h{batch(rank)};
      for (size_t i = 0; i < kLayers; ++i) h.push_back(at::relu(h[i].mm(weights[i])));
      Tensor g = h[kLayers] * 2;
      for (size_t i = kLayers; i-- > 0;) {
        const Tensor before_relu = g * h[i + 1].gt(0);
        const Tensor gradient = h[i].t().mm(before_relu);
        sums[i] = rank == 0 ? gradient : sums[i] + gradient;
        g = before_relu.mm(weights[i].t());
      }
      result.losses.push_back(h[kLayers].pow(2).sum().item<float>());
    }
    for (size_t i = 0; i < kLayers; ++i) weights[i].sub_(sums[i], kRate);
  }
  result.weights = weights;
  return result;
}

Result on_two_ranks(Slip slip) {
  Collectives collectives(kRanks);
  const auto weights = initial_weights();
  const std::vector<Tensor> batches{batch(0), batch(1)};
  Result result;
  result.losses.resize(size_t{kSteps} * kRanks);
  std::vector<std::unique_ptr<Rank>> ranks(kRanks);
  std::vector<std::vector<Tensor>> losses(kRanks);
  std::vector<Tensor> inputs(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    const auto i = static_cast<size_t>(r);
    inputs[i] = batches[i].to(device(r));
    ranks[i] = std::make_unique<Rank>(r, collectives, weights, slip);
  }
  synchronize();
  const auto waits_before = counts().host_waits;
  run_ranks(kRanks, [&](int r) {
    const auto i = static_cast<size_t>(r);
    for (int step = 0; step < kSteps; ++step) losses[i].push_back(ranks[i]->step(inputs[i]));
  });
  result.host_waits = counts().host_waits - waits_before;
  synchronize();
  for (size_t step = 0; step < kSteps; ++step) {
    for (size_t r = 0; r < kRanks; ++r)
      result.losses[step * kRanks + r] = losses[r][step].item<float>();
  }
  const auto first = ranks[0]->slices(), second = ranks[1]->slices();
  for (size_t i = 0; i < kLayers; ++i) {
    result.weights.push_back(at::cat({first[i], second[i]}).view({kWidth, kWidth}));
  }
  synchronize();
  return result;
}

TEST(Schedule, EqualsOneCpuAndTheHostNeverWaits) {
  const Result reference = on_one_cpu();
  for (const Options& options : schedules(4)) {
    SCOPED_TRACE(describe(options));
    configure(options);
    const Result result = on_two_ranks(Slip::none);
    EXPECT_TRUE(result == reference);
    EXPECT_EQ(result.host_waits, 0);
    EXPECT_EQ(reports(), "");
  }
}

TEST(Schedule, SlipsAreReportedInEveryRun) {
  for (const Options& options : schedules(4)) {
    for (const Slip slip : {Slip::reduce_without_gradient, Slip::gradient_freed,
                            Slip::gather_without_update, Slip::slot_without_last_use}) {
      SCOPED_TRACE(describe(options) + ", slip " + std::to_string(static_cast<int>(slip)));
      configure(options);
      on_two_ranks(slip);
      EXPECT_NE(reports(), "");
    }
  }
}

TEST(Schedule, NoWaitThatIsLeftOutGivesAWrongResultWithoutAReport) {
  const Result reference = on_one_cpu();
  const auto left_out =
      leave_out_each_wait([&] { return on_two_ranks(Slip::none) == reference; }, 4);
  std::cout << left_out.waits << " waits, each left out: " << left_out.wrong_reported
            << " wrong and reported, " << left_out.right_reported << " right and reported, "
            << left_out.right_silent << " implied by others\n";
  for (const auto& wait : left_out.missed) ADD_FAILURE() << "wrong without a report: " << wait;
  EXPECT_EQ(left_out.wrong_silent, 0);
  EXPECT_GT(left_out.wrong_reported, 0);
  EXPECT_GT(left_out.waits, 60);
}

}  // namespace
}  // namespace zero::simulated
