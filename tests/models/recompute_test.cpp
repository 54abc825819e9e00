// Recomputation against the same functions without it, bit for bit; what it holds; its stores; its
// errors.
#include "zero/models/recompute/recompute.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <filesystem>
#include <functional>

#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/deferred_graph.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/layers/linear.h"
#include "zero/models/recompute/activation_store.h"

namespace zero {
namespace {

using testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

// The square makes every row another one: with k alone a product of matrices vanishes.
at::Tensor values(at::IntArrayRef sizes, double phase, at::ScalarType dtype = at::kFloat) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kFloat).pow(2) * 0.37 + phase)
      .mul(0.5)
      .view(sizes)
      .to(dtype);
}

at::Tensor parameter(at::IntArrayRef sizes, double phase, at::ScalarType dtype = at::kFloat) {
  return values(sizes, phase, dtype).clone().requires_grad_();  // no view
}

// x + dropout(gelu(x W + b)) V, from library operators and our own.
struct Block {
  explicit Block(double phase, at::ScalarType dtype = at::kFloat)
      : w(parameter({24, 40}, phase, dtype)),
        b(parameter({40}, phase + 1, dtype)),
        v(parameter({40, 24}, phase + 2, dtype)) {}
  at::Tensor operator()(const at::Tensor& x) const {
    const auto y = at::dropout(at::tanh(zero::linear(x, w, b, WeightLayout::in_out)), 0.2, true);
    return x + at::matmul(y, v);
  }
  Tensors parameters() const { return {w, b, v}; }
  at::Tensor w, b, v;
};

struct Result {
  at::Tensor loss;
  Tensors gradients;
  at::Tensor next_random;  // drawn after backward
};

void expect_equal(const Result& a, const Result& b) {
  EXPECT_TRUE(at::equal(a.loss, b.loss));
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t i = 0; i < a.gradients.size(); ++i)
    EXPECT_TRUE(at::equal(a.gradients[i], b.gradients[i])) << "gradient " << i;
  EXPECT_TRUE(at::equal(a.next_random, b.next_random));
}

using Wrap = std::function<at::Tensor(const Block&, const at::Tensor&)>;

at::Tensor plain(const Block& block, const at::Tensor& x) { return block(x); }
at::Tensor recomputed(const Block& block, const at::Tensor& x) { return zero::recompute(block, x); }
Wrap with(std::shared_ptr<ActivationStore> store) {
  return [store](const Block& block, const at::Tensor& x) {
    return zero::recompute(block, x, {.store = store});
  };
}

// Two steps of forward and backward through four blocks.
Result train(const Wrap& wrap, at::ScalarType dtype = at::kFloat) {
  at::manual_seed(5);
  std::vector<Block> blocks;
  for (int i = 0; i < 4; ++i) blocks.emplace_back(i * 0.9, dtype);
  const auto x = parameter({3, 7, 24}, 0.1, dtype);
  Result result;
  for (int step = 0; step < 2; ++step) {
    auto y = x * 1.5;
    for (const auto& block : blocks) y = wrap(block, y);
    const auto loss = at::cos(y).to(at::kFloat).mean();
    loss.backward();
    result.loss = loss.detach();
  }
  result.gradients.push_back(x.grad());
  for (const auto& block : blocks) {
    for (const auto& p : block.parameters()) result.gradients.push_back(p.grad());
  }
  result.next_random = at::rand({4});
  return result;
}

TEST(Recompute, LossesAndGradientsAreThoseWithoutItToTheBitWithDropout) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto reference = train(plain, dtype);
    expect_equal(train(recomputed, dtype), reference);
    // Every other block.
    int count = 0;
    expect_equal(train(
                     [&](const Block& block, const at::Tensor& x) {
                       return count++ % 2 == 0 ? zero::recompute(block, x) : block(x);
                     },
                     dtype),
                 reference);
  }
  // Other masks give other values: dropout took part.
  EXPECT_FALSE(at::equal(train(plain).loss, train([](const Block& block, const at::Tensor& x) {
                                              at::rand({1});
                                              return block(x);
                                            }).loss));
}

