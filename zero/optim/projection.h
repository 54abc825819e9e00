// The work of APOLLO (2412.05270, algorithm 1) on a whole matrix, between its two sweeps.
//
// Note [Projections]
// AdamW moves an element by its first moment over the root of its second. APOLLO moves a channel of
// m elements along its raw gradient g, by a factor s for the whole channel. For s it projects g to
// r numbers, P g, with a random P whose numbers are normal with variance 1/r. AdamW's moments of
// these r numbers give the update u that AdamW would make of P g, and s is |u| over |P g|. So 2 r
// numbers are kept in place of 2 m. A random projection nearly keeps lengths, but u has r elements
// near 1 in place of m. Hence s is about sqrt(r / m) of the factor by which AdamW would change the
// length of g (the paper's theorem 3), and rates are higher than AdamW's. With Scaling::tensor one
// s for the whole matrix is |u| over |P g| of all channels together. Then the limiter keeps the
// norm of the matrix's update from growing too fast.
//
// P is not kept: it is drawn again for each update, from a hash of the parameter's name, the seed
// and the number of updates over update_proj_gap. So it does not depend on ranks, stages or the
// order of parameters, and a run that resumes has the same. Moments stay when P changes, as in the
// paper.
//
// One rank projects a matrix, has its states, and tells the others the factors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "zero/optim/factors.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

/// Says how a matrix falls into channels, and how many numbers stand for one.
struct Projection {
  int64_t channels = 0;  ///< the larger side of the matrix: its rows, unless there are fewer
  int64_t length = 0;    ///< elements of a channel: the smaller side
  int64_t rank = 0;      ///< numbers of a projected channel: Apollo::rank, at most `length`
  bool by_rows = true;   ///< channels are rows in the order of the storage
};

/// Returns how `optimizer` projects a dense parameter; nothing if it is not Apollo, or if the
/// parameter is no matrix or has no elements.
std::optional<Projection> projection_of(const Optimizer& optimizer, c10::IntArrayRef sizes,
                                        c10::IntArrayRef strides);

/// Draws P for update number `step` of a parameter: (length, rank) numbers, by rows. The same bits
/// on any number of threads.
void draw_projection(const Apollo& optimizer, std::string_view parameter, int64_t step,
                     const Projection& projection, float* values);

/// The states of a matrix: factored_states has their sizes.
struct ProjectedStates {
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  float* update_norm = nullptr;
};
/// Makes update number `step` of the states from a gradient (2-D, fp32, in the order of the
/// storage). Returns the factors of its channels, by which the gradient becomes the direction that
/// is multiplied by lr. The same bits on any number of threads.
at::Tensor channel_factors(const Apollo& optimizer, std::string_view parameter, int64_t step,
                           const Projection& projection, const at::Tensor& gradient,
                           const ProjectedStates& states);

/// Multiplies elements of a gradient, in the order of the storage, by their channels' factors.
/// `values` points to the first of them.
void scale_channels(const Projection& projection, Interval elements, const float* factors,
                    float* values);

/// The states in double, as ProjectedStates has them in fp32.
struct ExactProjectedStates {
  double* exp_avg = nullptr;
  double* exp_avg_sq = nullptr;
  double* update_norm = nullptr;
};
/// Does the same as the two functions above for a whole matrix, in plain loops in double: a
/// gradient, in the order of the storage, becomes the direction. Tests compare with it.
void projected_direction_exact(const Apollo& optimizer, std::string_view parameter, int64_t step,
                               const Projection& projection, double* values,
                               const ExactProjectedStates& states);

}  // namespace zero::optim
