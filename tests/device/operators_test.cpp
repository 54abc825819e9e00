// Operators of many kinds on the simulated device, forward and backward, have the CPU's bits.
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/device/testing.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Case {
  std::string name;
  std::function<Tensors()> inputs;  // those that are floating-point are differentiated
  std::function<Tensor(const Tensors&)> compute;
};

// The result, and the inputs' gradients.
Tensors run(const Case& what, c10::Device on) {
  torch::manual_seed(3);
  Tensors inputs;
  for (const Tensor& input : what.inputs()) {
    auto moved = input.to(on);
    inputs.push_back(input.is_floating_point() ? moved.detach().requires_grad_() : moved);
  }
  torch::manual_seed(4);
  const auto result = what.compute(inputs);
  if (result.requires_grad()) result.to(at::kFloat).pow(2).sum().backward();
  Tensors all{result.detach().cpu()};
  for (const Tensor& input : inputs) {
    if (input.grad().defined()) all.push_back(input.grad().cpu());
  }
  return all;
}

class Operators : public testing::TestWithParam<Case> {};

TEST_P(Operators, HaveTheCpusBits) {
  const Tensors reference = run(GetParam(), at::kCPU);
  for (const Options& options : schedules(1)) {
    SCOPED_TRACE(describe(options));
    configure(options);
    const Tensors computed = run(GetParam(), device());
    synchronize();
    ASSERT_EQ(computed.size(), reference.size());
    for (size_t i = 0; i < computed.size(); ++i) {
      EXPECT_TRUE(at::equal(computed[i], reference[i]))
          << (i == 0 ? "result" : "gradient " + std::to_string(i - 1)) << ": " << computed[i]
          << "\nof the CPU: " << reference[i];
    }
    EXPECT_EQ(reports(), "");
  }
}

Tensor matrix(int64_t rows = 8, int64_t columns = 8) { return torch::randn({rows, columns}); }
Tensor heads(int64_t width = 8) { return torch::randn({2, 4, 6, width}); }

const std::vector<Case> kCases{
    {"LinearInBfloat16",
     [] {
       return Tensors{matrix().to(at::kBFloat16), matrix().to(at::kBFloat16)};
     },
     [](const Tensors& x) { return at::linear(x[0], x[1]); }},
    {"Norms",
     [] {
       return Tensors{matrix(), matrix(1).flatten(), matrix(1).flatten()};
     },
     [](const Tensors& x) {
       return at::layer_norm(x[0], {8}, x[1], x[2]) + at::rms_norm(x[0], {8}, x[1]) +
              at::group_norm(x[0], 2, x[1], x[2]) + x[0].norm();
     }},
    {"Activations", [] { return Tensors{matrix()}; },
     [](const Tensors& x) {
       return at::silu(x[0]) * at::softplus(x[0]) + at::gelu(x[0], "tanh") +
              at::log_softmax(x[0], 1) + at::leaky_relu(x[0]);
     }},
    {"Views",
     [] {
       return Tensors{matrix(), matrix(2)};
     },
     [](const Tensors& x) {
       const auto& w = x[0];
       return x[1].matmul(w.t().view({2, 4, 8}).permute({2, 0, 1}).reshape({8, 8})) +
              w.narrow(0, 3, 2) + w.select(0, 0) + w.chunk(4)[1] + w.diagonal().unsqueeze(0) +
              w.as_strided({2, 8}, {8, 1}) + w.unfold(0, 2, 2).select(2, 0).slice(0, 0, 2);
     }},
    {"Indexing",
     [] {
       return Tensors{matrix(), matrix(4), torch::randint(8, {4})};
     },
     [](const Tensors& x) {
       const auto& w = x[0];
       const auto picked =
           w.index_select(0, x[2]) * x[1] + at::where(x[1] > 0, w.slice(0, 0, 4), x[1]);
       const auto joined = at::cat({picked, std::get<0>(w.topk(8, 1)).slice(0, 0, 4)});
       return std::get<0>(joined.sort(1)).cumsum(1) +
              w.gather(0, x[2].unsqueeze(0).expand({8, 4})).sum() + at::embedding(w, x[2]).sum();
     }},
    {"ResultsWhoseSizesDependOnData", [] { return Tensors{matrix()}; },
     [](const Tensors& x) {
       return x[0].masked_select(x[0] > 0).sum() + x[0].index({x[0] > 1}).sum() +
              x[0].nonzero().size(0);
     }},
    {"LinearAlgebra",
     [] {
       return Tensors{matrix(), matrix()};
     },
     [](const Tensors& x) {
       return at::linalg_solve(x[0], x[1]) + at::linalg_inv(x[0]) +
              at::logdet(x[0].matmul(x[0].t())) + at::einsum("ij,kj->ik", {x[0], x[1]});
     }},
    {"RandomNumbers", [] { return Tensors{matrix()}; },
     [](const Tensors& x) {
       const auto noise = at::rand_like(x[0]) + at::empty_like(x[0]).normal_() +
                          at::empty_like(x[0]).bernoulli_(0.5) +
                          at::randperm(8, torch::TensorOptions().device(x[0].device()));
       const auto drawn = at::multinomial(x[0].softmax(1), 2);
       return at::dropout(x[0] * noise, 0.3, true) + drawn.sum() + at::rand_like(x[0]);
     }},
    {"Convolutions",
     [] {
       return Tensors{torch::randn({2, 4, 6, 6}), torch::randn({4, 2, 3, 3}), torch::randn({4})};
     },
     [](const Tensors& x) {
       const auto y = at::conv2d(x[0], x[1], x[2], 1, 1, 1, 2);
       return at::conv_transpose2d(at::avg_pool2d(y, 2), x[1].transpose(0, 1).repeat({2, 1, 1, 1}));
     }},
    {"AttentionCausal",
     [] {
       return Tensors{heads(), heads(), heads()};
     },
     [](const Tensors& x) {
       return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true);
     }},
    {"AttentionWithAMask",
     [] {
       return Tensors{heads(), heads(), heads(), torch::ones({6, 6}, at::kBool).tril()};
     },
     [](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2], x[3]); }},
    {"AttentionWithDropout",
     [] {
       return Tensors{heads(), heads(), heads()};
     },
     [](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.2); }},
    {"ManyTensorsAtOnce",
     [] {
       return Tensors{matrix(), matrix()};
     },
     [](const Tensors& x) {
       const at::NoGradGuard no_grad;
       const Tensors copies{x[0].clone(), x[1].clone()};
       at::_foreach_add_(copies, at::_foreach_mul(copies, 2.0), 0.5);
       return at::stack(at::_foreach_norm(copies)) + copies[1].sum();
     }},
    {"ResizedResults", [] { return Tensors{matrix()}; },
     [](const Tensors& x) {
       const at::NoGradGuard no_grad;
       auto sum = at::empty({0}, x[0].options());
       at::sum_out(sum, x[0], {0});
       return sum.resize_({4}) + x[0].slice(0, 0, 4).sum(1);
     }},
    {"GradientOfAGradient",
     [] {
       return Tensors{matrix(), matrix()};
     },
     [](const Tensors& x) {
       const auto y = x[0].mm(x[1]).pow(3).sum();
       return torch::autograd::grad({y}, {x[0]}, {}, true, true)[0];
     }},
};

