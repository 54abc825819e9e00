// The tables that papers and other projects have published, beside what the planner's formulas and
// its model of a transformer's step say.
//
// Note [Published tables]
// Memory follows from formulas alone. Times come from a transformer's layers: products of matrices
// at a part `e` of the peak, with `c` times the time of their operands' bytes; attention;
// element-wise traffic; collectives in two levels; copies; updates. Each stack of software has one
// pair (e, c), fitted on two of its rows, which are marked and not tested. Each row says where its
// configuration is from: the paper's own text, tables or pictures, or memory of its appendix, which
// no text at hand confirmed; the latter are shown and not tested either. These rows have kernels
// and parallelism that libzero has not, so they say nothing of `zero plan` itself. The row of
// libzero is planned as `zero plan` does it.
#pragma once

#include <string>
#include <vector>

namespace zero::plan {

struct PublishedRow {
  std::string table;  ///< "ZeRO Figure 3"
  std::string name;   ///< "60 B, 64 GPUs"
  double published = 0;
  double predicted = 0;
  std::string unit;
  /// The relative error that the row may have; 0: it is shown, and not tested, as `note` says.
  double tolerance = 0;
  std::string note;

  double error() const { return published == 0 ? 0 : predicted / published - 1; }
  bool passes() const { return tolerance == 0 || (error() <= tolerance && error() >= -tolerance); }
};

/// Computes all rows.
std::vector<PublishedRow> published_rows();

}  // namespace zero::plan
