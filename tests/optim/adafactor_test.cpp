// Adafactor's sums by rows and columns, and its whole update beside formulas in double.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "test_arrays.h"
#include "tests/support/instruction_sets.h"
#include "zero/optim/factors.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {
namespace {

float* floats(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }

Factors factors_of(const at::Tensor& tensor) { return {tensor.sizes(), tensor.strides()}; }

/// Elements of a dense tensor in the order of its storage.
at::Tensor stored(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).clone();
}

/// Gradients of very different sizes by row and column, and some that are 0.
at::Tensor uneven(at::IntArrayRef sizes) {
  auto g = torch::randn(sizes);
  g.mul_(torch::randn(g.select(-1, 0).sizes()).mul(6).exp().unsqueeze(-1));
  g.mul_(torch::randn(g.select(-2, 0).sizes()).mul(2).exp().unsqueeze(-2));
  return g.mul_(torch::rand(sizes).gt(0.1));
}

/// Shapes whose storage is by rows, by columns, and by neither.
std::vector<at::Tensor> gradients() {
  torch::manual_seed(17);
  std::vector<at::Tensor> all;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {1, 1}, {1, 9}, {9, 1}, {5, 7}, {33, 70}, {300, 257}, {3, 20, 17}, {6, 5, 3, 3}})
    all.push_back(uneven(sizes));
  all.push_back(uneven({41, 130}).t());
  all.push_back(uneven({6, 5, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast));
  all.push_back(uneven({4, 6, 50}).permute({2, 0, 1}));
  return all;
}

TEST(Factors, NumberRowsAndColumnsAsTheShapesOfPyTorchsStates) {
  for (const auto& g : gradients()) {
    const auto factors = factors_of(g);
    // The number of its row and column at each element.
    const auto rows = torch::arange(factors.rows()).view(factors.row_shape()).expand(g.sizes());
    const auto columns =
        torch::arange(factors.columns()).view(factors.column_shape()).expand(g.sizes());
    const auto in_order = [&](const at::Tensor& ids) {
      auto like = torch::empty_strided(g.sizes(), g.strides(), torch::kLong);
      like.copy_(ids);
      return stored(like);
    };
    const auto row_ids = in_order(rows);
    const auto column_ids = in_order(columns);
    int64_t next = 0;
    factors.for_each_run({0, g.numel()}, [&](const Factors::Run& run) {
      EXPECT_EQ(run.begin, next);
      next += run.numel;
      for (int64_t i = 0; i < run.numel; ++i) {
        ASSERT_EQ(run.row + i * factors.row_step(), row_ids[run.begin + i].item<int64_t>());
        ASSERT_EQ(run.column + i * factors.column_step(),
                  column_ids[run.begin + i].item<int64_t>());
      }
    });
    EXPECT_EQ(next, g.numel());
    for (int64_t begin = 0; begin < g.numel(); begin += std::max<int64_t>(1, g.numel() / 11)) {
      for (const int64_t numel : {int64_t{1}, int64_t{9}, g.numel() / 2, g.numel()}) {
        const int64_t end = std::min(g.numel(), begin + std::max<int64_t>(1, numel));
        const auto part = factors.part({begin, end});
        const auto met = [&](const at::Tensor& ids, Interval interval, int64_t most) {
          const auto some = ids.slice(0, begin, end);
          EXPECT_LE(interval.begin, some.min().item<int64_t>());
          EXPECT_GE(interval.end, some.max().item<int64_t>() + 1);
          EXPECT_GE(interval.begin, 0);
          EXPECT_LE(interval.end, most);
          if (g.dim() > 2) return;  // else no more than that
          EXPECT_EQ(interval.size(), (some.max() - some.min()).item<int64_t>() + 1);
        };
        met(row_ids, part.rows, factors.rows());
        met(column_ids, part.columns, factors.columns());
      }
    }
  }
}

struct Made {
  at::Tensor values, row_var, col_var;
  double squares = 0;
};

Made start(const at::Tensor& g) {
  const auto factors = factors_of(g);
  return {stored(g), torch::full({factors.rows()}, 0.3), torch::full({factors.columns()}, 0.2)};
}

void expect_same(const Made& a, const Made& b, const std::string& what) {
  EXPECT_TRUE(torch::equal(a.values, b.values)) << what;
  EXPECT_TRUE(torch::equal(a.row_var, b.row_var)) << what;
  EXPECT_TRUE(torch::equal(a.col_var, b.col_var)) << what;
  EXPECT_EQ(a.squares, b.squares) << what;
}