TEST(Recompute, Nests) {
  const auto reference = train(plain);
  const Wrap nested = [](const Block& block, const at::Tensor& x) {
    return zero::recompute(
        [&block](const at::Tensor& y) {
          return zero::recompute(
                     [&block](const at::Tensor& z) { return zero::recompute(block, z); }, y) *
                 1.0;
        },
        x);
  };
  expect_equal(train(nested), reference);
}

TEST(Recompute, DrawsFromGivenGeneratorsAgain) {
  const auto run = [](bool recompute) {
    auto generator = at::detail::createCPUGenerator(3);
    const auto w = parameter({16, 16}, 0.4);
    const auto function = [w, generator](const at::Tensor& x) {
      return at::mm(x, w) * at::empty_like(x).bernoulli_(0.7, generator);
    };
    auto x = values({5, 16}, 0.2);
    for (int i = 0; i < 3; ++i)
      x = recompute ? zero::recompute(function, x, {.generators = {generator}}) : function(x);
    x.sum().backward();
    return Result{x.detach(), {w.grad()}, at::empty({4}).uniform_(0, 1, generator)};
  };
  expect_equal(run(true), run(false));
}

// Leaves out the few bytes of scalars and statistics.
int64_t whole(int64_t bytes) { return bytes / 65536 * 65536; }

TEST(Recompute, HoldsItsInputsAloneUntilBackward) {
  install_host_allocator();
  constexpr int64_t kBlocks = 6;
  const auto input = values({64, 1024}, 0.3);  // 256 KiB
  const auto bytes = static_cast<int64_t>(input.nbytes());
  const auto function = [](const at::Tensor& x) {
    return at::sigmoid(at::tanh(at::sin(at::exp(x * -0.5))));  // keeps three results
  };
  const auto x = input.clone().requires_grad_();
  const auto used = [] { return HostAllocator::instance().usage().used; };
  const auto held = [&](bool recompute) {
    auto y = x * 2.0;
    const int64_t before = used().current;
    for (int64_t i = 0; i < kBlocks; ++i)
      y = recompute ? zero::recompute(function, y) : function(y);
    const auto loss = y.sum();
    y = at::Tensor();
    const int64_t after = used().current - before;
    HostAllocator::instance().reset_peaks();
    loss.backward();
    return std::pair(after, used().peak - before);
  };
  const auto gradient = [&] {
    auto result = x.grad().clone();
    x.mutable_grad() = at::Tensor();
    return result;
  };
  const auto [kept, peak] = held(true);
  const auto with = gradient();
  const auto [plain_kept, plain_peak] = held(false);
  EXPECT_TRUE(at::equal(with, gradient()));
  // The first block's input was there before; of the last block nothing is kept.
  EXPECT_EQ(whole(kept), (kBlocks - 1) * bytes);
  EXPECT_EQ(whole(plain_kept), (kBlocks * 3 - 1) * bytes);
  // There are at most the inputs, and of one block three results, one more on its way and two
  // gradients.
  EXPECT_LE(whole(peak), (kBlocks - 1 + 3 + 1 + 2) * bytes);
  EXPECT_GT(plain_peak, peak);
}

TEST(Recompute, DoesNotKeepItsOutputsAlive) {
  const auto x = parameter({8}, 0.1);
  auto y = zero::recompute([](const at::Tensor& z) { return at::exp(z); }, x);
  const auto memory = y.storage().getWeakStorageImpl();
  const auto loss = y.sum();  // keeps no values
  y = at::Tensor();
  EXPECT_TRUE(memory.expired());
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), at::exp(x.detach())));
}

