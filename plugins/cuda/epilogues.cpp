// The operators of Note [Epilogues of products] (zero/models/layers/feed_forward.h) by cuBLASLt,
// with its epilogues GELU_AUX_BIAS and DGELU_BGRAD.
//
// Note [Products of cuBLASLt]
// cuBLASLt takes matrices by columns, and LibTorch's lie by rows, so that each is the other's
// transpose. D = X B, with D (M, N) and X (M, K) by rows, is calculated as D^T = B^T X^T:
//
//   here                             for cuBLASLt
//   D (M, N) by rows                 D (N, M) by columns, N apart; so are the arguments of GELU
//   X (M, K) by rows                 its second factor (K, M) by columns, K apart, as it is
//   B that lies as (K, N) by rows    its first factor (N, K) by columns, N apart, as it is
//   B that lies as (N, K) by rows    its first factor (K, N) by columns, K apart, transposed
//   the bias of N columns            a vector as long as its D has rows
//
// Sums are in fp32, partial ones too: LibTorch's own products may add rounded ones. The vector of a
// bias, its gradient and the arguments of GELU have the dtype of D, of which cuBLASLt has no other
// choice for 16 bits. Gradients that are collected in fp32 are not written there in place, as with
// other layers (zero::gradient_place). fp32 itself stays with LibTorch's products and libzero's
// GELU: how exact cuBLASLt's GELU is in fp32 is not documented.
//
// An algorithm is chosen once for each shape, for arrays that begin at multiples of 16 bytes and no
// more, whatever these here have: so stages whose parameters lie elsewhere have the same bits.
// Arrays that do not, and shapes for which cuBLASLt has no algorithm, are multiplied by LibTorch,
// with libzero's kernels beside.
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zero.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "zero/models/layers/column_sums.h"
#include "zero/models/layers/feed_forward.h"
#include "zero/models/layers/gelu.h"
#include "zero/models/layers/matmul.h"

namespace zero::cuda {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

constexpr uint32_t kAlignment = 16;  // bytes

/// A product with an epilogue: D (rows, columns) of X (rows, depth).
struct Product {
  const char* name;  ///< of the operator
  cublasLtEpilogue_t epilogue;
  at::ScalarType dtype;
  int64_t rows, columns, depth;
  bool transposed;  ///< the matrix lies as (columns, depth)
  const void *x, *matrix;
  void *d, *aux;
  void* bias;  ///< or its gradient; may be null
};

void check(cublasStatus_t status, const Product& p, const char* call) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, p.name, ": ", call, " failed for ", p.rows,
              " rows of ", p.depth, " numbers by ", p.columns,
              " columns: ", cublasLtGetStatusString(status));
}

/// An object of cuBLASLt.
template <class Object, cublasStatus_t (*Destroy)(Object*)>
using Owned = std::unique_ptr<Object, decltype([](Object* object) { Destroy(object); })>;

/// Tells cuBLASLt about a product.
class Description {
 public:
  explicit Description(const Product& p) : p_(p) {
    const auto dtype = p.dtype == at::kHalf ? CUDA_R_16F : CUDA_R_16BF;
    cublasLtMatmulDesc_t made = nullptr;
    check(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), p,
          "cublasLtMatmulDescCreate");
    product.reset(made);
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.columns);
    const auto laid_out = [&](int64_t rows, int64_t columns) {
      cublasLtMatrixLayout_t layout = nullptr;
      check(cublasLtMatrixLayoutCreate(&layout, dtype, static_cast<uint64_t>(rows),
                                       static_cast<uint64_t>(columns), rows),
            p, "cublasLtMatrixLayoutCreate");
      return Layout(layout);
    };
    a = p.transposed ? laid_out(p.depth, p.columns) : laid_out(p.columns, p.depth);
    b = laid_out(p.depth, p.rows);
    d = laid_out(p.columns, p.rows);
  }
  void point_to(const void* bias, const void* aux) {
    if (p_.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
  }

  using Layout = Owned<cublasLtMatrixLayoutOpaque_t, &cublasLtMatrixLayoutDestroy>;
  Owned<cublasLtMatmulDescOpaque_t, &cublasLtMatmulDescDestroy> product;
  Layout a, b, d;

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(product.get(), attribute, &value, sizeof value), p_,
          "cublasLtMatmulDescSetAttribute");
  }
  const Product& p_;
};