TEST(Factors, DirectionsEqualTheReferenceInBitsOnEveryInstructionSetAndAnyThreads) {
  const int threads = at::get_num_threads();
  for (const bool added : {false, true}) {
    const Adafactor adafactor{.eps_added = added};
    for (const auto& g : gradients()) {
      const auto factors = factors_of(g);
      auto expected = start(g);
      ExactSum squares;
      factored_directions_reference(adafactor, 3, factors, floats(expected.values),
                                    floats(expected.row_var), floats(expected.col_var), squares);
      expected.squares = squares.value();
      on_each_instruction_set([&](const char* instructions) {
        for (const int count : {1, 3}) {
          at::set_num_threads(count);
          auto fast = start(g);
          ExactSum sum;
          factored_directions(adafactor, 3, factors, floats(fast.values), floats(fast.row_var),
                              floats(fast.col_var), sum);
          fast.squares = sum.value();
          std::ostringstream what;
          what << instructions << " " << g.sizes() << " " << g.strides();
          expect_same(fast, expected, what.str());
        }
      });
    }
  }
  at::set_num_threads(threads);
}

// As slices on several ranks are: exponents first, then sums.
TEST(Factors, SumsDoNotDependOnHowAParameterIsCut) {
  const Adafactor adafactor;
  for (const auto& g : gradients()) {
    const auto factors = factors_of(g);
    auto whole = start(g);
    ExactSum all;
    factored_directions(adafactor, 2, factors, floats(whole.values), floats(whole.row_var),
                        floats(whole.col_var), all);
    whole.squares = all.value();
    for (const int64_t piece : {64, 192, 4096}) {
      auto cut = start(g);
      std::vector<Interval> pieces;
      for (int64_t begin = 0; begin < g.numel(); begin += piece)
        pieces.push_back({begin, std::min(g.numel(), begin + piece)});
      std::reverse(pieces.begin(), pieces.end());
      std::vector<uint8_t> row_exponents(static_cast<size_t>(factors.rows()));
      std::vector<uint8_t> column_exponents(static_cast<size_t>(factors.columns()));
      std::vector<double> rows(row_exponents.size()), columns(column_exponents.size());
      std::vector<float> row_factors(rows.size()), column_factors(columns.size());
      for (const auto& each : pieces) {
        raise_exponents(factors, each, floats(cut.values) + each.begin, row_exponents.data(),
                        column_exponents.data());
      }
      for (const auto& each : pieces) {
        // A rank's sums, from zero on, to be added up.
        std::vector<double> row_part(rows.size()), column_part(columns.size());
        add_squares(factors, each, floats(cut.values) + each.begin, row_exponents.data(),
                    column_exponents.data(), row_part.data(), column_part.data());
        for (size_t r = 0; r < rows.size(); ++r) rows[r] += row_part[r];
        for (size_t c = 0; c < columns.size(); ++c) columns[c] += column_part[c];
      }
      update_moments(adafactor, 2, factors, rows.data(), columns.data(), floats(cut.row_var),
                     floats(cut.col_var), row_factors.data(), column_factors.data());
      ExactSum squares;
      for (const auto& each : pieces) {
        make_directions(adafactor, factors, each, row_factors.data(), column_factors.data(),
                        floats(cut.values) + each.begin, squares);
      }
      cut.squares = squares.value();
      expect_same(cut, whole, "pieces of " + std::to_string(piece));
    }
  }
}

// Every row and column has fp32's precision, however small it is beside others.
TEST(Factors, SumsAreRightToTheLastBitOfFp32) {
  torch::manual_seed(19);
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{700, 3000}, {70000, 6}, {7, 30000}}) {
    auto g = torch::randn(sizes);
    const auto spread = torch::arange(sizes[0]).remainder(60).sub(40);
    g.mul_(torch::pow(2.0, spread.to(torch::kDouble)).to(torch::kFloat).unsqueeze(1));
    const auto factors = factors_of(g);
    auto made = start(g);
    ExactSum squares;
    factored_directions(Adafactor{}, 1, factors, floats(made.values), floats(made.row_var),
                        floats(made.col_var), squares);
    const auto exact = g.to(torch::kDouble).square();
    const auto error = [](const at::Tensor& ours, const at::Tensor& theirs) {
      return ((ours.to(torch::kDouble) - theirs) / theirs).abs().max().item<double>();
    };
    EXPECT_LT(error(made.row_var, exact.mean(1)), 0x1p-24 * 1.01) << sizes;
    EXPECT_LT(error(made.col_var, exact.mean(0)), 0x1p-24 * 1.01) << sizes;
  }
}