TEST(Recompute, ParametersMayBeUsedInsideAndOutsideAndInTwoFunctions) {
  const auto run = [](bool recompute) {
    const auto w = parameter({12, 12}, 0.4);
    const auto function = [w](const at::Tensor& x) { return at::tanh(zero::linear(x, w, {})); };
    const auto apply = [&](const at::Tensor& x) {
      return recompute ? zero::recompute(function, x) : function(x);
    };
    auto y = zero::linear(values({5, 12}, 0.2), w, {});
    y = apply(apply(y));
    zero::linear(y, w, {}).sum().backward();
    return w.grad();
  };
  const auto reference = run(false);
  EXPECT_GT(reference.abs().max().item<float>(), 0.1F);
  EXPECT_TRUE(at::allclose(run(true), reference, 1e-5, 1e-6));
}

TEST(Recompute, TakesAnyInputsAndOutputs) {
  const auto run = [](bool recompute) {
    const auto w = parameter({6, 6}, 0.4);
    const auto x = parameter({4, 6}, 0.1);
    const auto data = values({4, 6}, 0.7);               // needs no gradient
    const auto rows = at::tensor({2, 0, 1}, at::kLong);  // integers
    const auto function = [w](const Tensors& in) {
      const auto& [x, weight, data, rows, nothing, passed] =
          std::tie(in[0], in[1], in[2], in[3], in[4], in[5]);
      EXPECT_FALSE(nothing.defined());
      const auto y = at::mm(x, w) * data + at::mm(x, weight);
      return Tensors{y.index_select(0, rows),
                     y.argmax(1),
                     passed,
                     at::sin(y),
                     y.detach(),
                     at::Tensor(),
                     data,
                     y.sum()};
    };
    const Tensors in{x * 2.0, w, data, rows, at::Tensor(), x * 3.0};
    const auto out = recompute ? zero::recompute(function, in) : function(in);
    EXPECT_TRUE(out[2].is_same(in[5]));
    EXPECT_TRUE(out[6].is_same(in[2]));
    EXPECT_FALSE(out[1].requires_grad());
    EXPECT_FALSE(out[5].defined());
    // out[3] is unused; out[4] has no gradient in the function.
    auto loss = (out[0] * 1.7).sum() + out[7] + (out[4] * out[2]).sum();
    loss.backward();
    return Result{loss.detach(), {x.grad(), w.grad(), out[1]}, {}};
  };
  const auto a = run(true);
  const auto b = run(false);
  EXPECT_TRUE(at::equal(a.loss, b.loss));
  EXPECT_TRUE(at::equal(a.gradients[0], b.gradients[0]));
  EXPECT_TRUE(at::allclose(a.gradients[1], b.gradients[1], 1e-6, 1e-7)) << "three uses";
  EXPECT_TRUE(at::equal(a.gradients[2], b.gradients[2]));
}

TEST(Recompute, WorksWhereNoInputNeedsAGradient) {
  const auto w = parameter({6, 6}, 0.4);
  const auto x = values({4, 6}, 0.1);
  const auto y = zero::recompute([w](const at::Tensor& z) { return at::mm(z, w); }, x);
  ASSERT_TRUE(y.requires_grad());
  y.sum().backward();
  EXPECT_TRUE(at::equal(w.grad(), at::mm(x.t(), at::ones({4, 6}))));
  // Nothing that is recomputed needs a gradient here.
  const auto z = zero::recompute([](const at::Tensor& in) { return in * 2.0; }, x);
  (z + w.sum()).sum().backward();
}

TEST(Recompute, WorksWithoutDataForShapesAlone) {
  const auto w = at::empty({6, 3}, at::device(at::kMeta)).requires_grad_();
  const auto y = zero::recompute([w](const at::Tensor& z) { return at::mm(z, w); },
                                 at::empty({4, 6}, at::device(at::kMeta)));
  EXPECT_EQ(y.sizes(), (at::IntArrayRef{4, 3}));
}

TEST(Recompute, AParameterMayBeReturned) {
  const auto w = parameter({6}, 0.4);
  const auto y =
      zero::recompute([&w](const at::Tensor&) { return at::Tensor(w); }, values({2}, 0.1));
  (y * 3.0).sum().backward();
  EXPECT_TRUE(at::equal(w.grad(), at::full({6}, 3.0)));
}

