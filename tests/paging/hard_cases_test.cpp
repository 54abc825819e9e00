// Models and operators that are hard to page. Each runs unpaged, then paged with units of one
// parameter that are released after every operator; outputs and gradients must be equal to the bit.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/script.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <sstream>

#include "tests/paging/local_source.h"
#include "zero/base/error.h"

namespace zero::paging {
namespace {

namespace nn = torch::nn;
using torch::indexing::Slice;

struct Outcome {
  at::Tensor output;
  std::vector<at::Tensor> gradients;
};

Outcome run(const std::vector<at::Tensor>& parameters, const std::function<at::Tensor()>& forward) {
  torch::manual_seed(1);
  for (const auto& p : parameters) p.mutable_grad() = at::Tensor();
  const auto output = forward();
  output.to(at::kFloat).pow(2).sum().backward();
  Outcome outcome{output.detach().clone(), {}};
  for (const auto& p : parameters)
    outcome.gradients.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
  return outcome;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() ||
         (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
          std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0);
}

void expect_paging_changes_nothing(const std::vector<at::Tensor>& parameters,
                                   const std::function<at::Tensor()>& forward) {
  const auto expected = run(parameters, forward);
  const Paged paged(parameters, 1, 0);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto actual = run(parameters, forward);
    EXPECT_TRUE(same_bits(actual.output, expected.output));
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(same_bits(actual.gradients[i], expected.gradients[i])) << "gradient " << i;
    }
  }
  EXPECT_GT(paged.pager->counts().gathers, 0);
  EXPECT_EQ(paged.pager->live_bytes(), 0);
}

TEST(Paging, LinearInBf16) {
  nn::Linear m(64, 32);
  m->to(at::kBFloat16);
  const auto x = torch::randn({4, 64}).to(at::kBFloat16).requires_grad_();
  expect_paging_changes_nothing(m->parameters(), [&] { return m(x); });
}

TEST(Paging, BidirectionalLstm) {
  nn::LSTM m(nn::LSTMOptions(16, 32).num_layers(2).bidirectional(true));
  const auto x = torch::randn({5, 3, 16});
  expect_paging_changes_nothing(m->parameters(), [&] { return std::get<0>(m(x)); });
}

TEST(Paging, MultiheadAttention) {
  nn::MultiheadAttention m(32, 4);
  const auto x = torch::randn({5, 3, 32});
  expect_paging_changes_nothing(m->parameters(), [&] { return std::get<0>(m(x, x, x)); });
}

TEST(Paging, ConvolutionWithBatchAndGroupNorm) {
  nn::Sequential m(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), nn::BatchNorm2d(8), nn::ReLU(),
                   nn::GroupNorm(2, 8));
  const auto x = torch::randn({2, 3, 8, 8});
  expect_paging_changes_nothing(m->parameters(), [&] { return m->forward(x); });
}

TEST(Paging, TransformerEncoderLayerWithDropout) {
  nn::TransformerEncoderLayer m(
      nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0.1));
  const auto x = torch::randn({5, 3, 32});
  expect_paging_changes_nothing(m->parameters(), [&] { return m(x); });
}

struct SavesItsInputs : torch::autograd::Function<SavesItsInputs> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x.matmul(w);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               const torch::autograd::tensor_list& gradient) {
    const auto saved = context->get_saved_variables();
    return {gradient[0].matmul(saved[1].t()), saved[0].t().matmul(gradient[0])};
  }
};

TEST(Paging, CustomAutogradFunction) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const auto x = torch::randn({4, 16});
  expect_paging_changes_nothing({w}, [&] { return SavesItsInputs::apply(x, w); });
}

TEST(Paging, FourteenKindsOfView) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const auto x = torch::randn({4, 16});
  expect_paging_changes_nothing({w}, [&] {
    return x.matmul(w.t().view({2, 8, 16}).permute({2, 0, 1}).reshape({16, 16})) +
           w.narrow(0, 3, 4).index({Slice(), Slice(0, 16)}) + w.select(0, 0) +
           w.detach().slice(0, 0, 4) + w.chunk(4)[1] + w.unbind(0)[2] + w.diagonal().unsqueeze(0) +
           w.as_strided({4, 16}, {16, 1}) + w.expand({1, 16, 16}).squeeze(0).slice(0, 0, 4) +
           w.flatten().unfold(0, 16, 16).narrow(0, 0, 4);
  });
}

