// Second moments that are kept by rows and columns (Adafactor, 1804.04235): R + C numbers for a
// matrix of R x C. If an array has more than two dimensions, its last two are those of matrices.
//
// Note [Sums by rows and columns]
// A matrix lies in the slices of several ranks, so the sums of squares of its rows and columns must
// not depend on the order of additions. If the matrix were gathered, as Muon does, 8 bytes an
// element would be sent (18.9 MB for 768 x 3072). Exact sums of 640 bits (exact_sum.h) would cost
// too much, since each element is added to two of them. So before a square is added, it is rounded
// to a multiple of a unit of its row or column. The unit is a power of two, so large that the
// largest square there, times the number of elements, is less than 2^53 units. All sums of such
// multiples are exact in fp64. The unit depends only on the largest element of the row and on the
// length of the row. Ranks therefore exchange data twice: first the exponent of the largest
// element, 1 byte for each row and column that a slice meets, then the sums, 8 bytes each (35 KB
// for 768 x 3072, for each of two ranks).
//
// The loss is small. In a row of n <= 2^L elements whose largest square is at least 2^(E - 2), a
// square is rounded by at most 2^(E + L - 54), and n squares by at most 2^(E + 2 L - 54), while the
// sum is 2^(E - 2) or more. For n = 3072 that is less than 2^-28 of the sum if all errors have the
// same sign. Real errors do not, and add up to less by a factor of about the root of n. fp32 holds
// 2^-24. Rows of small gradients beside rows of large ones lose nothing, since each row has its own
// unit.
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

/// Elements [begin, end) of an array.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

/// Says how the elements of a parameter, in the order of its storage, lie in rows and columns. The
/// rows of all its matrices are numbered one after the other, and so are the columns.
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
  /// Return the shapes of the row and column moments, as PyTorch has them: the last dimension, or
  /// the one before it, is 1.
  const std::vector<int64_t>& row_shape() const { return row_shape_; }
  const std::vector<int64_t>& column_shape() const { return column_shape_; }

  /// Rows and columns that contain all of elements [begin, end), and perhaps some more.
  struct Part {
    Interval rows;
    Interval columns;
    int64_t size() const { return rows.size() + columns.size(); }
  };
  Part part(Interval elements) const;

  /// Elements that follow each other along one dimension.
  struct Run {
    int64_t begin = 0;  ///< in the order of the storage
    int64_t numel = 0;
    int64_t row = 0;  ///< row and column of the first element
    int64_t column = 0;
  };
  /// Return the distance in rows, and in columns, from one element of a run to the next.
  int64_t row_step() const { return axes_.back().row_step; }
  int64_t column_step() const { return axes_.back().column_step; }
  /// Calls f(run) for each run of elements [begin, end), in order.
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
  // Returns the row and the column of an element.
  std::array<int64_t, 2> place(int64_t element) const;

  c10::SmallVector<Axis, 4> axes_;  // of the storage; the innermost is last
  int64_t matrices_ = 1;
  int64_t row_length_ = 1;
  int64_t column_length_ = 1;
  std::vector<int64_t> row_shape_;
  std::vector<int64_t> column_shape_;
};

// In the functions below `values` points to the fp32 elements [elements.begin, elements.end);
// arrays by rows and columns have a number for each row or column of the whole parameter. The
// functions run on LibTorch's intra-op threads and give the same bits on any number of them. They
// are vectorised with run-time dispatch.

/// Raises the exponent of each row and column to that of its largest element. An exponent is biased
/// as in fp32, and 255 if a number is not finite.
void raise_exponents(const Factors& factors, Interval elements, const float* values, uint8_t* rows,
                     uint8_t* columns);
/// Adds squares, rounded as the exponents say, to the sums of rows and columns.
void add_squares(const Factors& factors, Interval elements, const float* values,
                 const uint8_t* row_exponents, const uint8_t* column_exponents, double* rows,
                 double* columns);
/// Makes new moments from the sums, in place of the old ones, and the factors by which a gradient
/// becomes a direction.
void update_moments(const Adafactor& optimizer, int64_t step, const Factors& factors,
                    const double* row_sums, const double* column_sums, float* row_var,
                    float* col_var, float* row_factors, float* column_factors);
/// Replaces gradients by directions, and adds their squares to `squares`. `elements` begin at a
/// multiple of ExactSum::kBlock, and end at one or at the end of the parameter.
void make_directions(const Adafactor& optimizer, const Factors& factors, Interval elements,
                     const float* row_factors, const float* column_factors, float* values,
                     ExactSum& squares);

/// Calls all functions above for a whole parameter: `values` become directions.
void factored_directions(const Adafactor& optimizer, int64_t step, const Factors& factors,
                         float* values, float* row_var, float* col_var, ExactSum& squares);
/// Does the same as `factored_directions`, in plain loops.
void factored_directions_reference(const Adafactor& optimizer, int64_t step, const Factors& factors,
                                   float* values, float* row_var, float* col_var,
                                   ExactSum& squares);
/// Does the same for one matrix in double, without rounding to units. Other implementations are
/// compared with it. `values` are in row order. Returns the root of the mean square of the
/// directions.
double factored_directions_exact(const Adafactor& optimizer, int64_t step, int64_t rows,
                                 int64_t columns, double* values, double* row_var, double* col_var);

}  // namespace zero::optim
