#include "zero/models/layers/matmul.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <cpuid.h>

#include <optional>
#include <string_view>

namespace zero {
namespace {

// Note [Which library multiplies]
// LibTorch multiplies bf16 matrices by oneDNN and fp32 ones by MKL. On processors that are not
// Intel's MKL runs a kernel for AVX2, while oneDNN generates code for what is there: on an AMD EPYC
// with AVX-512 it is 7 to 15 % faster for the shapes of a transformer, and takes two thirds of the
// time for the logits, whose odd number of columns MKL stores slowly. at::mm cannot be told to use
// it for fp32. The operator below is the one that torch.compile emits for its linear layers; it
// takes the second matrix as (N, K) with any strides, and cannot write into given memory.
using LinearOperator = at::Tensor(const at::Tensor&, const at::Tensor&,
                                  const std::optional<at::Tensor>&, std::string_view,
                                  c10::List<std::optional<at::Scalar>>,
                                  std::optional<std::string_view>);

std::optional<c10::TypedOperatorHandle<LinearOperator>> onednn_linear() {
  if (!at::globalContext().userEnabledMkldnn() || __builtin_cpu_is("intel")) return std::nullopt;
  const auto found =
      c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", std::string()});
  if (!found) return std::nullopt;
  return found->typed<LinearOperator>();
}

// clang knows the name "avx512fp16" only since its release 18.
bool multiplies_half() {
  constexpr unsigned kLeaf = 7, kFp16 = 1U << 23;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx512f") && __get_cpuid_count(kLeaf, 0, &a, &b, &c, &d) &&
         (d & kFp16) != 0;
}

// fp16 without instructions for it is multiplied by LibTorch's own loops, in 5 to 40 times the time
// of fp32 for the shapes of a transformer. So both matrices are widened, and the product is
// rounded: once, where the loops may round more often.
bool widens(const at::Tensor& a) {
  static const bool native = multiplies_half();
  return a.is_cpu() && a.scalar_type() == at::kHalf && !native;
}

// Below this many multiplications the longer way to oneDNN costs more than it saves.
constexpr int64_t kWorthwhile = int64_t{1} << 20;

bool row_or_column_major(const at::Tensor& matrix) {
  return matrix.is_contiguous() || matrix.t().is_contiguous();
}

bool suits(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat &&
         a.size(0) * a.size(1) * b.size(1) >= kWorthwhile && row_or_column_major(a) &&
         row_or_column_major(b);
}

}  // namespace

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  static const auto onednn = onednn_linear();
  if (widens(a)) {
    return product(a.to(at::kFloat), b.to(at::kFloat),
                   bias.defined() ? bias.to(at::kFloat) : at::Tensor())
        .to(at::kHalf);
  }
  if (!onednn || !suits(a, b)) return product_reference(a, b, bias);
  return onednn->call(a, b.t(), bias.defined() ? std::optional(bias) : std::nullopt, "none",
                      c10::List<std::optional<at::Scalar>>(), std::nullopt);
}

void product_into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b) {
  if (widens(a)) {
    result.copy_(product(a.to(at::kFloat), b.to(at::kFloat)));
  } else {
    at::mm_out(result, a, b);
  }
}

void add_product(at::Tensor& result, const at::Tensor& a, const at::Tensor& b) {
  if (widens(a)) {
    result.copy_(product(a.to(at::kFloat), b.to(at::kFloat)).add_(result));
  } else {
    result.addmm_(a, b);
  }
}

int64_t padded_rows(const at::Tensor& weight) {
  constexpr int64_t kMultiple = 64;
  const int64_t rows = weight.size(0);
  return weight.is_cuda() ? (rows + kMultiple - 1) / kMultiple * kMultiple : rows;
}

at::Tensor product_reference(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  return bias.defined() ? at::addmm(bias, a, b) : at::mm(a, b);
}

}  // namespace zero