TEST(Paging, ViewsThatCopyWhenTheyMust) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const auto x = torch::randn({4, 16});
  expect_paging_changes_nothing({w}, [&] {
    return x.matmul(w.t().contiguous()) + x.matmul(w.t().reshape({256}).view({16, 16})) +
           x.matmul(w.to(at::kDouble).to(at::kFloat)) + x.matmul(w.contiguous());
  });
}

TEST(Paging, Embedding) {
  nn::Embedding m(nn::EmbeddingOptions(50, 16));
  const auto x = torch::randint(50, {7});
  expect_paging_changes_nothing(m->parameters(), [&] { return m(x); });
}

TEST(Paging, IndexingAndWhere) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const auto x = torch::randn({4, 16});
  expect_paging_changes_nothing({w}, [&] {
    return w.index({torch::randint(16, {4}), Slice()}) * x + at::where(x > 0, w.slice(0, 0, 4), x) +
           x.index({Slice(), torch::arange(16)});
  });
}

TEST(Paging, WeightNorm) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const auto v = torch::randn({16}).requires_grad_();
  const auto x = torch::randn({4, 16});
  expect_paging_changes_nothing(
      {w, v}, [&] { return nn::functional::linear(x, w * (v / w.norm(2, 1)).unsqueeze(1)); });
}

TEST(Paging, AParameterUsedSeveralTimes) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const auto x = torch::randn({4, 16}).requires_grad_();
  expect_paging_changes_nothing({w}, [&] { return x.mm(w).mm(w).mm(w.t()); });
}

TEST(Paging, ListsOfParameters) {
  const auto a = torch::randn({4, 16}).requires_grad_();
  const auto b = torch::randn({4, 16}).requires_grad_();
  expect_paging_changes_nothing({a, b}, [&] {
    return torch::cat({a, b, a}) + torch::stack({a, b, a}).view({12, 16});
  });
}

TEST(Paging, SecondOrderGradients) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const auto x = torch::randn({4, 16}).requires_grad_();
  expect_paging_changes_nothing({w}, [&] {
    const auto y = x.mm(w).pow(3).sum();
    return torch::autograd::grad({y}, {x}, {}, true, true)[0];
  });
}

TEST(Paging, Autocast) {
  nn::Linear m(64, 32);
  const auto x = torch::randn({4, 64});
  expect_paging_changes_nothing(m->parameters(), [&] {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    auto y = m(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return y;
  });
}

TEST(Paging, ChannelsLastWeightsKeepTheirStrides) {
  nn::Conv2d m(nn::Conv2dOptions(4, 8, 3));
  m->weight.set_data(m->weight.contiguous(at::MemoryFormat::ChannelsLast));
  const auto x = torch::randn({2, 4, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast);
  expect_paging_changes_nothing(m->parameters(), [&] { return m(x); });
}

TEST(Paging, TorchScript) {
  torch::jit::Module m("m");
  m.register_parameter("w", torch::randn({16, 16}).requires_grad_(), false);
  m.register_parameter("b", torch::randn({16}).requires_grad_(), false);
  m.define(
      "def forward(self, x):\n    y = torch.addmm(self.b, x, self.w)\n    for i in range(3):\n"
      "        y = torch.tanh(y @ self.w) * 2.0 + y\n    return y\n");
  std::vector<at::Tensor> parameters;
  for (const auto& p : m.parameters()) parameters.push_back(p);
  const auto x = torch::randn({4, 16});
  const auto forward = [&] { return m.forward({x}).toTensor(); };
  for (int i = 0; i < 3; ++i)
    run(parameters, forward);  // its executor optimises the graph after the first runs
  expect_paging_changes_nothing(parameters, forward);
}

TEST(Paging, EvaluationWithoutGradients) {
  nn::Linear m(16, 16);
  const auto x = torch::randn({4, 16});
  const auto expected = m(x).detach().clone();
  const Paged paged(m->parameters(), 1, 0);
  {
    const torch::NoGradGuard guard;
    m->eval();
    EXPECT_TRUE(same_bits(m(x), expected));
  }
  {
    const c10::InferenceMode guard;
    EXPECT_TRUE(same_bits(m(x), expected));
    EXPECT_TRUE(same_bits(m->weight.t().clone().t(), m->weight.clone()));
  }
  m->train();
  EXPECT_TRUE(same_bits(m(x).detach(), expected));
}

TEST(Paging, WritesStayUntilTheyAreTaken) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const Paged paged({w}, 1, 0);
  {
    const torch::NoGradGuard guard;
    w.normal_();
    w.fill_(3);
    w.mul_(2);
    w.detach().add_(1);  // through a view
    w.t()[3].fill_(0);
  }
  EXPECT_EQ(w.sum().item<double>(), 7 * 240);
  EXPECT_EQ(paged.pager->take_dirty(), std::vector<int64_t>{0});
  EXPECT_EQ(paged.pager->take_dirty(), std::vector<int64_t>{});
  paged.pager->release_all();
  EXPECT_NE(w.sum().item<double>(), 7 * 240) << "nobody wrote them back";
}

TEST(Paging, PrintingAndReadingElements) {
  const auto w = torch::full({4, 4}, 2.5F).requires_grad_();
  std::ostringstream expected;
  expected << w;
  const Paged paged({w}, 1, 0);
  std::ostringstream actual;
  actual << w;
  EXPECT_EQ(actual.str(), expected.str());
  EXPECT_EQ(w[3][2].item<float>(), 2.5F);
}

TEST(Paging, CopiesAreNotPaged) {
  const auto w = torch::randn({4, 4}).requires_grad_();
  const Paged paged({w}, 1, 0);
  for (const auto& copy :
       {w.clone(), at::empty_like(w), w.to(at::kDouble), w + 1, at::zeros_like(w)}) {
    EXPECT_FALSE(copy.unsafeGetTensorImpl()->key_set().has(kPagedKey));
    EXPECT_EQ(page_of(copy), nullptr);
  }
}

TEST(Paging, AViewOfAnAbsentParameterGathersNothing) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const Paged paged({w}, 1, 0);
  const auto views = std::vector<at::Tensor>{
      w.t(), w.view({256}), w.detach(), w.narrow(0, 1, 2), w.unsqueeze(0), w.select(0, 1)};
  EXPECT_EQ(paged.pager->counts().gathers, 0);
  EXPECT_TRUE(same_bits(views[0].t().clone(), w.clone()));
}

