// Makes matrices orthogonal, for Muon.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <string>
#include <vector>

#include "zero/base/error.h"
#include "zero/device/stream.h"
#include "zero/optim/operators.h"
#include "zero/optim/product.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {

namespace {

constexpr double kA = 3.4445;
constexpr double kB = -4.7750;
constexpr double kC = 2.0315;
constexpr double kLeastNorm = 1e-7;

}  // namespace

double ratio(int64_t rows, int64_t columns) {
  return std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
}

void orthogonalise(const at::Tensor& matrix, int64_t iterations) {
  ensure(matrix.dim() == 2 && matrix.is_contiguous() && matrix.scalar_type() == at::kFloat,
         "a matrix to be made orthogonal is of fp32 and contiguous");
  if (matrix.numel() == 0) return;
  const bool tall = matrix.size(0) > matrix.size(1);
  auto x = (tall ? matrix.t() : matrix).contiguous();
  if (is_asynchronous(matrix.device())) {  // which does not tell the host the norm
    const auto sums = at::empty({2}, matrix.options().dtype(at::kDouble));
    squared_norm(matrix.view({-1}), sums);
    x.div_(sums.select(0, 0).sqrt().add(kLeastNorm).to(at::kFloat));
  } else {
    const double norm =
        std::sqrt(squared_norm(matrix.const_data_ptr<float>(), at::kFloat, matrix.numel()).sum);
    x.div_(norm + kLeastNorm);
  }
  const int64_t side = x.size(0);
  auto next = at::empty_like(x);
  auto gram = at::empty({side, side}, x.options());
  auto factor = at::empty_like(gram);
  for (int64_t i = 0; i < iterations; ++i) {
    gram.zero_();
    product(gram, 0, 1, x, x.t());
    factor.copy_(gram);
    product(factor, kB, kC, gram, gram);
    next.copy_(x);
    product(next, kA, 1, factor, x);
    std::swap(x, next);
  }
  matrix.copy_(tall ? x.t() : x);
}

OrthogonalCost cost_of_orthogonalising(int64_t rows, int64_t columns, int64_t iterations) {
  const int64_t side = std::min(rows, columns);
  const int64_t numel = rows * columns;
  const int64_t copies = rows > columns ? 2 : 1;  // a tall matrix is turned into memory of its own
  const double products = 2.0 * static_cast<double>(side) *
                          (2 * static_cast<double>(numel) + static_cast<double>(side * side));
  return {.scratch_numel = copies * numel + 2 * side * side,
          .flops = static_cast<double>(iterations) * products};
}

void orthogonalise_reference(double* values, int64_t rows, int64_t columns, int64_t iterations) {
  using Matrix = std::vector<double>;
  const bool tall = rows > columns;
  const int64_t side = std::min(rows, columns);
  const int64_t length = std::max(rows, columns);
  const auto at = [](int64_t row, int64_t column, int64_t width) {
    return static_cast<size_t>(row * width + column);
  };
  double norm = 0;
  for (int64_t i = 0; i < rows * columns; ++i) norm += values[i] * values[i];
  norm = std::sqrt(norm) + kLeastNorm;
  Matrix x(static_cast<size_t>(rows * columns));
  const auto place = [&](int64_t i, int64_t j) { return tall ? j * columns + i : i * columns + j; };
  for (int64_t i = 0; i < side; ++i) {
    for (int64_t j = 0; j < length; ++j) x[at(i, j, length)] = values[place(i, j)] / norm;
  }
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    Matrix gram(static_cast<size_t>(side * side));
    for (int64_t i = 0; i < side; ++i) {
      for (int64_t j = 0; j < side; ++j) {
        for (int64_t k = 0; k < length; ++k)
          gram[at(i, j, side)] += x[at(i, k, length)] * x[at(j, k, length)];
      }
    }
    Matrix next(x.size());
    for (int64_t i = 0; i < side; ++i) {
      Matrix row(static_cast<size_t>(side));
      for (int64_t j = 0; j < side; ++j) {
        double squared = 0;
        for (int64_t k = 0; k < side; ++k) squared += gram[at(i, k, side)] * gram[at(k, j, side)];
        row[static_cast<size_t>(j)] = kB * gram[at(i, j, side)] + kC * squared;
      }
      for (int64_t j = 0; j < length; ++j) {
        double sum = kA * x[at(i, j, length)];
        for (int64_t k = 0; k < side; ++k) sum += row[static_cast<size_t>(k)] * x[at(k, j, length)];
        next[at(i, j, length)] = sum;
      }
    }
    x = std::move(next);
  }
  for (int64_t i = 0; i < side; ++i) {
    for (int64_t j = 0; j < length; ++j) values[place(i, j)] = x[at(i, j, length)];
  }
}

bool is_hidden_matrix(std::string_view name, int64_t dimensions) {
  if (dimensions != 2) return false;
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const auto* word : {"embed", "lm_head", "wte", "wpe"}) {
    if (lower.find(word) != std::string::npos) return false;
  }
  return true;
}

}  // namespace zero::optim
