// A scope without gradients and dropout.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

namespace zero::train {

/// While it lives, gradients are off and the model is in eval mode. Afterwards the model is in its
/// earlier mode.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& model)
      : model_(model), was_training_(model.is_training()) {
    model_.eval();
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;
  ~EvaluationMode() { model_.train(was_training_); }

 private:
  at::NoGradGuard no_gradients_;
  torch::nn::Module& model_;
  bool was_training_;
};

}  // namespace zero::train
