#include "zero/models/layers/column_sums.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

namespace zero {
namespace {

void by_libtorch(at::Tensor& result, const at::Tensor& matrix) { at::sum_out(result, matrix, {0}); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def("column_sums_(Tensor(a!) result, Tensor matrix) -> ()");
}

TORCH_LIBRARY_IMPL(zero, CompositeExplicitAutograd, library) {
  library.impl("column_sums_", &by_libtorch);
}

void column_sums_into(at::Tensor& result, const at::Tensor& matrix) {
  if (matrix.is_cpu()) return by_libtorch(result, matrix);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zero::column_sums_", "")
                             .typed<void(at::Tensor&, const at::Tensor&)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  op.call(result, matrix);
}

}  // namespace zero
