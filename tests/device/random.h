// Random numbers of operators: those that the CPU would draw.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

namespace zero::simulated {

/// Note [Random numbers]
/// The generator must advance when an operator is enqueued, so that the next one draws what comes
/// after; the numbers are drawn when it runs. So the shadow run draws from the generator itself,
/// and the task from a copy of what the generator was. Operators that have no generator among their
/// arguments wait for their result. Dropout is composed of operators that have one
/// (composites.cpp).
class RandomArgument {
 public:
  /// Looks for the generator among the operator's arguments and puts the default one there if none
  /// is given.
  RandomArgument(const c10::OperatorHandle& op, torch::jit::Stack& arguments);

  /// The operator draws random numbers.
  bool random() const { return random_; }
  /// It does, and its generator is not among its arguments.
  bool hidden() const { return random_ && !index_; }
  /// After the shadow run: the task's generator takes the place of the one that has advanced.
  void use_copy(torch::jit::Stack& arguments) const;
  /// There was no shadow run after all: the generator is as before.
  void restore();

 private:
  bool random_ = false;
  std::optional<size_t> index_;
  at::Generator live_, before_;
};

}  // namespace zero::simulated
