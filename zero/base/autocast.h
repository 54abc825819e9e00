// LibTorch's autocast as a scope: LibTorch's C++ interface has none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <array>
#include <optional>

namespace zero {

/// While a scope lives, operators that this thread calls cast as torch.autocast does in Python:
/// matrix products and convolutions take their fp32 inputs in a dtype of 16 bits. So do
/// zero::linear, zero::gelu_linear and zero::linear_cross_entropy.
///
///   auto loss = [&] {
///     const zero::Autocast casts(at::kBFloat16);
///     return loss_of(model->forward(batch));
///   }();
///   engine.backward(loss);  // outside of the scope
///
/// Weights are cast for each use: LibTorch's cache would keep copies of them all alive to the end
/// of the scope, and stale ones if a step is made in it. An operator keeps its tensors for backward
/// in 16 bits; zero::linear keeps no copy of its weight.
class Autocast {
 public:
  /// Without a dtype nothing is cast. Throws Error for a dtype that is not BFloat16 or Half.
  explicit Autocast(std::optional<at::ScalarType> dtype, at::DeviceType device = at::kCPU);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// The state of this thread's casts, for another thread or for later.
  struct State {
    static constexpr std::array kDevices{at::kCPU, at::kCUDA, at::kPrivateUse1};
    static State current();
    std::array<bool, kDevices.size()> enabled{};
    std::array<at::ScalarType, kDevices.size()> dtype{};
  };
  /// Casts as `state` says.
  explicit Autocast(const State& state);

 private:
  State before_;
  bool cache_;
};

/// Returns the dtype in which an operator that is faster in 16 bits takes its inputs here. Returns
/// nothing if nothing is cast, or if `tensor` is neither Float nor of 16 bits.
std::optional<at::ScalarType> autocast_dtype(const at::Tensor& tensor);

}  // namespace zero
