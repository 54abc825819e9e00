// Makes the parts of a run from its settings. Private to run.cpp, check_run.cpp and
// planned_run.cpp.
#pragma once

#include <memory>
#include <string>

#include "zero/config/settings.h"
#include "zero/data/dataset.h"
#include "zero/data/token_loader.h"
#include "zero/engine/tiers.h"
#include "zero/models/language/language_model.h"
#include "zero/optim/schedule.h"
#include "zero/train/options.h"

namespace zero::train {

/// Returns the settings with the run's own values for those that they leave open. Throws
/// ConfigError if they cannot be used.
Settings completed(Settings settings);

/// Opens the data to train on and to validate with. Throws DataError.
Dataset open_data(const Options& options);
/// Returns the paths of the data, for messages.
std::string names_of(const Options& options);

/// Returns what names the model: a name, a config.json, or a folder.
const std::string& model_name(const Options& options);

/// Returns the model's sizes. A published model keeps its vocabulary, so that its weights fit
/// elsewhere; another takes the vocabulary of the data. Throws ConfigError.
std::unique_ptr<LanguageModelConfig> model_config(const Options& options, const Dataset& data);

LoaderOptions loader_options(const Options& options, int rank, int ranks, int64_t vocabulary);

/// Returns the sizes of a step of this run.
StepSize step_size(const Settings& settings, const LanguageModelConfig& sizes, int ranks);

/// Returns the schedule of the learning rate. Throws ConfigError.
optim::Schedule schedule_of(const Settings& settings);

/// Throws ConfigError if the profile cannot be written to its file. Changes nothing.
void check_profile_file(const Options& options);
/// Throws ConfigError if a run that has done `done` steps never comes to the step of the profile.
void check_profile_step(const Options& options, int64_t done);
/// Opens the profile's file, and does not change its contents. Throws ConfigError if it cannot be
/// written. The run's folder must exist.
void probe_profile(const Options& options);

}  // namespace zero::train
