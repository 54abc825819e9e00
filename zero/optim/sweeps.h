// Updates in two sweeps, for optimizers whose elements depend on their whole parameter.
//
// Note [Two sweeps]
// The first sweep over a slice updates the states and collects the slice's share of what the second
// sweep needs to know of the whole parameter. It leaves the weights as they are. The ranks combine
// their shares, and then the second sweep updates the weights.
//   LAMB: the shares are norms of the parameter and of its update (exact_sum.h). The second sweep
//         computes the update again from states and weights, so that it needs neither gradients nor
//         memory.
//   Muon: the share is the direction of the slice. Whole matrices are made orthogonal, and their
//         slices come back.
//   Apollo: the share is the gradient of the slice. Whole matrices are projected to a few numbers a
//         channel, from which each slice learns the factors of its channels (projection.h).
//   Adafactor: sums of squares of rows and columns turn gradients into directions (factors.h), and
//         then the shares are norms of the parameter and of the directions.
// Results depend neither on slices nor on blocks, threads, stages or tiers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "zero/optim/exact_sum.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

/// Says what the update of an element depends on: on the element alone; also on the norms of its
/// parameter; on the matrix that it is in; or on norms and on the sums of its row and column.
enum class Reach : uint8_t { element, parameter, matrix, factors };
Reach reach(const Optimizer& optimizer);
/// Returns whether the second sweep needs the first sweep's Findings::direction.
bool keeps_direction(const Optimizer& optimizer);

/// Sums of squares over the elements of a parameter that have been swept so far.
struct ParameterNorms {
  ExactSum weights;
  ExactSum update;
  void add(const ParameterNorms& other) {
    weights.add(other.weights);
    update.add(other.update);
  }
};

/// The results of a first sweep.
struct Findings {
  ParameterNorms norms{};      ///< for Reach::parameter; for Reach::factors only the weights' norm
  float* direction = nullptr;  ///< with keeps_direction: as many elements as the operands have
};

/// Makes the first sweep over `operands`. (On a device it is enqueued, and only Muon has one
/// there.) The operands begin at a multiple of ExactSum::kBlock elements of its parameter, and end
/// at one or at the end of the parameter. Adds to `findings`.
void first_sweep(const Optimizer& optimizer, int64_t step, double gradient_scale,
                 const Operands& operands, Findings& findings);
void first_sweep_reference(const Optimizer& optimizer, int64_t step, double gradient_scale,
                           const Operands& operands, Findings& findings);

/// Returns the ratio that the norms of `numel` elements give (Reach::parameter, Reach::factors).
double ratio(const Optimizer& optimizer, const ParameterNorms& norms, int64_t numel);
/// Returns the ratio that a matrix's shape gives (Muon).
double ratio(int64_t rows, int64_t columns);

/// Makes the second sweep, which is enqueued on a device. `operands` have no gradient. With
/// keeps_direction they have the direction in its place: the one that was made from the whole
/// matrix for Reach::matrix, and from the gradient for Reach::factors.
void second_sweep(const Optimizer& optimizer, int64_t step, double lr, double ratio,
                  const Operands& operands);
void second_sweep_reference(const Optimizer& optimizer, int64_t step, double lr, double ratio,
                            const Operands& operands);

/// Makes a matrix (2-D, fp32, contiguous) nearly orthogonal in place; on a device this is enqueued.
/// It divides the matrix by its
/// Frobenius norm, and then makes `iterations` Newton-Schulz iterations with the coefficients
/// 3.4445, -4.775 and 2.0315, after which all singular values are near 1. Gives the same bits on
/// any number of threads of the host.
void orthogonalise(const at::Tensor& matrix, int64_t iterations);
/// Tells what `orthogonalise` takes.
struct OrthogonalCost {
  int64_t scratch_numel = 0;  ///< elements of fp32 beside the matrix
  double flops = 0;           ///< of its products, a multiply-add counted as two
};
OrthogonalCost cost_of_orthogonalising(int64_t rows, int64_t columns, int64_t iterations);
/// Does the same as `orthogonalise` in plain loops in double; `values` are in row order.
void orthogonalise_reference(double* values, int64_t rows, int64_t columns, int64_t iterations);

/// Returns the AdamW for the parameters in an optimizer's groups that are not hidden matrices;
/// nothing if the optimizer trains all parameters itself. Muon and Apollo train hidden matrices.
std::optional<AdamW> beside_matrices(const Optimizer& optimizer);
/// Returns the optimizer's own number that gives this AdamW another rate, or null if it has none.
std::optional<double>* rate_beside_matrices(Optimizer& optimizer);
/// Returns whether a parameter is a hidden matrix: one of two dimensions whose name does not say
/// that it is an embedding or an output layer (embed, lm_head, wte, wpe). DeepSpeed's Muon also
/// takes parameters of more dimensions, and GPT-2's wte and wpe.
bool is_hidden_matrix(std::string_view name, int64_t dimensions);
/// Returns the optimizer of a parameter in a group of `optimizer`: the AdamW beside it, or the
/// optimizer itself as it is `suited`.
Optimizer optimizer_for(const Optimizer& optimizer, std::string_view name, int64_t dimensions);

}  // namespace zero::optim
