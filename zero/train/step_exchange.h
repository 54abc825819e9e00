// The message by which ranks exchange a few numbers once a step, between backward and the update.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/save_options.h"
#include "zero/train/stragglers.h"

namespace zero::train {

/// Carries losses, signals, failures of monitors and times.
class StepExchange {
 public:
  struct Result {
    float mean_loss = 0;         ///< over ranks and micro-batches
    int stop_signal = 0;         ///< a signal that any rank has received
    bool report_failed = false;  ///< a rank's monitors have failed
    bool save_over =
        false;         ///< a save in the background is written by all ranks, or has failed on one
    std::string slow;  ///< a sentence that names slow ranks; empty: none
  };

  StepExchange(comm::Group& group, int64_t micro_batches);

  /// Exchanges the numbers. `losses` are this rank's, by micro-batch; `time` is of its step before.
  /// The result is the same on all ranks. Collective.
  Result exchange(const std::vector<float>& losses, int stop_signal, bool report_failed,
                  SaveProgress save, RankTime time);
  /// Returns the losses of all ranks, by micro-batch and then by rank.
  const std::vector<float>& all_losses() const { return all_losses_; }

 private:
  comm::Group& group_;
  at::Tensor mine_, all_;
  std::vector<float> all_losses_;
  std::vector<RankTime> times_;
  Stragglers stragglers_;
};

}  // namespace zero::train