INSTANTIATE_TEST_SUITE_P(OfManyKinds, Operators, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// Fused cells, which packed sequences take, are composed otherwise than on the CPU.
TEST(Operators, PackedSequencesAreTheCpusWithinRounding) {
  configure({});
  torch::manual_seed(1);
  const auto data = torch::randn({9, 8});
  const auto sizes = torch::tensor({4, 3, 2});
  const auto state = torch::randn({1, 4, 6}), cell = torch::randn({1, 4, 6});
  const auto parameters = [](int64_t gates) {
    return Tensors{torch::randn({gates * 6, 8}), torch::randn({gates * 6, 6}),
                   torch::randn({gates * 6}), torch::randn({gates * 6})};
  };
  const auto moved = [](const Tensors& tensors) {
    Tensors all;
    for (const auto& t : tensors) all.push_back(t.to(device()));
    return all;
  };
  const auto of_lstm = parameters(4), of_gru = parameters(3);
  const auto expected = at::lstm(data, sizes, {state, cell}, of_lstm, true, 1, 0, false, false);
  const auto lstm = at::lstm(data.to(device()), sizes, moved({state, cell}), moved(of_lstm), true,
                             1, 0, false, false);
  EXPECT_TRUE(at::allclose(std::get<0>(lstm).cpu(), std::get<0>(expected)));
  EXPECT_TRUE(at::allclose(std::get<2>(lstm).cpu(), std::get<2>(expected)));
  const auto gru = at::gru(data.to(device()), sizes, state.to(device()), moved(of_gru), true, 1, 0,
                           false, false);
  EXPECT_TRUE(at::allclose(std::get<0>(gru).cpu(), std::get<0>(at::gru(data, sizes, state, of_gru,
                                                                       true, 1, 0, false, false))));
  EXPECT_EQ(reports(), "");
}

// The geometry of results is found once for each signature.
TEST(Operators, AStepThatRepeatsNeedsNoShadowRuns) {
  configure({});
  static int64_t rows = 4;  // another signature in each run
  const auto x = torch::randn({++rows, 7}).to(device());
  const auto step = [&] { return at::softmax(x.mm(x.t()) * 0.125, 1).sum(); };
  step();
  const auto first = counts().shadow_runs;
  step();
  EXPECT_GT(first, 0);
  EXPECT_EQ(counts().shadow_runs, first);
  synchronize();
}

}  // namespace
}  // namespace zero::simulated