std::optional<cublasLtMatmulAlgo_t> choose(const Product& p, Description& description,
                                           size_t workspace) {
  // Addresses alone, which tell the alignment: nothing is read.
  const auto* aligned = reinterpret_cast<const void*>(static_cast<uintptr_t>(kAlignment));
  description.point_to(aligned, aligned);
  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), p, "cublasLtMatmulPreferenceCreate");
  const Owned<cublasLtMatmulPreferenceOpaque_t, &cublasLtMatmulPreferenceDestroy> preference(made);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
          p, "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(attribute, kAlignment);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const auto status = cublasLtMatmulAlgoGetHeuristic(
      at::cuda::getCurrentCUDABlasLtHandle(), description.product.get(), description.a.get(),
      description.b.get(), description.d.get(), description.d.get(), preference.get(), 1, &found,
      &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return std::nullopt;
  check(status, p, "cublasLtMatmulAlgoGetHeuristic");
  if (count == 0 || found.state != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  return found.algo;
}

std::optional<cublasLtMatmulAlgo_t> algorithm_of(const Product& p, Description& description,
                                                 size_t workspace) {
  using Key = std::array<int64_t, 8>;
  static std::mutex mutex;
  static std::map<Key, std::optional<cublasLtMatmulAlgo_t>> known;
  const Key key{c10::cuda::current_device(),
                static_cast<int64_t>(p.epilogue),
                static_cast<int64_t>(p.dtype),
                p.rows,
                p.columns,
                p.depth,
                static_cast<int64_t>(p.transposed),
                static_cast<int64_t>(workspace)};
  const std::lock_guard lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known.emplace(key, choose(p, description, workspace)).first->second;
}

/// Enqueues it on the current stream; false, and nothing is enqueued, where cuBLASLt cannot.
bool multiply(const Product& p) {
  for (const void* array : {p.x, p.matrix, static_cast<const void*>(p.d),
                            static_cast<const void*>(p.aux), static_cast<const void*>(p.bias)})
    if (reinterpret_cast<uintptr_t>(array) % kAlignment != 0) return false;
  constexpr int64_t kMultiple = 8;  // of the numbers between rows of the arguments of GELU
  if (p.columns % kMultiple != 0) return false;
  Description description(p);
  // LibTorch's, of its own products on this stream: nothing more is taken.
  const auto workspace = at::cuda::getCUDABlasLtWorkspaceSize();
  const auto algorithm = algorithm_of(p, description, workspace);
  if (!algorithm) return false;
  description.point_to(p.bias, p.aux);
  const float alpha = 1, beta = 0;
  check(cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), description.product.get(), &alpha,
                       p.matrix, description.a.get(), p.x, description.b.get(), &beta, p.d,
                       description.d.get(), p.d, description.d.get(), &*algorithm,
                       at::cuda::getCUDABlasLtWorkspace(), workspace,
                       c10::cuda::getCurrentCUDAStream()),
        p, "cublasLtMatmul");
  return true;
}

void check_arrays(const char* name, const at::Tensor& x, const at::Tensor& weight, int64_t depth,
                  int64_t columns, const OptionalTensor& bias) {
  const auto beside = [&](const at::Tensor& array) {
    return array.is_contiguous() && array.device() == x.device() &&
           array.scalar_type() == x.scalar_type();
  };
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf, name,
              ": the arrays are in bf16 or fp16, and not ", x.scalar_type());
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && beside(x) && beside(weight) &&
                  x.size(1) == depth && (!bias || (beside(*bias) && bias->numel() == columns)),
              name, ": the arrays do not go together");
}

