// Updates in two passes, of optimizers whose elements depend on their whole parameter.
//
// Note [Two passes]
// The first pass over a slice updates the states, and finds out what the slice can say of the
// parameter; weights stay. The ranks put that together; then the second pass updates the weights.
//   LAMB: norms of the parameter and of its update (exact_sum.h); the second pass computes the
//         update again from states and weights, so that it needs neither gradients nor memory.
//   Muon: the direction of the slice; whole matrices are made orthogonal, and come back.
//   Adafactor: sums of squares of rows and columns make directions of gradients (factors.h); norms
//         of the parameter and of these follow.
// Results depend neither on slices nor on blocks, threads, stages or tiers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/optim/exact_sum.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

/// An element's update depends on itself, on its parameter's norms, on the matrix that it is in, or
/// on norms and the sums of its row and column.
enum class Reach : uint8_t { element, parameter, matrix, factors };
Reach reach(const Optimizer& optimizer);
/// The second pass needs what the first left in Findings::direction.
bool keeps_direction(const Optimizer& optimizer);

/// Sums of squares over a parameter, as far as it has been passed.
struct ParameterNorms {
  ExactSum weights;
  ExactSum update;
  void add(const ParameterNorms& other) {
    weights.add(other.weights);
    update.add(other.update);
  }
};

/// The results of a first pass.
struct Findings {
  ParameterNorms norms{};      ///< Reach::parameter; of Reach::factors that of the weights
  float* direction = nullptr;  ///< with keeps_direction: as many elements as the range
};

/// The first pass over `range`, which begins at a multiple of ExactSum::kBlock elements of its
/// parameter and ends at one or at the parameter's end. Adds to `findings`.
void first_pass(const Optimizer& optimizer, int64_t step, double gradient_scale, const Range& range,
                Findings& findings);
void first_pass_reference(const Optimizer& optimizer, int64_t step, double gradient_scale,
                          const Range& range, Findings& findings);

/// Returns the ratio that the norms of `numel` elements give (Reach::parameter, Reach::factors).
double ratio(const Optimizer& optimizer, const ParameterNorms& norms, int64_t numel);
/// Returns the ratio that a matrix's shape gives (Reach::matrix).
double ratio(int64_t rows, int64_t columns);

/// The second pass. `range` has no gradient, but with keeps_direction the direction: of
/// Reach::matrix made orthogonal, of Reach::factors made of the gradient.
void second_pass(const Optimizer& optimizer, int64_t step, double lr, double ratio,
                 const Range& range);
void second_pass_reference(const Optimizer& optimizer, int64_t step, double lr, double ratio,
                           const Range& range);

/// Makes a matrix (2-D, fp32, contiguous) about orthogonal in place, by as many Newton-Schulz
/// iterations with the coefficients 3.4445, -4.775 and 2.0315, after dividing it by its Frobenius
/// norm: all singular values come near 1. The same bits on any number of threads.
void orthogonalise(const at::Tensor& matrix, int64_t iterations);
/// The same in plain loops in double; `values` by rows.
void orthogonalise_reference(double* values, int64_t rows, int64_t columns, int64_t iterations);

/// The AdamW of the parameters in Muon's groups that are no hidden matrices.
AdamW beside_matrices(const Muon& muon);
/// Muon's choice: of two dimensions, and no embedding or output layer by its name (embed, lm_head,
/// wte, wpe). DeepSpeed's also takes parameters of more dimensions, and GPT-2's wte and wpe.
bool is_hidden_matrix(std::string_view name, const at::Tensor& parameter);

}  // namespace zero::optim
