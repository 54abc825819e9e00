// Operators that give the same bits each time.
//
// Note [Deterministic operators]
// On a CPU an operator gives the same bits for the same inputs and the same number of threads. On a
// GPU some of LibTorch's operators add by atomics, in an order that nobody knows: the backward
// passes of attention, of embeddings and of indexing. Then the stages of ZeRO differ in the last
// bits, and so does a run from itself. LibTorch has other kernels for most of these operators, and
// names those for which it has none. cuBLAS needs a workspace of a fixed size, which it reads from
// CUBLAS_WORKSPACE_CONFIG when it starts. libzero's own kernels use no atomics.
#pragma once

namespace zero {

/// While a scope lives, LibTorch takes deterministic operators on all devices, and throws for those
/// of which it has none. It is a setting of the whole process: scopes nest, and do not overlap on
/// different threads. A scope that is made with false does nothing.
class DeterministicOperators {
 public:
  explicit DeterministicOperators(bool on = true);
  ~DeterministicOperators();
  DeterministicOperators(const DeterministicOperators&) = delete;
  DeterministicOperators& operator=(const DeterministicOperators&) = delete;
  /// Returns whether LibTorch is asked for deterministic operators now.
  static bool active();

 private:
  bool on_;
  bool before_ = false, before_warns_ = false, before_fills_ = false;
  bool before_cudnn_ = false, before_benchmarks_ = false;
};

}  // namespace zero
