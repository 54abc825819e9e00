// Finds the place in a step of several ranks and micro-batches where the first number that is not
// finite was made.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/engine/anomaly_watch.h"
#include "zero/engine/engine.h"
#include "zero/engine/named_tensors.h"

namespace zero {

/// Watches this rank's passes of a step. Then all ranks agree on the first number that is not
/// finite, ordered by micro-batch, forward before backward, the order of operators, and rank.
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
  /// `engine` outlives this. Throws Error if another one, or an AnomalyWatch, watches this thread.
  StepWatch(Engine& engine, const NamedTensors& tensors);

  /// Forgets the step so far.
  void begin_step();
  /// From now on operators belong to micro-batch `index`, which counts from 1; 0 stands for all
  /// together (layer-major).
  void begin_micro_batch(int64_t index);
  /// Takes the loss of micro-batch `index` after its backward pass. Operators between this call and
  /// the next `begin_micro_batch` are ignored.
  void add_loss(int64_t index, double loss);

  /// Returns that number's origin on any rank, in sentences that begin with the rank and the
  /// micro-batch. The text is the same on every rank, and empty if every rank's operators, losses
  /// and gradients were finite. Collective.
  std::string agree();
  /// For a step whose gradients were finite on every rank: returns a sentence about the first
  /// parameter whose sum over ranks and micro-batches is not finite, or an empty text. Call it
  /// between backward and Engine::step, and not with update_in_backward. The text is the same on
  /// every rank. Collective.
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
  std::vector<std::string> names_;      // all parameters' names
  std::vector<std::string> trainable_;  // the names of those that are trained
  int64_t micro_batch_ = 0;
  std::optional<Found> found_;
};

}  // namespace zero
