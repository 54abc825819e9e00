// Records in a checkpoint the run that wrote it, and says which settings a resumed run may change.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/config/settings.h"
#include "zero/data/token_loader.h"
#include "zero/train/loss_spikes.h"
#include "zero/train/options.h"
#include "zero/train/run_folder.h"

namespace zero::train {

/// The settings with which a run was started.
struct RunSettings {
  Settings settings;
  std::string model;  ///< the model's sizes: the JSON text of its config.json
  int ranks = 1;
};

/// How often training has gone back for spikes (train.rewind_spikes).
struct Rewinds {
  int64_t count = 0;  ///< since a step beyond all that led back
  int64_t until = 0;  ///< the last of those
};

/// The position of a run after a step.
struct Progress {
  int64_t step = 0;  ///< updates done
  LoaderState loader;
  /// Sequences that the run had taken when it was at the step; `loader` has taken more where
  /// training has gone back to it.
  int64_t sample = 0;
  std::vector<LossSample> losses{};  ///< LossSpikes::samples
  double grad_norm = 0;              ///< of the step
  Rewinds rewinds{};
};

/// Each value of two JSON texts that differs, as "section.key old -> new".
std::vector<std::string> differences(const std::string& before, const std::string& now);

/// The position from which a run goes on.
struct ResumePoint {
  Progress progress;
  /// Each setting that differs from the checkpoint's, as "steps 4 -> 8".
  std::vector<std::string> changes;
};

/// The name under which a run's record is attached to its checkpoints.
inline constexpr const char* kRecord = "train";
/// Returns the record of a run after the step of `progress`, from which the functions below read.
std::string record_of(const RunSettings& run, const Progress& progress);
/// Replaces the record of the checkpoint after the step of `progress`, in one piece. Throws
/// CheckpointError.
void write_record(const RunFolder& folder, const RunSettings& run, const Progress& progress);
/// Reads the progress of the checkpoint after `step`. Throws CheckpointError where it cannot be
/// read.
Progress progress_at(const RunFolder& folder, int64_t step);

/// A checkpoint that a run goes on from.
struct Source {
  int64_t step = 0;
  std::filesystem::path path;
  std::string record;
  /// Says of each newer checkpoint that is damaged what is wrong with it.
  std::vector<std::string> damaged{};
};

/// Returns whether these options name a certain checkpoint, so that no other is taken.
bool names_checkpoint(const Options& options);
/// Returns the options as they act in this folder. `auto` means to resume where there is a
/// checkpoint and else to begin, in place of an earlier attempt that came to none. `restarted`: an
/// earlier attempt of this very job may have left a checkpoint, which then comes before all that
/// the options say.
Options with_auto_resume(Options options, bool restarted);
/// Returns whether the checkpoint that is resumed lies in the run's own folder: then its log and
/// monitors go on too.
bool continues(const Options& options);
/// Returns the folder of the checkpoint of step `step` that these options mean.
std::filesystem::path checkpoint_of(const Options& options, int64_t step);

/// Finds the checkpoint that `resume` asks for. Of several it is the newest that is sound as far as
/// its manifest and the sizes of its files tell, and that is not among the steps in `damaged`.
/// Throws ConfigError where there is none, DamagedCheckpoint where there are damaged ones alone, or
/// the one that was asked for is, and CheckpointError where no run wrote it.
Source find_checkpoint(const Options& options, const std::vector<int64_t>& damaged = {});

/// A checkpoint's position in a run with these settings. Throws ConfigError, naming the setting,
/// both values and the remedy, where this run cannot go on from there: another size of tiles, other
/// sizes of the model (its dropout may change), or no step left to do (with `auto` such a run only
/// ends as it would have). Throws CheckpointError where
/// the checkpoint's record cannot be read.
ResumePoint resume_point(const Source& source, const RunSettings& run);

/// The settings that a resumed run starts from, where it is not told otherwise.
struct SavedSettings {
  std::string configuration;  ///< a configuration file's text: the engine's keys, and "train"
  int ranks = 1;
};

/// Returns the settings of a checkpoint, without the folder's name and the options about it; none
/// where it does not have them. Throws CheckpointError.
std::optional<SavedSettings> saved_settings(const Source& source);
/// Returns the configuration of `saved` with as many micro-batches as make steps of the same
/// samples on `ranks` ranks. Throws ConfigError where no number does.
std::string keep_global_batch(const SavedSettings& saved, int ranks);

/// Returns the configuration `saved` with the keys of `file`, a configuration file's text, in place
/// of its own; "auto" and null leave the saved value. Where the kind of optimizer, schedule or
/// batch is another one, nothing of the saved one is kept. Throws ConfigError, which names
/// `origin`.
std::string override_settings(std::string_view saved, std::string_view file,
                              std::string_view origin);

}  // namespace zero::train
