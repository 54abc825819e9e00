// A step of training whose messages are counted.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "zero/comm/group.h"
#include "zero/comm/traffic.h"
#include "zero/engine/engine.h"

namespace zero {

struct StepMessages {
  comm::TrafficCount reduce_scatters;
  comm::TrafficCount all_gathers;
};

// Passes the micro-batches of step number `step`, whose losses and norm it adds to those of
// `trained`. The bytes of its reduce-scatters are held against the formula. Returns what was sent.
template <class Trained>
StepMessages counted_step(Engine& engine, comm::Group& group, int64_t step,
                          const std::function<at::Tensor(int64_t pass)>& loss, Trained& trained) {
  using comm::Collective;
  const auto sums_before = group.traffic().count(Collective::reduce_scatter);
  const auto gathers_before = group.traffic().count(Collective::all_gather);
  const int64_t k = engine.config().gradient_accumulation_steps;
  for (int64_t i = 0; i < k; ++i) {
    const auto of_pass = loss(step * k + i);
    engine.backward(of_pass);
    const auto result = engine.step();
    trained.losses.push_back(of_pass.item<float>());
    if (result.boundary) trained.norms.push_back(result.grad_norm);
  }
  StepMessages sent{.reduce_scatters = group.traffic().count(Collective::reduce_scatter),
                    .all_gathers = group.traffic().count(Collective::all_gather)};
  sent.reduce_scatters -= sums_before;
  sent.all_gathers -= gathers_before;
  const auto formula = engine.traffic_formula();
  EXPECT_EQ(sent.reduce_scatters.logical_bytes, formula.reduce_scatter) << "step " << step;
  EXPECT_EQ(sent.reduce_scatters.link_bytes, formula.reduce_scatter_link) << "step " << step;
  return sent;
}

}  // namespace zero
