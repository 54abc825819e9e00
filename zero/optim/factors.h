// Second moments that are kept by rows and columns (Adafactor, 1804.04235): R + C numbers of a
// matrix of R x C. Of more dimensions than two the last ones are those of matrices.
//
// Note [Sums by rows and columns]
// A matrix lies in the slices of several ranks, so the sums of squares of its rows and columns
// must not depend on the order of additions. Gathering the matrix, as Muon does, would send 8 bytes
// an element (18.9 MB of 768 x 3072); exact sums of 640 bits (exact_sum.h) cost too much for an
// addition to two of them an element. So before it is added a square is rounded to a multiple of a
// unit, a power of two, of its row or column: the largest square there, times the number of
// elements, is less than 2^53 of them, and all sums of such multiples are exact in fp64. The unit
// depends on the largest element of the row and on the length of the row alone. Ranks therefore
// exchange twice: the exponent of the largest element, 1 byte of each row and column that a slice
// meets, then the sums, 8 bytes (35 KB of 768 x 3072, of each of two ranks).
//
// The loss is small. In a row of n <= 2^L elements whose largest square is at least 2^(E - 2), a
// square is rounded by at most 2^(E + L - 54), and n of them by at most 2^(E + 2 L - 54), where the
// sum is 2^(E - 2) or more. For n = 3072 that is less than 2^-28 of the sum if all errors were
// alike, and about the root of n less as they are: fp32 holds 2^-24. Rows of small gradients
// beside large ones lose nothing, since each has a unit of its own.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "zero/optim/exact_sum.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

/// Elements [begin, end) of something.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

/// How the elements of a parameter, in the order of its storage, lie in rows and columns. Those of
/// all its matrices are numbered one after the other.
class Factors {
 public:
  /// Takes the shape of a dense parameter of two or more dimensions. One without elements has no
  /// statistics.
  Factors(c10::IntArrayRef sizes, c10::IntArrayRef strides);

  int64_t rows() const { return matrices_ * column_length_; }
  int64_t columns() const { return matrices_ * row_length_; }
  int64_t row_length() const { return row_length_; }
  int64_t column_length() const { return column_length_; }
  int64_t matrices() const { return matrices_; }
  /// Shapes of what is kept, as PyTorch has them: the last dimension, or the one before, is 1.
  const std::vector<int64_t>& row_shape() const { return row_shape_; }
  const std::vector<int64_t>& column_shape() const { return column_shape_; }

  /// Rows and columns that elements [begin, end) lie in, at least.
  struct Part {
    Interval rows;
    Interval columns;
    int64_t size() const { return rows.size() + columns.size(); }
  };
  Part part(Interval elements) const;

  /// Elements that follow each other along one dimension.
  struct Run {
    int64_t begin = 0;  ///< in the storage's order
    int64_t numel = 0;
    int64_t row = 0;  ///< of the first
    int64_t column = 0;
  };
  /// From one element of a run to the next.
  int64_t row_step() const { return axes_.back().row_step; }
  int64_t column_step() const { return axes_.back().column_step; }
  /// Calls f(run) for those of [begin, end), in order.
  template <class F>
  void for_each_run(Interval elements, const F& f) const {
    const int64_t length = axes_.back().size;
    for (int64_t i = elements.begin; i < elements.end;) {
      const int64_t end = std::min(elements.end, (i / length + 1) * length);
      const auto at = place(i);
      f(Run{i, end - i, at[0], at[1]});
      i = end;
    }
  }

 private:
  struct Axis {
    int64_t size = 1;
    int64_t row_step = 0;
    int64_t column_step = 0;
  };
  // Row and column of an element.
  std::array<int64_t, 2> place(int64_t element) const;

  c10::SmallVector<Axis, 4> axes_;  // of the storage, the innermost last
  int64_t matrices_ = 1;
  int64_t row_length_ = 1;
  int64_t column_length_ = 1;
  std::vector<int64_t> row_shape_;
  std::vector<int64_t> column_shape_;
};

// `values` are all fp32 elements of [elements.begin, elements.end), from the first on; arrays by
// rows and columns have those of the whole parameter. On LibTorch's intra-op threads, with the same
// bits on any number of them; vectorised with run-time dispatch.

/// Raises exponents (biased as fp32 has them, 255 where a number is not finite) to those of the
/// largest elements.
void raise_exponents(const Factors& factors, Interval elements, const float* values, uint8_t* rows,
                     uint8_t* columns);
/// Adds squares, rounded as the exponents say, to sums.
void add_squares(const Factors& factors, Interval elements, const float* values,
                 const uint8_t* row_exponents, const uint8_t* column_exponents, double* rows,
                 double* columns);
/// The new moments from sums, in place of the old, and the factors that make a direction of a
/// gradient.
void update_moments(const Adafactor& optimizer, int64_t step, const Factors& factors,
                    const double* row_sums, const double* column_sums, float* row_var,
                    float* col_var, float* row_factors, float* column_factors);
/// The directions in place of gradients, and their squares. `elements` begin at a multiple of
/// ExactSum::kBlock and end at one, or at the parameter's end.
void make_directions(const Adafactor& optimizer, const Factors& factors, Interval elements,
                     const float* row_factors, const float* column_factors, float* values,
                     ExactSum& squares);

/// Makes all the above calls for a whole parameter: `values` become directions.
void factored_directions(const Adafactor& optimizer, int64_t step, const Factors& factors,
                         float* values, float* row_var, float* col_var, ExactSum& squares);
/// The same in plain loops.
void factored_directions_reference(const Adafactor& optimizer, int64_t step, const Factors& factors,
                                   float* values, float* row_var, float* col_var,
                                   ExactSum& squares);
/// The same of one matrix in double, without rounding to units: what other implementations are
/// compared with. `values` by rows; returns the root of the mean square of the directions.
double factored_directions_exact(const Adafactor& optimizer, int64_t step, int64_t rows,
                                 int64_t columns, double* values, double* row_var, double* col_var);

}  // namespace zero::optim