TEST(Factors, WhatIsNotFiniteStaysInItsRowsAndColumns) {
  auto g = torch::ones({5, 70});
  g[2][3] = std::numeric_limits<float>::infinity();
  g[4][60] = std::numeric_limits<float>::quiet_NaN();
  auto made = start(g);
  ExactSum squares;
  factored_directions(Adafactor{}, 2, factors_of(g), floats(made.values), floats(made.row_var),
                      floats(made.col_var), squares);
  EXPECT_TRUE(made.row_var.isfinite().equal(torch::tensor({true, true, false, true, false})));
  EXPECT_EQ(made.col_var.isfinite().sum().item<int64_t>(), 68);
  EXPECT_TRUE(std::isnan(squares.value()));
}

/// One update of a matrix by both sweeps.
void update_matrix(const Adafactor& adafactor, int64_t step, const at::Tensor& master,
                   const at::Tensor& gradient, const at::Tensor& row_var,
                   const at::Tensor& col_var) {
  const auto direction = torch::empty_like(master);
  Findings findings{.direction = floats(direction)};
  Operands operands{
      .numel = master.numel(), .master = floats(master), .gradient = floats(gradient)};
  first_sweep(adafactor, step, 1, operands, findings);
  factored_directions(adafactor, step, factors_of(master), floats(direction), floats(row_var),
                      floats(col_var), findings.norms.update);
  operands.gradient = floats(direction);
  second_sweep(adafactor, step, adafactor.lr, ratio(adafactor, findings.norms, master.numel()),
               operands);
}

const std::vector<Adafactor>& values() {
  static const std::vector<Adafactor> all{
      {.lr = 0.1},
      {.lr = 0.5, .weight_decay = 0.1},
      {.lr = 1e-2, .d = 0.7, .scale_parameter = false, .relative_step = false, .eps_added = true},
      {.eps1 = 0.05, .eps2 = 0.5},
      {.lr = 1, .beta2_decay = -0.5, .warmup_init = true, .eps_added = true}};
  return all;
}

// As torch::optim::Adafactor computes them, over tensors.
TEST(Adafactor, TwentyUpdatesAreTheFormulaInDouble) {
  for (const auto& adafactor : values()) {
    torch::manual_seed(23);
    const auto start = torch::randn({40, 24}).mul(0.1);
    for (const bool factored : {true, false}) {
      auto p = start.to(torch::kDouble);
      auto master = start.clone();
      auto exact = p.clone();
      auto vector = adafactor;
      vector.factored = false;
      auto row = torch::zeros({40, 1}, torch::kDouble),
           column = torch::zeros({1, 24}, torch::kDouble);
      auto moment = torch::zeros_like(p), in_double = torch::zeros_like(p);
      auto row_var = torch::zeros({40}), col_var = torch::zeros({24});
      auto exact_row = torch::zeros({40}, torch::kDouble),
           exact_column = torch::zeros({24}, torch::kDouble);
      auto variance = torch::zeros_like(start);
      bool clipped = false, unclipped = false;
      for (int64_t t = 1; t <= 20; ++t) {
        const auto gradient = torch::randn({40, 24}) * (t % 4 == 0 ? 5 : 0.5);
        const auto g = gradient.to(torch::kDouble);
        const double share = std::pow(static_cast<double>(t), adafactor.beta2_decay);
        const double eps = adafactor.first_eps();
        const bool added = adafactor.eps_added;
        double rate = adafactor.lr;
        if (adafactor.relative_step) rate = std::min(rate, 1 / std::sqrt(static_cast<double>(t)));
        if (adafactor.warmup_init) rate = std::min(rate, 1e-6 * static_cast<double>(t));
        const auto rms = [](const at::Tensor& x) {
          return x.norm().item<double>() / std::sqrt(static_cast<double>(x.numel()));
        };
        if (adafactor.scale_parameter) rate *= std::max(adafactor.eps2, rms(p));
        const auto square = g.square() + (added ? eps : 0);
        at::Tensor u;
        if (factored) {
          row = row.lerp(square.mean(1, true), share);
          column = column.lerp(square.mean(0, true), share);
          auto mean = row.mean();
          if (!added) mean = mean.clamp_min(eps);
          u = row.matmul(column) / mean;
        } else {
          moment = moment.lerp(square, share);
          u = moment;
        }
        if (!added) u = u.clamp_min(eps * eps);
        u = u.rsqrt() * g;
        (rms(u) > adafactor.d ? clipped : unclipped) = true;
        p = p * (1 - adafactor.lr * adafactor.weight_decay);
        p = p - u * (rate / std::max(1.0, rms(u) / adafactor.d));
        if (factored) {
          auto made = g.clone();
          double root = factored_directions_exact(
              adafactor, t, 40, 24, made.mutable_data_ptr<double>(),
              exact_row.mutable_data_ptr<double>(), exact_column.mutable_data_ptr<double>());
          EXPECT_NEAR(root, rms(u), 1e-12);
          EXPECT_TRUE(torch::allclose(made, u, 1e-12, 1e-14));
          update_matrix(adafactor, t, master, gradient, row_var, col_var);
        } else {
          Operands operands{.numel = 960, .master = floats(master), .gradient = floats(gradient)};
          operands.state[0] = floats(variance);
          update(vector, t, vector.lr, 1, operands);
          ExactOperands of{.numel = 960,
                           .weights = exact.mutable_data_ptr<double>(),
                           .gradient = g.const_data_ptr<double>()};
          of.state[0] = in_double.mutable_data_ptr<double>();
          update_exact(vector, t, vector.lr, of);
          EXPECT_TRUE(torch::allclose(exact, p, 1e-12, 1e-14)) << t;
        }
        ASSERT_TRUE(torch::allclose(master.to(torch::kDouble), p, 2e-6, 2e-6))
            << factored << " step " << t << ": " << (master - p).abs().max().item<double>();
      }
      EXPECT_TRUE(clipped && unclipped) << clipped << unclipped;
      if (factored) {
        EXPECT_TRUE(torch::allclose(row_var.to(torch::kDouble), row.view({-1}), 1e-6));
        EXPECT_TRUE(torch::allclose(col_var.to(torch::kDouble), column.view({-1}), 1e-6));
      }
    }
  }
}

