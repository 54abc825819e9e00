// A task of a run stands between its data and its model.
//
// Note [Tasks]
// A task makes micro-batches of its data and turns each into a loss. The trainer knows neither: it
// asks for the next batch, passes the batch back for its loss, and moves tensors to the device in
// between. So language modelling, masked language modelling, classification and supervised
// fine-tuning are tasks beside each other:
//
//   task               batch                                   loss is the mean over
//   language model     tokens, targets                         tokens
//   masked tokens      tokens, targets, number of targets      the masked tokens
//   classification     tokens, types, mask, labels             texts
//   fine-tuning        tokens, targets, number of targets      the answers' tokens
//
// With packed documents a language model's batch has the number of targets too, and behind it the
// tokens' positions in their documents.
//
// Weights. The loss of a step is the sum over all tokens or sequences that are supervised in it, on
// all ranks and in all micro-batches, divided by their number. The engine averages micro-batches
// with equal weights 1/(N k), so each mean is multiplied by  weight N k / (weight of the whole
// step)  first (loss_factor). If every micro-batch supervises equally many, as a language model's
// do, the factor is 1 and nothing is multiplied.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "zero/data/token_loader.h"
#include "zero/models/language/layer_sequence.h"

namespace zero::train {

/// One rank's micro-batch. Only the task knows the meaning of its tensors.
using Batch = std::vector<at::Tensor>;

class Task {
 public:
  Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  virtual ~Task() = default;

  // --- Data ---

  /// Returns this rank's next micro-batch, in host memory. Throws DataError.
  virtual Batch next() = 0;
  /// Return the position of all ranks in the data, and go on there. `restore` throws DataError for
  /// a position in other data.
  virtual LoaderState position() const = 0;
  virtual void restore(const LoaderState& position) = 0;

  /// Returns the number of batches of a validation, over all ranks; 0 if there is none. Each batch
  /// is passed by itself, so that the result depends neither on ranks nor on the micro-batch.
  virtual int64_t validation_batches() const = 0;
  /// Returns the number of tokens of a validation.
  virtual int64_t validation_tokens() const = 0;
  /// Returns batch `index` of the validation, in host memory. Throws DataError.
  virtual Batch validation_batch(int64_t index) = 0;

  // --- Weights ---

  /// Returns how much a batch supervises: the number of tokens or sequences that its loss is the
  /// mean of. Tasks choose the unit.
  virtual double weight(const Batch& batch) const = 0;
  /// Returns the weight of all micro-batches of all ranks in a step, if it is always the same;
  /// otherwise nothing, and the ranks add the weights up in every step.
  virtual std::optional<double> step_weight() const = 0;

  // --- Model ---

  /// Returns the mean loss of a batch, which lies on the model's device: a scalar in fp32.
  virtual at::Tensor loss(const Batch& batch) = 0;
  /// Returns the unnormalised log-probabilities of a batch: (B, T, V) of tokens, (B, classes) of
  /// classes.
  virtual at::Tensor logits(const Batch& batch) = 0;
  /// Returns the model as layers, for micro-batches that pass together; they give the `loss` of
  /// each.
  virtual LayerSequence layers(std::vector<Batch> batches) = 0;
};

/// Returns the factor of a micro-batch's mean loss: Note [Tasks]. `micro_batches` are those of all
/// ranks in a step, whose weights add up to `total`; if that is 0, nothing is supervised, and every
/// loss counts as 0.
inline double loss_factor(double weight, double total, int64_t micro_batches) {
  return total > 0 ? weight * static_cast<double>(micro_batches) / total : 0;
}

/// Returns the batch on a device. The copies run beside the device's earlier work.
inline Batch on_device(Batch batch, c10::Device device) {
  if (device.is_cpu()) return batch;
  for (auto& tensor : batch) tensor = tensor.pin_memory().to(device, /*non_blocking=*/true);
  return batch;
}

}  // namespace zero::train
