#include "zero/optim/product.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/addmm.h>

#include <algorithm>
#include <cstdint>

namespace zero::optim {

// The bits of a matrix product may depend on the number of threads that share it. So each thread
// takes whole panels of rows and multiplies alone, as LibTorch does inside a parallel loop. The
// loop has at least two turns, since LibTorch does not count a loop of one turn as parallel.
void product(const at::Tensor& c, double beta, double alpha, const at::Tensor& a,
             const at::Tensor& b) {
  if (!c.is_cpu()) {
    auto whole = c;
    at::addmm_out(whole, whole, a, b, beta, alpha);
    return;
  }
  constexpr int64_t kPanel = 128;
  const int64_t rows = a.size(0);
  at::parallel_for(0, std::max<int64_t>(2, at::ceil_div(rows, kPanel)), 1,
                   [&](int64_t first, int64_t last) {
                     for (int64_t panel = first; panel < last; ++panel) {
                       const int64_t begin = panel * kPanel;
                       const int64_t count = std::min(kPanel, rows - begin);
                       if (count <= 0) return;
                       auto part = c.narrow(0, begin, count);
                       at::addmm_out(part, part, a.narrow(0, begin, count), b, beta, alpha);
                     }
                   });
}

}  // namespace zero::optim
