#include "zero/train/trainer.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <exception>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/not_finite.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/gather_texts.h"
#include "zero/comm/job.h"
#include "zero/device/deterministic.h"
#include "zero/device/memory.h"
#include "zero/train/adapter_files.h"
#include "zero/train/same_run.h"
#include "zero/train/sampler.h"
#include "zero/train/stop.h"
#include "zero/train/validator.h"
#include "zero/train/weights.h"

namespace zero::train {

Trainer::Trainer(const Settings& settings, std::shared_ptr<comm::Group> group,
                 std::vector<std::unique_ptr<Monitor>> more)
    : run_(settings, std::move(group), std::move(more)),
      passes_(run_),
      exchange_(*run_.group, run_.micro_batches()),
      recovery_(run_, passes_),
      first_step_(resume()),
      measuring_(run_, first_step_) {
  if (run_.options.detect_anomaly) recovery_.watch_steps();
}

int64_t Trainer::resume() {
  damaged_ = run_.copy_faults;
  if (!run_.options.resume) return 1;
  while (run_.copy) {
    if (resume_from_memory()) return step_ + 1;
  }
  auto& group = *run_.group;
  std::vector<int64_t> damaged;
  std::vector<std::string> faults;
  while (true) {
    Source source;
    comm::agree_on_rank_zero<CheckpointError>(group, "Looking for a checkpoint", [&] {
      source = find_checkpoint(run_.options, damaged);
    });
    // Hosts may name the folder differently.
    source.step = comm::gather_records(group, source.step, "checkpoint").front();
    source.record = comm::gather_texts(group, source.record, "checkpoint").front();
    source.path = checkpoint_of(run_.options, source.step);
    auto point = resume_point(source, run_.settings);
    try {
      run_.engine->load(source.path);
    } catch (const DamagedCheckpoint& error) {  // thrown on every rank
      if (names_checkpoint(run_.options)) throw;
      damaged.push_back(source.step);
      faults.emplace_back(error.what());
      continue;
    }
    go_on_from(std::move(point), source.step);
    damaged_.insert(damaged_.end(), faults.begin(), faults.end());
    damaged_.insert(damaged_.end(), source.damaged.begin(), source.damaged.end());
    return step_ + 1;
  }
}

bool Trainer::resume_from_memory() {
  auto& group = *run_.group;
  const auto source = comm::agree<CheckpointError>(group, "Reading a copy in memory",
                                                   [&] { return source_of(*run_.copy); });
  auto point = resume_point(source, run_.settings);
  try {
    const size_t known = run_.copy->faults.size();
    run_.copies->load(*run_.engine, *run_.copy);
    for (size_t i = known; i < run_.copy->faults.size(); ++i)
      damaged_.push_back(run_.copy->faults[i]);
  } catch (const DamagedCheckpoint& error) {  // thrown on every rank
    damaged_.emplace_back(error.what());
    run_.copies->drop(run_.copy->step);
    int64_t on_disk = 0;
    if (group.rank() == 0) on_disk = run_.folder.last_checkpoint().value_or(0);
    on_disk = comm::gather_records(group, on_disk, "checkpoint").front();
    run_.copy = run_.copies->newest();
    if (run_.copy && run_.copy->step < on_disk) run_.copy.reset();
    // The weights were to come from a copy: a new attempt begins with weights of its own.
    if (!run_.copy && on_disk == 0) throw;
    return false;
  }
  go_on_from(std::move(point), source.step);
  return true;
}

void Trainer::go_on_from(ResumePoint point, int64_t step) {
  run_.task->restore(point.progress.loader);
  check_resumed_data(point.progress, run_.data.train);
  recovery_.restore(point.progress);
  step_ = step;
  changes_ = std::move(point.changes);
}

// --- The loop ---

int Trainer::train() {
  const DeterministicOperators deterministic(run_.options.deterministic);
  const StopSignals signals;
  // `signals_` points to them until this function ends.
  const struct Watch {
    const StopSignals*& watched;
    ~Watch() { watched = nullptr; }
  } watch{signals_};
  signals_ = &signals;
  report_run();
  const Measuring::Session session(measuring_);
  // The whole model has been sharded: its memory goes back to the system, and the peaks begin anew.
  HostAllocator::instance().trim();
  HostAllocator::instance().reset_peaks();
  reset_peak_memory(run_.group->device());
  const auto& options = run_.options;
  const auto begin = std::chrono::steady_clock::now();
  train_begin_ = begin;
  stop_after_ = parse_duration(options.stop_after);
  const bool saves_beside = options.save_in_background && !options.rewind_spikes;
  if ((saves_beside && options.save_every.value_or(0) > 0) || options.memory_copies)
    run_.engine->prepare_saves();
  std::exception_ptr lost;  // the failure of the last save, which does not cost the weights
  while (step_ < options.steps && stop_signal_ == 0) {
    const bool has_profile = measuring_.has_profile();  // of the step before
    StepReport step;
    try {
      step = train_step();
    } catch (const NotFinite&) {  // thrown on every rank
      try_save([&] { end_save(); });
      throw;
    }
    run_.reports.tell([&](Monitor& monitor) { monitor.step(step); });
    if (has_profile) measuring_.write_profile();
    if (step.rewound) {
      validation_.reset();
      comm::agree_on_rank_zero(*run_.group, "Going back", [&] { run_.folder.cut_log(step_); });
      run_.reports.tell([&](Monitor& monitor) { monitor.rewound(*step.rewound); });
      if (run_.copies) run_.copies->clear();  // they are of steps that are void
      continue;
    }
    const auto is_last = [&] { return step_ == options.steps || stop_signal_ != 0; };
    const auto saves = [&] {
      return options.save_every && (is_last() || step_ % *options.save_every == 0);
    };
    if (options.eval_every && step_ % *options.eval_every == 0 &&
        (step_ < options.steps || options.keep_best))
      report_validation();
    if (save_over_) try_save([&] { end_save(); });
    if (saves()) {
      try_save([&] { end_save(); });  // one that has failed costs no other
      if (is_last()) {
        try {
          save_checkpoint();
        } catch (const CheckpointError&) {  // thrown on every rank
          lost = std::current_exception();
        }
      } else {
        // Whoever may go back to a checkpoint goes back to the same one every time.
        try_save([&] { begin_save(saves_beside); });
      }
    }
    if (!is_last()) copy_if_due();
  }
  try_save([&] { end_save(); });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const int status = finish(seconds.count());
  if (lost) std::rethrow_exception(lost);
  return status;
}

StepReport Trainer::train_step() {
  StepReport report{.step = step_ + 1};
  measuring_.begin_step(report.step);
  set_rates(report);

  passes_.begin(report.step);
  passes_.pass(recovery_.watch());
  measuring_.end_passes();

  const auto verdict = exchange(report);
  if (run_.options.check_replicas > 0 && report.step % run_.options.check_replicas == 0)
    recovery_.check_replicas(report.step);
  if (run_.options.group_norms) report.group_norms = run_.engine->group_norms();

  const auto result = update(verdict.leaves_out);
  ++step_;
  report.grad_norm = result.grad_norm;
  report.skipped = !result.updated;
  report.left_out = verdict.leaves_out;
  if (run_.engine->config().scales_loss()) {
    report.loss_scale = result.loss_scale;
    report.next_loss_scale = result.next_loss_scale;
  }
  measuring_.end_step(report);
  recovery_.end_step(step_, result.updated, result.grad_norm);

  if (verdict.rewinds_to) {
    try_save([&] { end_save(); });
    report.rewound = recovery_.rewind(step_, *verdict.rewinds_to);
    report.rewound->reason = fmt::format("{}", fmt::join(report.notices, " "));
    step_ = *verdict.rewinds_to;
  }
  if (report.skipped && !report.left_out) report.anomaly = recovery_.explain_skipped(report.step);
  return report;
}

// --- The parts of a step ---

void Trainer::set_rates(StepReport& report) {
  auto& engine = *run_.engine;
  // A step that was skipped, for its loss scale or a gradient that is not finite, does not count in
  // the schedule.
  const int64_t update = engine.steps() + 1;
  const double lr = optim::rate(run_.schedule, update);
  report.lr = optim::rate_in_force(*run_.settings.settings.engine.optimizer, lr, update);
  const auto betas = optim::betas(run_.schedule, update);
  for (size_t i = 0; i < engine.group_count(); ++i) {
    engine.set_lr(lr * run_.rate_factors[i], i);
    if (betas) engine.set_betas(betas->beta1, betas->beta2, i);
  }
}

Recovery::Verdict Trainer::exchange(StepReport& report) {
  auto exchanged = exchange_.exchange(passes_.losses(), asked_to_stop(), run_.reports.failed(),
                                      run_.engine->save_progress(), measuring_.last_time());
  save_over_ = exchanged.save_over;
  if (exchanged.report_failed) run_.reports.share_failure(*run_.group);
  report.loss = exchanged.mean_loss;
  if (!exchanged.slow.empty()) report.notices.push_back(std::move(exchanged.slow));
  if (!std::isfinite(report.loss)) {
    comm::agree_on_rank_zero(*run_.group, "The step", [&] {
      run_.reports.tell_or_throw([&](Monitor& monitor) {
        monitor.step({.step = report.step, .loss = report.loss, .grad_norm = NAN});
      });
    });
    recovery_.fail_not_finite(
        report.step,
        fmt::format("The loss of step {} is {}: the run has diverged{}.", report.step, report.loss,
                    run_.engine->config().update_in_backward
                        ? ", and update_in_backward may have updated weights in it"
                        : ", and nothing was updated in it"),
        "A lower --lr, a longer --warmup or --clip may help.");
  }
  auto verdict = recovery_.judge(report.step, report.loss, exchange_.all_losses(), report.lr);
  if (!verdict.notice.empty()) report.notices.push_back(verdict.notice);
  stop_signal_ = exchanged.stop_signal;
  return verdict;
}

StepResult Trainer::update(bool leave_out) {
  StepResult result;
  try {
    result = run_.engine->step(!leave_out);
  } catch (const NotFinite& error) {  // thrown on every rank
    recovery_.fail_not_finite(step_ + 1, error.what(), "");
  }
  measuring_.traffic().end_step(result.updated);
  return result;
}

int Trainer::asked_to_stop() const {
  if (signals_ == nullptr) return 0;
  if (const int signal = signals_->received()) return signal;
  const std::chrono::duration<double> trained = std::chrono::steady_clock::now() - train_begin_;
  return stop_after_ && trained.count() >= *stop_after_ ? SIGALRM : 0;
}

bool Trainer::agree_to_stop() {
  if (signals_ == nullptr) return false;
  auto& group = *run_.group;
  const auto mine = at::empty({1}, at::kInt);
  const auto all = at::empty({group.size()}, at::kInt);
  *mine.mutable_data_ptr<int32_t>() = asked_to_stop();
  group.all_gather_control(all, mine, "signals");
  for (int rank = 0; rank < group.size() && stop_signal_ == 0; ++rank) {
    stop_signal_ = all.const_data_ptr<int32_t>()[rank];
  }
  return stop_signal_ != 0;
}

// --- Before, between and after the steps ---

void Trainer::report_run() {
  auto info = run_.describe(first_step_, changes_);
  info.damaged = damaged_;
  info.from_memory = run_.copy.has_value();
  const auto memory = collect_memory(*run_.engine);
  // All checks have passed, so the earlier run may be removed. The first line of the new log
  // replaces its log.
  comm::agree_on_rank_zero(*run_.group, "Making room in the run folder", [&] {
    earlier_ = run_.folder.written();
    earlier_.replaced = run_.options.overwrite;
    if (run_.options.overwrite) run_.folder.keep_checkpoints([](int64_t) { return false; });
    run_.folder.remove_left_overs();
    if (continues(run_.options)) {
      run_.folder.cut_log(step_);
      // The steps after the named one will be others.
      if (names_checkpoint(run_.options))
        run_.folder.keep_checkpoints([&](int64_t step) { return step <= step_; });
    }
    // From here on this job, if it is started again, goes on with what lies here.
    std::set<std::string> jobs;
    for (const auto& job : comm::launched_jobs()) jobs.insert(job.name);
    run_.folder.write_jobs(jobs);
  });
  run_.reports.tell([&](Monitor& monitor) {
    monitor.begin(info);
    monitor.initial_memory(memory);
  });
  run_.reports.share_failure(*run_.group);
}

// An exception ends the run, so nothing needs the weights of training after it.
template <class Body>
void Trainer::evaluating(const Body& body) {
  run_.engine->optimizer_eval();
  body();
  run_.engine->optimizer_train();
}

std::optional<ValidationReport> Trainer::validate() {
  // An update that is still under way would move bytes uncounted. A delayed update stays delayed,
  // so that validating changes nothing in the run.
  if (run_.engine->config().offload_optimizer.delayed_update_after == 0)
    measuring_.traffic().complete_update();
  std::optional<ValidationReport> report;
  evaluating([&] { report = train::validate(run_, step_, [this] { return agree_to_stop(); }); });
  return report;
}

void Trainer::report_validation() {
  if (run_.options.eval_tokens == 0 || stop_signal_ != 0) return;
  if (validation_ && validation_->step == step_) return;
  if (const auto validation = validate()) {
    validation_ = validation;
    run_.reports.tell([&](Monitor& monitor) { monitor.validation(*validation); });
  }
}

void Trainer::sample() {
  evaluating([&] { train::sample(run_, [this] { return agree_to_stop(); }); });
}

void Trainer::save_weights() {
  evaluating([&] { write_model(); });
}

void Trainer::write_model() {
  const auto& options = run_.options;
  const auto folder = run_.folder.path();
  const WeightsOrigin origin{.from = options.from, .tokenizer = run_.data.tokenizer};
  write_trained(*run_.engine, *run_.model, run_.lora, folder, origin, earlier_);
  const auto merged = run_.folder.merged();
  if (!options.lora.merge) {
    if (earlier_.merged) remove_model(*run_.engine, merged);
    return;
  }
  comm::agree_on_rank_zero<CheckpointError>(*run_.group, "Making a folder", [&] {
    std::error_code error;
    std::filesystem::create_directories(merged, error);
    if (error) {
      throw CheckpointError(
          fmt::format("Cannot make the folder {}: {}.", merged.string(), error.message()));
    }
  });
  write_weights(*run_.engine, *run_.model, run_.lora, merged, origin,
                earlier_.replaced && earlier_.merged);
}

void Trainer::save_checkpoint() {
  end_save();
  begin_save(false);
}

void Trainer::copy_if_due() {
  const auto& every = run_.options.memory_copies;
  if (!every) return;
  copy_due_ = copy_due_ || step_ % *every == 0;
  if (!copy_due_ || save_) return;
  copy_due_ = false;
  try_save([&] { begin_save(run_.options.save_in_background, /*in_memory=*/true); },
           /*in_memory=*/true);
}

void Trainer::begin_save(bool background, bool in_memory) {
  if (!in_memory)
    remover_ = {};  // it may have files of the same step, to which training has gone back
  // Saving would complete it uncounted. It leaves a delayed update delayed.
  if (run_.engine->config().offload_optimizer.delayed_update_after == 0)
    measuring_.traffic().complete_update();
  const auto& options = run_.options;
  Attached attached;
  if (run_.group->rank() == 0) {
    auto progress = recovery_.progress(step_);
    if (validation_ && validation_->step == step_) progress.validation = validation_->loss;
    attached[kRecord] = record_of(run_.settings, progress);
  }
  const SaveOptions how{.background = background, .staging_bytes = options.save_staging};
  const auto path = in_memory ? memory_folder(options) : run_.folder.checkpoint(step_);
  save_begin_ = std::chrono::steady_clock::now();
  if (in_memory) {
    run_.copies->begin(*run_.engine, step_, attached, how);
  } else {
    run_.engine->save(path, attached, how);
  }
  const std::chrono::duration<double, std::milli> held =
      std::chrono::steady_clock::now() - save_begin_;
  save_ = SaveReport{.step = step_, .path = path, .in_memory = in_memory, .held_ms = held.count()};
  // A save that cannot go on in the background is complete already.
  if (run_.engine->save_progress() == SaveProgress::none) end_save();
}

void Trainer::end_save() {
  if (!save_) return;
  auto report = *std::exchange(save_, std::nullopt);
  const auto begin = std::chrono::steady_clock::now();
  report.in_memory ? run_.copies->complete(*run_.engine) : run_.engine->complete_save();
  const auto end = std::chrono::steady_clock::now();
  report.held_ms += std::chrono::duration<double, std::milli>(end - begin).count();
  report.seconds = std::chrono::duration<double>(end - save_begin_).count();
  if (report.in_memory) {
    copy_failed_ = false;
    report.bytes = run_.copies->bytes_of(report.step);
    run_.reports.tell([&](Monitor& monitor) { monitor.saved(report); });
    return;
  }
  const auto& options = run_.options;
  std::vector<std::filesystem::path> dropped;
  comm::agree_on_rank_zero(*run_.group, "Removing checkpoints", [&] {
    report.bytes = run_.folder.checkpoint_bytes(report.step);
    // The newest checkpoints stay. If training may go back, those that are not old enough yet also
    // stay, and one that is. Checkpoints beyond this step belong to a run that went on from another
    // one.
    auto all = run_.folder.checkpoints();
    std::erase_if(all, [&](int64_t step) { return step > report.step; });
    const auto kept = std::min(all.size(), static_cast<size_t>(options.keep_last));
    int64_t oldest = kept > 0 ? all[all.size() - kept] : report.step;
    if (const auto& spikes = options.rewind_spikes) {
      const auto old_enough = run_.folder.last_checkpoint(step_ + 1 - *spikes);
      oldest = std::min(oldest, old_enough.value_or(0));
    }
    const auto best = options.keep_best ? best_checkpoint(run_.folder, report.step) : std::nullopt;
    dropped = run_.folder.drop_checkpoints([&](int64_t step) {
      const bool every = options.keep_every && step % *options.keep_every == 0;
      return step <= report.step && (step >= oldest || every || step == best);
    });
  });
  if (!dropped.empty()) {
    // A file system takes a good part of a step to remove large files.
    remover_ = std::jthread([folders = std::move(dropped)] {
      std::error_code ignored;
      for (const auto& folder : folders) std::filesystem::remove_all(folder, ignored);
    });
  }
  run_.reports.tell([&](Monitor& monitor) { monitor.saved(report); });
}

template <class Save>
void Trainer::try_save(const Save& save, bool in_memory) {
  const bool of_copy = save_ ? save_->in_memory : in_memory;
  const int64_t step = save_ ? save_->step : step_;
  try {
    save();
  } catch (const CheckpointError& error) {  // thrown on every rank
    save_.reset();
    // The next copies are tried too, and would be told of each time.
    if (of_copy && std::exchange(copy_failed_, true)) return;
    const SaveReport report{
        .step = step,
        .path = of_copy ? memory_folder(run_.options) : run_.folder.checkpoint(step),
        .failure = fmt::format("There is no {} of step {}: {} Earlier ones stay.",
                               of_copy ? "copy in memory" : "checkpoint", step, error.what()),
        .in_memory = of_copy};
    run_.reports.tell([&](Monitor& monitor) { monitor.saved(report); });
  }
}

int Trainer::finish(double seconds) {
  auto& traffic = measuring_.traffic();
  traffic.complete_update();  // even a delayed one: validation is of the weights that are saved
  if (measuring_.has_profile()) measuring_.write_profile();
  report_validation();
  const auto memory = collect_memory(*run_.engine);
  const auto sent = traffic.collect();
  auto& calls = *run_.group->accounts().calls;
  calls.stop();
  run_.reports.tell([&](Monitor& monitor) {
    monitor.memory(memory);
    monitor.traffic(sent, traffic.steps());
    if (run_.options.comms_logger.enabled) monitor.calls(calls.times());
  });
  save_weights();
  if (run_.copies && stop_signal_ == 0) run_.copies->clear();
  const bool continues_text = run_.model->config().head() == Head::next_token;
  if (stop_signal_ == 0 && run_.options.sample_tokens > 0 && continues_text) sample();
  const EndReport end{
      .steps = step_,
      .seconds = seconds,
      .reason = stop_signal_ == 0 ? "finished"
                : stop_signal_ == SIGALRM
                    ? fmt::format("stopped by --stop-after {}", run_.options.stop_after)
                    : fmt::format("stopped by SIG{}", sigabbrev_np(stop_signal_)),
      .model_file = run_.lora ? run_.folder.path() / kAdapterWeights : run_.folder.model()};
  run_.reports.tell([&](Monitor& monitor) { monitor.end(end); });
  run_.reports.share_failure(*run_.group);
  return stop_signal_ == SIGALRM ? 0 : stop_signal_;
}

}  // namespace zero::train