TEST(Recompute, CastsInBackwardAsInForward) {
  const auto run = [](bool recompute) {
    const auto w = parameter({12, 12}, 0.4);
    const auto x = parameter({4, 12}, 0.1);
    const auto function = [w](const at::Tensor& z) { return at::linear(z, w); };
    Tensors results;
    for (int step = 0; step < 2; ++step) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::increment_nesting();
      const auto y = recompute ? zero::recompute(function, x) : function(x);
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      y.to(at::kFloat).pow(2).sum().backward();
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
      results.insert(results.end(), {y.detach(), x.grad().clone(), w.grad().clone()});
      const at::NoGradGuard no_grad;
      w.add_(w.grad(), -0.01);
    }
    return results;
  };
  const auto a = run(true);
  const auto b = run(false);
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(Recompute, LeavesNoCastsBehindThatOutliveAnUpdateOfTheWeights) {
  const auto w = parameter({12, 12}, 0.4);
  const auto x = parameter({4, 12}, 0.1);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto y = zero::recompute([w](const at::Tensor& z) { return at::linear(z, w); }, x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  y.to(at::kFloat).sum().backward();
  {
    const at::NoGradGuard no_grad;
    w.add_(1.0);
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto after = at::linear(x, w);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_TRUE(at::equal(after, at::linear(x.to(at::kBFloat16), w.to(at::kBFloat16))));
}

TEST(Recompute, WithoutGradientsItOnlyCallsTheFunction) {
  int calls = 0;
  const auto function = [&](const at::Tensor& x) {
    ++calls;
    EXPECT_FALSE(DeferredGraph::active());
    return x * 2.0;
  };
  const auto x = parameter({4}, 0.1);
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(zero::recompute(function, x).requires_grad());
  }
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(zero::recompute(function, x).is_inference());
  }
  EXPECT_EQ(calls, 2);
}

TEST(Recompute, TellsTheFirstRunFromEvaluation) {
  const auto x = parameter({4}, 0.1);
  std::vector<bool> gradients;
  std::vector<bool> deferred;
  const auto y = zero::recompute(
      [&](const at::Tensor& z) {
        gradients.push_back(at::GradMode::is_enabled());
        deferred.push_back(DeferredGraph::active());
        return z * z;
      },
      x);
  EXPECT_FALSE(DeferredGraph::active());
  y.sum().backward();
  EXPECT_EQ(gradients, (std::vector<bool>{false, true}));
  EXPECT_EQ(deferred, (std::vector<bool>{true, false}));
}

TEST(Recompute, ARetainedGraphRunsAgainAndAReleasedOneSaysSo) {
  for (const auto& store : std::vector<std::shared_ptr<ActivationStore>>{
           nullptr, std::make_shared<ContiguousActivations>()}) {
    at::manual_seed(2);
    const Block block(0.3);
    const auto x = parameter({3, 24}, 0.1);
    const auto y = zero::recompute(block, x * 2.0, {.store = store}).sum();
    y.backward({}, /*retain_graph=*/true);
    const auto once = x.grad().clone();
    y.backward();
    EXPECT_TRUE(at::equal(x.grad(), once * 2.0)) << "the same masks twice";
    EXPECT_THAT(message_of<Error>([&] { y.backward(); }), HasSubstr("retain_graph=true"));
  }
}

TEST(Recompute, SecondDerivativesAreRefused) {
  const auto x = parameter({4}, 0.1);
  const auto y = zero::recompute([](const at::Tensor& z) { return z * z; }, x).sum();
  EXPECT_THAT(
      message_of<Error>([&] { torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true); }),
      HasSubstr("second derivative"));
}