TEST(Adafactor, NeverDividesByAMomentOfZero) {
  for (auto adafactor : {Adafactor{}, Adafactor{.eps1 = 1e-30}, Adafactor{.eps_added = true}}) {
    const auto master = torch::ones({4, 6});
    const auto gradient = torch::zeros({4, 6});
    const auto row_var = torch::zeros({4}), col_var = torch::zeros({6});
    update_matrix(adafactor, 1, master, gradient, row_var, col_var);
    EXPECT_TRUE(torch::equal(master, torch::ones({4, 6})));
    adafactor.factored = false;
    const auto variance = torch::zeros({24});
    Operands operands{.numel = 24, .master = floats(master), .gradient = floats(gradient)};
    operands.state[0] = floats(variance);
    update(adafactor, 1, adafactor.lr, 1, operands);
    EXPECT_TRUE(torch::equal(master, torch::ones({4, 6})));
  }
}

TEST(Adafactor, PassesEqualTheReferenceInBits) {
  const Optimizer adafactor = Adafactor{.weight_decay = 0.1};
  for (const auto dtype : dtypes()) {
    for (const int64_t numel : {1, 33, 2050}) {
      Array<float> master(numel, 3), expected(numel, 3);
      Array<uint16_t> gradient16(numel, 1);
      Array<float> gradient(numel, 2);
      Numbers numbers(5);
      void* from = dtype == c10::ScalarType::Float ? static_cast<void*>(gradient.data())
                                                   : static_cast<void*>(gradient16.data());
      for (int64_t i = 0; i < numel; ++i) {
        master.data()[i] = expected.data()[i] = numbers.next();
        narrow(from, dtype, i, numbers.next());
      }
      const auto operands = [&](Array<float>& weights) {
        return Operands{.numel = numel,
                        .master = weights.data(),
                        .gradient = from,
                        .gradient_dtype = dtype,
                        .gradient_limit = 0.25F};
      };
      std::vector<float> plain(static_cast<size_t>(numel));
      Findings wanted{.direction = plain.data()};
      first_sweep_reference(adafactor, 1, 0.37, operands(expected), wanted);
      auto second = operands(expected);
      second.gradient = plain.data();
      second.gradient_dtype = c10::ScalarType::Float;
      second_sweep_reference(adafactor, 1, 0.1, 1.5, second);
      on_each_instruction_set([&](const char* instructions) {
        auto weights = master;
        std::vector<float> fast(plain.size());
        Findings found{.direction = fast.data()};
        first_sweep(adafactor, 1, 0.37, operands(weights), found);
        EXPECT_EQ(found.norms.weights.value(), wanted.norms.weights.value()) << instructions;
        auto then = operands(weights);
        then.gradient = fast.data();
        then.gradient_dtype = c10::ScalarType::Float;
        then.gradient_limit = std::numeric_limits<float>::infinity();
        second_sweep(adafactor, 1, 0.1, 1.5, then);
        for (int64_t i = 0; i < numel; ++i) {
          const auto at = static_cast<size_t>(i);
          ASSERT_TRUE(same(fast[at], plain[at])) << instructions;
          ASSERT_TRUE(same(weights.data()[i], expected.data()[i])) << instructions;
        }
      });
    }
  }
}

}  // namespace
}  // namespace zero::optim
