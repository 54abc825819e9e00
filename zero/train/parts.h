// How the parts of a run follow from its settings. Private to run.cpp and check_run.cpp.
#pragma once

#include <memory>

#include "zero/config/settings.h"
#include "zero/data/dataset.h"
#include "zero/data/token_loader.h"
#include "zero/engine/tiers.h"
#include "zero/models/language/language_model.h"
#include "zero/optim/schedule.h"
#include "zero/train/options.h"

namespace zero::train {

/// Returns the settings with the run's own values in place of those that they leave open. Throws
/// ConfigError where they cannot be used.
Settings completed(Settings settings);

/// Opens the data to train on and to validate with. Throws DataError.
Dataset open_data(const Options& options);

/// Returns what names the model: a name, a config.json, or a folder.
const std::string& model_name(const Options& options);

/// Returns the model's sizes. A published model keeps its vocabulary, so that its weights fit
/// elsewhere; another takes that of the data. Throws ConfigError.
std::unique_ptr<LanguageModelConfig> model_config(const Options& options, const Dataset& data);

LoaderOptions loader_options(const Options& options, int rank, int ranks, int64_t vocabulary);

/// Returns what a step of this run needs.
StepSize step_size(const Settings& settings, const LanguageModelConfig& sizes, int ranks);

/// Returns the schedule of the learning rate. Throws ConfigError.
optim::Schedule schedule_of(const Settings& settings);

/// Throws ConfigError where the profile cannot be written to its file. Changes nothing.
void check_profile_file(const Options& options);
/// Throws ConfigError where a run that has done `done` steps never comes to the step of the
/// profile.
void check_profile_step(const Options& options, int64_t done);
/// Opens the profile's file, and leaves what is there. Throws ConfigError where it cannot be
/// written. The run's folder must be there.
void probe_profile(const Options& options);

}  // namespace zero::train
