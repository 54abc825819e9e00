// Compares what should be the same on several ranks: the parameters that they hold (replicas),
// those that their users have written, and the values that a function was given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zero/comm/group.h"

namespace zero {

class EnginePlan;
class Flows;

/// A parameter whose bytes differ on ranks that should hold the same.
struct Divergence {
  std::string parameter;
  /// The ranks that differ from the bytes that most of them hold. If no bytes have a majority,
  /// those that differ from the lowest rank.
  std::vector<int> ranks;
};

/// See Engine::diverged_parameters.
std::vector<Divergence> diverged_parameters(const EnginePlan& plan, const Flows& flows);

/// Throws Error, on every rank, naming the parameters that users have written since the last step
/// and whose values now differ between ranks. Collective.
void check_writes(const EnginePlan& plan, const Flows& flows, std::string_view when);

/// Throws Error, on every rank, unless each was given the same value of `parameter` for `function`
/// to set. Each takes the part that it owns, so different values would mix. Collective.
void check_given(comm::Group& group, std::string_view function, std::string_view parameter,
                 const at::Tensor& value);
void check_given(comm::Group& group, std::string_view function, std::string_view parameter,
                 int64_t value);

/// Returns "h.3.ln_1.weight on rank 1; wte.weight on ranks 1, 2", for the first few.
std::string text_of(const std::vector<Divergence>& divergences);

}  // namespace zero
