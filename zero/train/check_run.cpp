// Checks a run before its ranks are started.
#include <fmt/format.h>

#include <filesystem>
#include <variant>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/train/make_task.h"
#include "zero/train/monitors.h"
#include "zero/train/parts.h"
#include "zero/train/run.h"
#include "zero/train/same_run.h"

namespace zero::train {

bool has_betas(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& o) {
        return requires { o.beta1; };
      },
      optimizer);
}

void check_profile_file(const Options& options) {
  if (options.profile.empty()) return;
  const std::filesystem::path file(options.profile);
  std::error_code ignored;
  const auto type = std::filesystem::symlink_status(file, ignored).type();
  if (type != std::filesystem::file_type::not_found &&
      type != std::filesystem::file_type::regular) {
    throw ConfigError(fmt::format(
        "The profile is to be written to {}, which is no regular file. Give another --profile "
        "FILE.",
        options.profile));
  }
  const auto folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  const bool of_the_run =
      std::filesystem::absolute(folder).lexically_normal() ==
      std::filesystem::absolute(options.out).lexically_normal();  // may yet be made
  if (!of_the_run && !std::filesystem::is_directory(folder, ignored)) {
    throw ConfigError(fmt::format(
        "The profile is to be written to {}, but the folder {} is not there. Give another "
        "--profile FILE.",
        options.profile, folder.string()));
  }
}

void check_profile_step(const Options& options, int64_t done) {
  if (options.profile.empty()) return;
  if (options.profile_step > options.steps - done) {
    throw ConfigError(fmt::format(
        "The profile is to be of step {} (train.profile_step), but the run has {}{}. Give a "
        "smaller --profile-step, or more --steps.",
        options.profile_step, options.steps - done, done > 0 ? " left" : ""));
  }
}

void probe_profile(const Options& options) {
  if (options.profile.empty()) return;
  try {
    const OutputFile probe(options.profile, fail<ConfigError>);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{} Give another --profile FILE.", error.what()));
  }
}

void check_options(const Settings& settings) {
  const auto& options = settings.program;
  (void)model_config(options, Dataset());
  (void)schedule_of(settings);
  check_profile_step(options, 0);
}

void check_run(const Settings& given, int ranks) {
  const auto settings = completed(given);
  const auto& config = settings.engine;
  const auto& options = settings.program;
  std::error_code ignored;
  if (options.lora.on() && std::filesystem::equivalent(options.from, options.out, ignored)) {
    throw ConfigError(fmt::format(
        "--out is {}, the folder of the model that --from names: the adapter would take "
        "the place of the weights that it belongs to. Give another --out.",
        options.out));
  }
  const RunFolder folder(options.out);
  folder.check(options.overwrite, continues(options), options.lora.merge);
  check_monitors(options);
  if (options.memory_copies) (void)memory_folder(options);
  const auto data = open_data(options);
  const auto model = model_config(options, data);
  if (!options.from.empty() && !options.resume) (void)WeightFiles(options.from);
  (void)schedule_of(settings);
  const auto tokens = task_data(options, data, *model, 0, ranks);
  int64_t done = 0;
  if (options.resume) {
    const auto progress =
        resume_point(find_checkpoint(options), {settings, model->to_json(), ranks}).progress;
    check_position(tokens, options, progress.loader);
    check_resumed_data(progress, data.train);
    done = progress.step;
  }
  check_profile_file(options);
  check_profile_step(options, done);
  const auto size = step_size(settings, *model, ranks);
  // The budget of a device does not count what lies on the host: the engine checks it.
  if (options.device != TrainingDevice::cuda)
    check_budget(choose_tiers(config, size).config, size.parameters, ranks, size.frozen);
  folder.make();
  probe_profile(options);
  (void)make_monitors(options);  // makes their folders
}

}  // namespace zero::train
