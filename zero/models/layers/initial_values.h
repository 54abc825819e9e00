// The values that parameters begin with.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// While it lives, the models that this thread builds draw no weights: a matrix has its shape and
/// no memory, and an operator that needs its values throws an error that says so. An Engine takes
/// such a model where NamedTensors::values_follow says so (which says what it refuses until then),
/// and its values come from files (zero::load_pretrained). Scopes nest.
class WithoutValues {
 public:
  WithoutValues();
  ~WithoutValues();
  WithoutValues(const WithoutValues&) = delete;
  WithoutValues& operator=(const WithoutValues&) = delete;
};

/// While it lives, models that this thread builds draw their weights although a WithoutValues scope
/// is around it: a new head's values come from no file.
class WithValues {
 public:
  WithValues();
  ~WithValues();
  WithValues(const WithValues&) = delete;
  WithValues& operator=(const WithValues&) = delete;

 private:
  int scopes_;
};

/// Return a parameter in fp32, drawn by LibTorch's default generator from N(0, deviation^2), or
/// evenly from -bound to bound; without values in a WithoutValues scope.
at::Tensor normal_values(at::IntArrayRef sizes, double deviation);
at::Tensor uniform_values(at::IntArrayRef sizes, double bound);

/// Returns a tensor without values.
at::Tensor absent_values(at::IntArrayRef sizes, at::ScalarType dtype);
/// Returns whether a tensor on the CPU is one.
bool has_absent_values(const at::Tensor& tensor);

}  // namespace zero