TEST(Recompute, GradientsOfGivenInputsAloneAreRefused) {
  const auto w = parameter({4}, 0.3);
  const auto x = parameter({4}, 0.1);
  const auto y = zero::recompute([w](const at::Tensor& z) { return z * w; }, x).sum();
  EXPECT_THAT(message_of<Error>([&] { torch::autograd::grad({y}, {x}); }),
              HasSubstr("Call backward without inputs"));
  EXPECT_FALSE(w.grad().defined());
}

TEST(Recompute, AnInputThatChangesIsRefused) {
  const auto x = parameter({4}, 0.1);
  EXPECT_THAT(message_of<Error>([&] {
                zero::recompute([](const at::Tensor& z) { return z.add_(1.0).exp(); }, x * 2.0);
              }),
              HasSubstr("changed its input 0 in place"));
  const auto z = x * 2.0;
  const auto y = zero::recompute([](const at::Tensor& in) { return in.exp(); }, z).sum();
  {
    const at::NoGradGuard no_grad;
    z.add_(1.0);
  }
  EXPECT_THAT(message_of<Error>([&] { y.backward(); }),
              HasSubstr("Input 0 of zero::recompute was changed"));
}

TEST(Recompute, AFunctionThatDoesSomethingElseInBackwardIsRefused) {
  const auto x = parameter({4}, 0.1);
  bool first = true;
  const auto rows = zero::recompute(
      [&](const at::Tensor& z) {
        return std::exchange(first, false) ? z * 1.0 : z.narrow(0, 0, 2);
      },
      x);
  EXPECT_THAT(message_of<Error>([&] { rows.sum().backward(); }), HasSubstr("another shape"));
  first = true;
  const auto count = zero::recompute(
      [&](const Tensors& in) {
        return std::exchange(first, false) ? Tensors{in[0] * 1.0}
                                           : Tensors{in[0] * 1.0, in[0] * 2.0};
      },
      Tensors{x});
  EXPECT_THAT(message_of<Error>([&] { count[0].sum().backward(); }),
              HasSubstr("1 tensors in forward and 2 in backward"));
}

TEST(Recompute, AnErrorInTheSecondRunLeavesEverythingAsItWas) {
  at::manual_seed(1);
  const auto x = parameter({4}, 0.1);
  bool first = true;
  const auto y = zero::recompute(
      [&](const at::Tensor& z) {
        const auto drawn = at::rand({4});
        if (!std::exchange(first, false)) throw DataError("the second run");
        return z * drawn;
      },
      x);
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_THAT(message_of<Error>([&] { y.sum().backward(); }), HasSubstr("the second run"));
  EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_TRUE(at::GradMode::is_enabled());
}

// --- Stores ---

TEST(ContiguousActivations, GiveTheSameBits) {
  expect_equal(train(with(std::make_shared<ContiguousActivations>())), train(plain));
}

TEST(ContiguousActivations, AreOneBufferThatEveryStepUsesAgain) {
  ContiguousActivations store;
  EXPECT_EQ(store.bytes(), 0);
  std::vector<std::vector<const void*>> places;
  for (int step = 0; step < 3; ++step) {
    std::vector<int64_t> handles;
    auto& of_step = places.emplace_back();
    for (int i = 0; i < 3; ++i)
      handles.push_back(store.put(values({100 + i, 30}, i).t()));  // strides are kept
    for (int i = 2; i >= 0; --i) {
      const auto got = store.get(handles[static_cast<size_t>(i)]);
      EXPECT_TRUE(at::equal(got, values({100 + i, 30}, i).t()));
      EXPECT_EQ(got.strides(), values({100 + i, 30}, i).t().strides());
      of_step.push_back(got.const_data_ptr());
      store.drop(handles[static_cast<size_t>(i)]);
    }
  }
  EXPECT_EQ(store.bytes(), 3 * 12288) << "100 x 30 floats are three pages";
  EXPECT_EQ(places[1], places[2]);
  EXPECT_NE(places[0], places[1]) << "the first step measures";
}

