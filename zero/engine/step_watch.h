// Finds where in a step of several ranks and micro-batches the first number that is not finite was
// made.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/engine/anomaly_watch.h"
#include "zero/engine/engine.h"
#include "zero/engine/named_tensors.h"

namespace zero {

/// Watches this rank's passes of a step; then all ranks agree on what came first: the lowest
/// micro-batch, forward before backward, the order of operators, the lowest rank.
///
///   zero::StepWatch watch(engine, zero::named_tensors(model));
///   for (int64_t i = 1; i <= micro_batches; ++i) {
///     watch.begin_micro_batch(i);
///     const auto loss = model->loss(batch[i]);
///     engine.backward(loss);
///     watch.add_loss(i, loss.item<double>());
///   }
///   const auto found = watch.agree();
class StepWatch {
 public:
  /// `engine` outlives this. One on a thread at a time: throws Error as AnomalyWatch.
  StepWatch(Engine& engine, const NamedTensors& tensors);

  /// Forgets the step so far.
  void begin_step();
  /// From now on operators belong to micro-batch `index`, from 1, or to all together if it is 0
  /// (layer-major).
  void begin_micro_batch(int64_t index);
  /// The loss of micro-batch `index`, behind its backward pass: what comes between this and the
  /// next `begin_micro_batch` is not looked at.
  void add_loss(int64_t index, double loss);

  /// Returns what came first on any rank, in sentences that begin with the rank and the
  /// micro-batch: the same text on every rank, empty where every rank's operators, losses and
  /// gradients were finite. Collective.
  std::string agree();
  /// For a step whose gradients were finite on every rank: which parameter's sum over ranks and
  /// micro-batches is not; empty if none. Between backward and Engine::step, not with
  /// update_in_backward. The same on every rank. Collective.
  std::string check_sums();

 private:
  struct Found {
    int64_t micro_batch = 0;
    bool backward = false;
    int64_t order = 0;
    bool absent = false;  // a parameter among the inputs, at stage 3: it was not looked at
    std::string text;
  };
  Engine& engine_;
  AnomalyWatch watch_;
  std::vector<std::string> names_;      // of all parameters
  std::vector<std::string> trainable_;  // parameters
  int64_t micro_batch_ = 0;
  std::optional<Found> found_;
};

}  // namespace zero
