// Runs a validation.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "zero/train/monitor.h"
#include "zero/train/run.h"

namespace zero::train {

/// A task with what computes it.
struct Evaluated {
  Task& task;
  torch::nn::Module& model;
  comm::Group& group;
  std::optional<at::ScalarType> autocast;
  int64_t rows = 1;  ///< batches that a rank passes together
};

struct MeanLoss {
  double loss = 0;
  double weight = 0;                 ///< what it is the mean of: Task::weight
  std::optional<int64_t> correct{};  ///< texts whose class is found, if there are classes
};

/// Returns the mean loss over the task's validation: Note [Validation] in validation.h. Returns
/// none if `stop`, which gives all ranks the same answer, returns true meanwhile. Collective.
std::optional<MeanLoss> mean_loss(const Evaluated& of, const std::function<bool()>& stop);

/// Returns the mean loss over the task's validation after `step`: Note [Validation] in
/// validation.h. Returns none if `stop`, which gives all ranks the same answer, returns true
/// meanwhile. Collective.
std::optional<ValidationReport> validate(Run& run, int64_t step, const std::function<bool()>& stop);

}  // namespace zero::train