TEST(ContiguousActivations, StaySoundInAnyOrder) {
  ContiguousActivations store;
  for (int step = 0; step < 3; ++step) {
    const auto a = store.put(values({1000}, 1));
    const auto b = store.put(values({1000}, 2));
    store.drop(a);
    const auto c = store.put(values({1000}, 3));
    EXPECT_TRUE(at::equal(store.get(b), values({1000}, 2)));
    EXPECT_TRUE(at::equal(store.get(c), values({1000}, 3)));
    store.drop(b);
    EXPECT_TRUE(at::equal(store.get(c), values({1000}, 3)));
    store.drop(c);
  }
  EXPECT_THROW(store.put(values({10, 10}, 1).narrow(1, 0, 5)), ConfigError);
}

TEST(DiskActivations, GiveTheSameBits) {
  const TemporaryFolder folder;
  for (const bool uring : {true, false}) {
    for (const int buffers : {2, 3, 8}) {
      const auto store = std::make_shared<DiskActivations>(DiskActivationOptions{
          .folder = folder.path(), .buffers = buffers, .file = {.uring = uring}});
      expect_equal(train(with(store)), train(plain));
      const int64_t page = store::kAlignment;
      EXPECT_EQ(store->counts().written, 2 * 4 * page) << "an activation is 2016 bytes";
      EXPECT_EQ(store->counts().read, 2 * std::max(0, 4 - buffers) * page);
      EXPECT_EQ(store->late_reads(), 0);
    }
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DiskActivations, NestAndRetain) {
  const TemporaryFolder folder;
  const auto store = std::make_shared<DiskActivations>(
      DiskActivationOptions{.folder = folder.path(), .buffers = 2, .file_bytes = 10000});
  const Wrap nested = [&](const Block& block, const at::Tensor& x) {
    return zero::recompute(
        [&block, store](const at::Tensor& y) {
          return zero::recompute(block,
                                 zero::recompute([](const at::Tensor& z) { return z * 1.0; },
                                                 y * 1.0, {.store = store}),
                                 {.store = store});
        },
        x, {.store = store});
  };
  expect_equal(train(nested), train(plain));

  at::manual_seed(2);
  std::vector<Block> blocks;
  for (int i = 0; i < 5; ++i) blocks.emplace_back(i * 0.7);
  const auto x = parameter({3, 24}, 0.1);
  auto y = x * 2.0;
  for (const auto& block : blocks) y = zero::recompute(block, y, {.store = store});
  y.sum().backward({}, /*retain_graph=*/true);
  const auto once = x.grad().clone();
  y.sum().backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(at::equal(x.grad(), once * 2.0));
}

TEST(DiskActivations, AGraphThatBackwardNeverVisitsLeavesItsPlace) {
  const TemporaryFolder folder;
  const auto store = std::make_shared<DiskActivations>(
      DiskActivationOptions{.folder = folder.path(), .buffers = 2, .file_bytes = 8192});
  const Block block(0.3);
  const auto x = parameter({3, 24}, 0.1);
  const auto files = [&] {
    size_t count = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
      count += entry.path().filename().string().starts_with("activations-") ? 1 : 0;
    return count;
  };
  for (int i = 0; i < 10; ++i) {
    auto y = x * 1.0;
    for (int layer = 0; layer < 4; ++layer) y = zero::recompute(block, y, {.store = store});
  }
  EXPECT_EQ(files(), 2u) << "four pages in files of two";
}

TEST(DiskActivations, SayWhatIsWrongWithTheFolderOrTheDisk) {
  EXPECT_THAT(message_of<Error>([] { DiskActivations({.folder = "/nonexistent/folder"}); }),
              HasSubstr("/nonexistent/folder"));
  EXPECT_THAT(message_of<Error>([] { DiskActivations({.folder = "/tmp", .buffers = 1}); }),
              HasSubstr("buffers is 1"));
  // A file that something else truncates.
  const TemporaryFolder folder;
  const auto store = std::make_shared<DiskActivations>(
      DiskActivationOptions{.folder = folder.path(), .buffers = 2});
  std::vector<Block> blocks;
  for (int i = 0; i < 6; ++i) blocks.emplace_back(i * 0.7);
  const auto x = parameter({3, 24}, 0.1);
  auto y = x * 2.0;
  for (const auto& block : blocks) y = zero::recompute(block, y, {.store = store});
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (entry.path().filename() == "activations-0") std::filesystem::resize_file(entry.path(), 0);
  }
  EXPECT_THAT(message_of<Error>([&] { y.sum().backward(); }), HasSubstr("truncated"));
  EXPECT_THAT(message_of<Error>([&] { zero::recompute(blocks[0], x * 2.0, {.store = store}); }),
              HasSubstr("truncated"))
      << "what a failed transfer left is not given out";
}

