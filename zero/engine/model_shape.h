// A model as the plan sees it: names, shapes, dtypes and optimizers, without a tensor.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/optim/factors.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/projection.h"

namespace zero {

struct ParameterShape {
  std::string name;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;       ///< those of a dense tensor
  at::ScalarType dtype = at::kFloat;  ///< as the model gives it
  bool trainable = true;
  /// Its module computes in fp32, whatever the configuration says: Note [Buffers] in model.h.
  bool stays_fp32 = false;
  /// The optimizer as it suits this parameter (optim::suited).
  Optimizer optimizer = AdamW{};

  int64_t numel() const;
  /// Returns whether its rows follow each other in the order of their elements.
  bool is_contiguous() const;
};

/// Returns the matrices of a parameter whose optimizer keeps second moments by rows and columns;
/// nothing for any other.
std::optional<optim::Factors> factors_of(const ParameterShape& parameter);
/// Returns how the optimizer of a parameter projects it; nothing if it does not.
std::optional<optim::Projection> projection_of(const ParameterShape& parameter);
/// Returns the states of a parameter that are not one number for each element.
std::vector<optim::FactoredState> factored_states_of(const ParameterShape& parameter);
/// Returns the number of their elements.
int64_t factored_numel(const ParameterShape& parameter);

struct ModelShape {
  /// Parameters in registration order, tied ones once.
  std::vector<ParameterShape> parameters;
  /// The model is on a device that has memory of its own.
  bool own_memory = false;

  const ParameterShape& parameter(int64_t index) const {
    return parameters[static_cast<size_t>(index)];
  }
};

}  // namespace zero