std::tuple<at::Tensor, at::Tensor> linear_gelu_on_cuda(const at::Tensor& x,
                                                       const at::Tensor& weight,
                                                       const OptionalTensor& bias,
                                                       bool transposed) {
  constexpr const char* kName = "zero::linear_gelu";
  const auto columns = weight.size(transposed ? 0 : 1);
  const auto depth = weight.size(transposed ? 1 : 0);
  check_arrays(kName, x, weight, depth, columns, bias);
  const c10::cuda::CUDAGuard guard(x.device());
  auto h = at::empty({x.size(0), columns}, x.options());
  auto y = at::empty_like(h);
  if (h.numel() == 0) return {h, y};
  const bool done =
      multiply({.name = kName,
                .epilogue = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX,
                .dtype = x.scalar_type(),
                .rows = x.size(0),
                .columns = columns,
                .depth = depth,
                .transposed = transposed,
                .x = x.const_data_ptr(),
                .matrix = weight.const_data_ptr(),
                .d = y.mutable_data_ptr(),
                .aux = h.mutable_data_ptr(),
                .bias = bias ? const_cast<void*>(bias->const_data_ptr()) : nullptr});
  if (done) return {h, y};
  h = product(x, transposed ? weight.t() : weight, bias.value_or(at::Tensor()));
  return {h, tanh_gelu_values(h)};
}

at::Tensor linear_gelu_backward_on_cuda(const at::Tensor& dy, const at::Tensor& weight,
                                        const at::Tensor& h, const OptionalTensor& bias_gradient,
                                        bool transposed) {
  constexpr const char* kName = "zero::linear_gelu_backward";
  const auto columns = weight.size(transposed ? 1 : 0);
  const auto depth = weight.size(transposed ? 0 : 1);
  check_arrays(kName, dy, weight, depth, columns, bias_gradient);
  TORCH_CHECK(h.is_contiguous() && h.dim() == 2 && h.size(0) == dy.size(0) &&
                  h.size(1) == columns && h.scalar_type() == dy.scalar_type() &&
                  h.device() == dy.device(),
              kName, ": the arguments of GELU do not go together with the gradient");
  const c10::cuda::CUDAGuard guard(dy.device());
  auto sums = bias_gradient.value_or(at::Tensor());
  auto dh = at::empty_like(h);
  if (dh.numel() == 0) {
    if (sums.defined()) sums.zero_();
    return dh;
  }
  const bool done =
      multiply({.name = kName,
                .epilogue = bias_gradient ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU,
                .dtype = dy.scalar_type(),
                .rows = dy.size(0),
                .columns = columns,
                .depth = depth,
                .transposed = !transposed,
                .x = dy.const_data_ptr(),
                .matrix = weight.const_data_ptr(),
                .d = dh.mutable_data_ptr(),
                .aux = const_cast<void*>(h.const_data_ptr()),
                .bias = sums.defined() ? sums.mutable_data_ptr() : nullptr});
  if (done) return dh;
  dh = product(dy, transposed ? weight : weight.t());
  tanh_gelu_gradient(h, dh, dh);
  if (sums.defined()) column_sums_into(sums, dh);
  return dh;
}

// llm.c, which has both ways too (llmc/matmul.cuh, gelu_fusion), leaves the fused one off, and
// notes that it may pay from compute capability 9.0 on (train_gpt2.cu).
bool faster_on_cuda(c10::DeviceIndex index) {
  constexpr int kFirst = 9;
  return at::cuda::getDeviceProperties(index)->major >= kFirst;
}

struct Registration {
  Registration() { set_epilogues_faster(c10::kCUDA, &faster_on_cuda); }
};
const Registration registration;

}  // namespace

TORCH_LIBRARY_IMPL(zero, CUDA, library) {
  library.impl("linear_gelu", &linear_gelu_on_cuda);
  library.impl("linear_gelu_backward", &linear_gelu_backward_on_cuda);
}

}  // namespace zero::cuda