// --- GPT-2 ---

Gpt2Config tiny() {
  Gpt2Config config{.vocab_size = 61, .context = 12, .width = 24, .layers = 5, .heads = 4};
  config.set_dropout(0.1);
  return config;
}

Result train_gpt2(const Gpt2Config& config, const RecomputeSettings& settings) {
  at::manual_seed(11);
  Gpt2 model(config);
  model->recompute(settings);
  const auto tokens = at::arange(24, at::kLong).mul(7).remainder(61).view({2, 12});
  const auto loss = model->loss(tokens, tokens.roll(1, 1));
  loss.backward();
  Result result{loss.detach(), {}, {}};
  for (const auto& parameter : model->parameters()) result.gradients.push_back(parameter.grad());
  result.next_random = at::rand({4});
  return result;
}

TEST(Gpt2Recompute, GivesTheSameBitsForEveryChoiceOfBlocksAndStore) {
  const TemporaryFolder folder;
  for (const bool tied : {true, false}) {
    auto config = tiny();
    config.tie_word_embeddings = tied;
    const auto reference = train_gpt2(config, {});
    for (const int64_t every : {1, 2, 3, 9})
      expect_equal(train_gpt2(config, {.every = every}), reference);
    expect_equal(train_gpt2(config, {.every = 1,
                                     .options = {std::make_shared<ContiguousActivations>(), {}}}),
                 reference);
    expect_equal(train_gpt2(config, {.every = 2,
                                     .options = {std::make_shared<DiskActivations>(
                                                     DiskActivationOptions{folder.path()}),
                                                 {}}}),
                 reference);
  }
}

TEST(Gpt2Recompute, HoldsOneHiddenStateForEachRecomputedBlock) {
  install_host_allocator();
  const Gpt2Config config{.vocab_size = 64, .context = 128, .width = 256, .layers = 6, .heads = 4};
  Gpt2 model(config);
  const auto tokens = at::arange(256, at::kLong).remainder(64).view({2, 128});
  const int64_t hidden = 2 * 128 * 256 * 4;
  const auto held = [&](int64_t every) {
    model->recompute({.every = every});
    const auto before = HostAllocator::instance().usage().used.current;
    const auto hidden_states = model->forward(tokens);
    return HostAllocator::instance().usage().used.current - before;
  };
  held(0);
  const int64_t nothing = held(0);
  const int64_t all = held(1);
  // The blocks' inputs, the last norm's input and output; its statistics are small.
  EXPECT_EQ(whole(all), (config.layers + 2) * hidden);
  const int64_t block = (nothing - all) / config.layers;
  EXPECT_GT(block, 8 * hidden);
  EXPECT_NEAR(held(2), nothing - 3 * block, 4096);
  EXPECT_NEAR(held(4), nothing - 2 * block, 4096);
}

TEST(Gpt2Recompute, KeepsItsSettingsInACloneAndRefusesNegativeOnes) {
  Gpt2 model(tiny());
  model->recompute({.every = 2});
  const auto clone = std::dynamic_pointer_cast<Gpt2Impl>(model->clone());
  EXPECT_EQ(clone->recompute().every, 2);
  EXPECT_THAT(message_of<Error>([&] { model->recompute({.every = -1}); }),
              HasSubstr("every is -1"));
}

}  // namespace
}  // namespace zero