// The message must name the parameter and the way out, whatever reached for the bytes.
void expect_named_error(const std::function<void()>& reach) {
  try {
    reach();
    FAIL() << "nothing was thrown";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("'p0'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("zero::Gathered"), std::string::npos) << error.what();
  }
}

TEST(Paging, RawAccessToAnAbsentParameterIsAnErrorThatNamesIt) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const Paged paged({w}, 1, 0);
  expect_named_error([&] { w.data_ptr<float>(); });
  expect_named_error([&] { w.const_data_ptr<float>(); });
  expect_named_error([&] { w.mutable_data_ptr(); });
  expect_named_error([&] { w.t().data_ptr(); });
  expect_named_error([&] { static_cast<void>(w.storage().data()); });
  expect_named_error([&] { w.accessor<float, 2>()[0][0] += 1; });
  expect_named_error([&] {
    std::ostringstream out;
    torch::save(w, out);
  });
}

TEST(Paging, RawAccessWorksWhileTheUnitIsPinned) {
  const auto w = torch::full({16, 16}, 2.0F).requires_grad_();
  const Paged paged({w}, 1, 0);
  {
    const auto pin = paged.pager->pin(0);
    EXPECT_EQ(w.data_ptr<float>()[255], 2.0F);
    std::stringstream stream;
    torch::save(w, stream);
    at::Tensor loaded;
    torch::load(loaded, stream);
    EXPECT_TRUE(same_bits(loaded.detach(), torch::full({16, 16}, 2.0F)));
  }
  expect_named_error([&] { w.data_ptr<float>(); });
}

TEST(Paging, UseAfterThePagerEndedIsAnErrorThatSaysSo) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  { const Paged paged({w}, 1, 0); }
  try {
    w.sum();
    FAIL() << "nothing was thrown";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("'p0'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("no longer exists"), std::string::npos)
        << error.what();
  }
}

TEST(Paging, AReplacedStorageIsNoticed) {
  nn::Linear m(16, 16);
  const Paged paged(m->parameters(), 1, 0);
  paged.pager->check_storages();
  m->to(at::kDouble);
  EXPECT_THROW(paged.pager->check_storages(), Error);
}

TEST(Paging, AnOperatorThatThrowsUnpinsItsParameters) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const Paged paged({w}, 1, 0);
  EXPECT_ANY_THROW(torch::mm(w, torch::randn({3, 3})));
  EXPECT_EQ(paged.pager->live_bytes(), 0);
  paged.pager->invalidate();
}

}  // namespace
}  // namespace zero::paging
