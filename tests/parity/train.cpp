#include "tests/parity/train.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace zero::parity {

Outcome train(const Run& run, std::shared_ptr<comm::Group> group, int data_rank) {
  torch::manual_seed(7);
  auto subject = run.model(run.config.parameter_dtype());
  Config config = run.config;
  config.seed_by_rank = false;
  const ParameterGroup all{.optimizer = AdamW{.lr = 3e-3, .weight_decay = 0.1}, .rest = true};
  Engine engine(subject.tensors, {all}, config, group);
  torch::manual_seed(100 + static_cast<uint64_t>(data_rank));  // dropout differs by rank
  Outcome outcome;
  int64_t micro_batch = 0;
  for (int step = 0; step < run.steps; ++step) {
    for (int64_t k = 0; k < config.gradient_accumulation_steps; ++k) {
      const auto loss = subject.loss(data_rank, micro_batch++);
      outcome.losses.push_back(loss.item<float>());
      engine.backward(loss);
      if (const auto result = engine.step(); result.boundary) {
        outcome.norms.push_back(result.grad_norm);
        outcome.scales.push_back(result.loss_scale);
      }
    }
  }
  engine.visit_parameters([&](const std::string&, const at::Tensor& value) {
    const auto* bytes = static_cast<const uint8_t*>(value.const_data_ptr());
    outcome.weights.insert(outcome.weights.end(), bytes, bytes + value.nbytes());
  });
  return outcome;
}

std::string difference(const Outcome& a, const Outcome& b, comm::Group& group) {
  const auto differ = [](const std::vector<double>& x, const std::vector<double>& y) {
    return x.size() != y.size() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) != 0;
  };
  // 0: equal; else 1 + the first loss that differs; -1: norms; -2: weights; -3: loss scales.
  int64_t verdict = 0;
  if (a.weights != b.weights) verdict = -2;
  if (differ(a.norms, b.norms)) verdict = -1;
  if (differ(a.scales, b.scales)) verdict = -3;
  for (size_t i = std::min(a.losses.size(), b.losses.size()); i-- > 0;) {
    if (std::bit_cast<uint32_t>(a.losses[i]) != std::bit_cast<uint32_t>(b.losses[i]))
      verdict = static_cast<int64_t>(i) + 1;
  }
  auto all = at::empty({group.size()}, at::kLong);
  group.all_gather_control(all, at::full({1}, verdict, at::kLong), "parity");
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto theirs = all[rank].item<int64_t>();
    if (theirs == 0) continue;
    const std::string what = theirs > 0     ? "loss " + std::to_string(theirs - 1)
                             : theirs == -1 ? "gradient norms"
                             : theirs == -3 ? "loss scales"
                                            : "final weights";
    return what + " on rank " + std::to_string(rank);
  }
  return "";
}

}  // namespace zero::parity
