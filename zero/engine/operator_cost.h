// Counts from shapes the FLOPs of an operator of LibTorch or of libzero.
//
// Note [What an operator counts]
// A multiply-accumulate (MAC) is 2 FLOPs. The table shows what counts. It is the count of
// DeepSpeed's flops profiler, except that a linear layer's bias counts here and the gates of
// recurrent layers do not:
//
//   matrix products     M K N MACs of (M, K) x (K, N), for each matrix of a batch; a bias, or what
//                       else is added to the product, 1 FLOP for each element of the result
//   convolutions        for each element of the result the weights that it meets: (in / groups) x
//                       the kernel's size; a transposed one for each element of the input the
//                       weights (out / groups) x the kernel's size; a bias as above
//   attention           of queries (..., T, E), keys (..., S, E) and values (..., S, V), whichever
//                       kernel does it: T S (E + V) MACs for each matrix of queries. A mask takes
//                       nothing away, a causal one neither; softmax and scale are not counted
//   recurrent layers    each weight matrix once for each token (LSTM, GRU and RNN as a whole; their
//                       gates are not counted)
//   normalisation       5 FLOPs for each element of the input, 4 without a weight
//   element by element  1 for each element of the result: sums, differences, products, quotients,
//                       powers, roots, exponentials, activations, softmax; where that is of floats
//   pooling             1 for each element of the input; upsampling 1 for each one of the result
//
// Everything else (views, copies, embeddings, dropout, comparisons, sorting, sums over a dimension)
// counts nothing. If operators call each other, the outermost one that counts is taken.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace zero {

struct OperatorCost {
  int64_t macs = 0;
  int64_t flops = 0;       ///< beside 2 a MAC
  int64_t of_element = 0;  ///< FLOPs for each element of the result
  int64_t macs_of_element = 0;

  bool needs_result() const { return of_element != 0 || macs_of_element != 0; }
  /// Return the totals for a result of `elements` elements.
  int64_t total_macs(int64_t elements) const { return macs + macs_of_element * elements; }
  int64_t total_flops(int64_t elements) const {
    return 2 * total_macs(elements) + flops + of_element * elements;
  }
};

/// Returns the cost of an operator by its name ("aten::addmm", "aten::add_") with these arguments,
/// or nothing if Note [What an operator counts] does not list it: then the operators that it calls
/// may count.
std::optional<OperatorCost> operator_cost(std::string_view name,
                                          c10::ArrayRef<const c10::IValue> inputs);

}  // namespace zero
