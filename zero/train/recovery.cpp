#include "zero/train/recovery.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/not_finite.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/train/same_run.h"

namespace zero::train {

void Recovery::watch_steps() { watch_.emplace(*run_.engine, named_tensors(run_.model->module())); }

void Recovery::end_step(int64_t step, bool updated, double grad_norm) {
  last_norm_ = grad_norm;
  if (updated) last_update_ = step;
}

// --- Numbers that are not finite ---

// Note [A step that is not finite]
// If a loss is infinite or NaN, or a gradient that no loss scale accounts for, nothing was updated.
// So the step can be run again with every operator watched: with the same tokens, random numbers
// and weights, and with the same collectives in backward. Then its gradients are dropped. If no
// rank's operators, losses and gradients show a cause, it must be the sum over ranks and
// micro-batches. `detect_anomaly` watches from the start, for numbers that do not come twice and
// for steps that cannot be run again.
std::string Recovery::find_anomaly(int64_t step) {
  const bool watches = watch_.has_value();
  if (watches) {
    if (auto found = watch_->agree(); !found.empty()) return found;
  }
  auto& engine = *run_.engine;
  const auto& config = engine.config();
  const char* changes = config.update_in_backward                           ? "update_in_backward"
                        : config.offload_optimizer.delayed_update_after > 0 ? "delayed_update_after"
                                                                            : nullptr;
  if (changes != nullptr) {
    return fmt::format("With {} the step cannot be run again to find what made it{}.", changes,
                       watches ? ", and no operator of it has" : "; --detect-anomaly watches it");
  }
  if (!watches) watch_.emplace(engine, named_tensors(run_.model->module()));
  passes_.pass_again(step, *watch_);
  auto found = watch_->agree();
  if (found.empty()) found = watch_->check_sums();
  engine.zero_grad();
  if (!watches) watch_.reset();
  if (!found.empty()) return found;
  return "The step was run again to find what made it, and everything was finite: it does not come "
         "every time. --detect-anomaly watches from the start.";
}

void Recovery::fail_not_finite(int64_t step, const std::string& what, const std::string& advice) {
  const auto found = find_anomaly(step);
  comm::agree_on_rank_zero<NotFinite>(*run_.group, "The step", [&] {
    throw NotFinite(fmt::format("{} {} {}{}", what, found,
                                last_update_ > 0
                                    ? fmt::format("The last good step was {}.", last_update_)
                                    : "No step before it has updated the weights.",
                                advice.empty() ? "" : " " + advice));
  });
  throw NotFinite(what);  // not reached: rank 0 has thrown
}

std::string Recovery::explain_skipped(int64_t step) {
  const auto& config = run_.engine->config();
  const bool expected = config.scales_loss() && config.loss_scaling.fixed == 0;
  if (expected || std::exchange(explained_, true)) return "";
  return find_anomaly(step);
}

// --- Spikes ---

Recovery::Verdict Recovery::judge(int64_t step, float loss, const std::vector<float>& all_losses,
                                  double lr) {
  const auto& options = run_.options;
  const auto& engine = *run_.engine;
  const LossSample sample{.loss = loss,
                          .grad_norm = last_norm_,
                          .loss_scale = engine.config().scales_loss() ? engine.loss_scale() : 0,
                          .lr = lr};
  Verdict verdict{.notice = spikes_.add(sample, all_losses, run_.group->size())};
  if (verdict.notice.empty()) return verdict;
  verdict.leaves_out = options.skip_spikes || options.rewind_spikes;
  if (options.rewind_spikes) verdict.rewinds_to = rewind_target(step);
  if (verdict.rewinds_to) {
    verdict.notice += fmt::format(
        " Training goes back to the checkpoint of step {}, and on with the data that follow.",
        *verdict.rewinds_to);
  } else if (verdict.leaves_out) {
    verdict.notice += " The step is left out.";
    if (options.rewind_spikes) {
      verdict.notice +=
          fmt::format(" No checkpoint is at least {} steps old.", *options.rewind_spikes);
    }
  }
  return verdict;
}

/// Returns the step of the newest checkpoint that is old enough. Rank 0 looks for it, since rank 0
/// alone removes checkpoints.
std::optional<int64_t> Recovery::rewind_target(int64_t spike) {
  int64_t found = -1;
  if (run_.group->rank() == 0)
    found = run_.folder.last_checkpoint(spike - *run_.options.rewind_spikes).value_or(-1);
  const int64_t step = comm::gather_records(*run_.group, found, "checkpoint to go back to").front();
  if (step < 0) return std::nullopt;
  constexpr int64_t kMost = 3;
  rewinds_ = {.count = spike > rewinds_.until ? 1 : rewinds_.count + 1,
              .until = std::max(rewinds_.until, spike)};
  if (rewinds_.count > kMost) {
    comm::agree_on_rank_zero(*run_.group, "Going back", [&] {
      throw Error(fmt::format(
          "The loss has become a spike {} times up to step {}, each time with other data: going "
          "back does not help. A lower --lr, a longer --warmup or --clip may. The newest "
          "checkpoint, for --resume, is of step {}.",
          rewinds_.count, rewinds_.until, run_.folder.last_checkpoint().value()));
    });
  }
  return step;
}

// Note [Going back]
// Weights, states, the schedule and the remembered losses become the checkpoint's; the data go on.
// The checkpoint's record is changed accordingly, in one piece, before anything newer is removed.
// So a run that is killed and resumed does not meet the same data again.
RewindReport Recovery::rewind(int64_t from, int64_t to) {
  RewindReport report{.from = from, .to = to, .sample = run_.task->position().sample};
  auto then = progress_at(run_.folder, to);
  report.sample_then = then.sample;
  run_.engine->load(run_.folder.checkpoint(to));
  last_update_ = to;
  last_norm_ = then.grad_norm;
  spikes_.restore(then.losses);
  then.loader = run_.task->position();
  then.rewinds = rewinds_;
  comm::agree_on_rank_zero(*run_.group, "Going back", [&] {
    write_record(run_.folder, run_.settings, then);
    run_.folder.keep_checkpoints([&](int64_t step) { return step <= to; });
  });
  return report;
}

// --- Replicas ---

void Recovery::check_replicas(int64_t step) {
  const auto diverged = run_.engine->diverged_parameters();
  if (diverged.empty()) return;
  const int64_t every = run_.options.check_replicas;
  comm::agree_on_rank_zero(*run_.group, "The check of replicas", [&] {
    throw Error(fmt::format(
        "Before the update of step {} ranks do not hold the same parameters: {}. Either memory of "
        "theirs is faulty, or a program writes to parameters on one rank alone. {} Resume from a "
        "checkpoint of before; --check-replicas {} narrows down when it happens.",
        step, text_of(diverged),
        step > every ? fmt::format("Before the update of step {} they were the same.", step - every)
                     : "This was the first check of this run.",
        std::max<int64_t>(1, every / 10)));
  });
}

// --- Checkpoints ---

Progress Recovery::progress(int64_t step) const {
  const auto position = run_.task->position();
  return {.step = step,
          .loader = position,
          .sample = position.sample,
          .losses = spikes_.samples(),
          .grad_norm = last_norm_,
          .rewinds = rewinds_,
          .data = identity(run_.data.train)};
}

void Recovery::restore(const Progress& progress) {
  spikes_.restore(progress.losses);
  last_norm_ = progress.grad_norm;
  rewinds_ = progress.rewinds;
  last_update_ = progress.step;
}

}  // namespace zero::train
