#include "zero/optim/update_speed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace zero::optim {

double best_update_speed(const Optimizer& optimizer, c10::ScalarType parameter) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kNumel = int64_t{8} << 20;
  constexpr int kRounds = 4;  // the first touches the memory
  const auto master = at::full({kNumel}, 0.5, at::kFloat);
  const auto gradient = at::full({kNumel}, 1e-3, at::kFloat);
  const auto copy = at::zeros({parameter == c10::ScalarType::Float ? 0 : kNumel}, parameter);
  std::vector<at::Tensor> states;
  Operands operands{.numel = kNumel,
                    .master = master.mutable_data_ptr<float>(),
                    .gradient = gradient.const_data_ptr()};
  if (copy.numel() > 0) {
    operands.parameter = copy.mutable_data_ptr();
    operands.parameter_dtype = parameter;
  }
  for (size_t i = 0; i < state_names(optimizer).size(); ++i) {
    states.push_back(at::zeros({kNumel}, at::kFloat));
    operands.state[i] = states.back().mutable_data_ptr<float>();
  }
  const auto bytes = static_cast<double>(gradient.nbytes() + copy.nbytes() +
                                         2 * (1 + states.size()) * master.nbytes());
  double best = 0;
  for (int round = 1; round <= kRounds; ++round) {
    const auto begin = Clock::now();
    update(optimizer, round, 1e-4, 1, operands);
    best = std::max(best, bytes / std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

}  // namespace zero::optim
