// Numbers of threads on which a result must not depend.
#pragma once

#include <vector>

namespace zero {

/// One alone in builds without OpenMP (those of sanitizers): parallel loops of ours are serial
/// there, and the matrix products inside them, which would be serial otherwise, take the threads.
inline std::vector<int> thread_counts() {
#ifdef _OPENMP
  return {1, 2, 3};
#else
  return {1};
#endif
}

}  // namespace zero
