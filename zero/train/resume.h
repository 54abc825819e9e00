// Records the run in its checkpoints, and says which settings a resumed run may change.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "zero/comm/job.h"
#include "zero/config/settings.h"
#include "zero/data/token_loader.h"
#include "zero/engine/memory_copies.h"
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
  int64_t count = 0;  ///< since training last got beyond all such steps
  int64_t until = 0;  ///< the last step from which training has gone back
};

/// The position of a run after a step.
struct Progress {
  int64_t step = 0;  ///< updates done
  LoaderState loader;
  /// Sequences that the run had taken when it was at the step. If training has gone back to the
  /// step, `loader` has taken more.
  int64_t sample = 0;
  std::vector<LossSample> losses{};    ///< LossSpikes::samples
  double grad_norm = 0;                ///< the step's
  std::optional<double> validation{};  ///< the loss of the validation after the step, if one was
  Rewinds rewinds{};
  std::string data{};  ///< `identity` of the training data; empty: an earlier version did not say
};

/// Returns each value of two JSON texts that differs, as "section.key old -> new".
std::vector<std::string> differences(const std::string& before, const std::string& now);

/// The position from which a run goes on.
struct ResumePoint {
  Progress progress;
  /// Each setting that differs from the checkpoint's, as "steps 4 -> 8".
  std::vector<std::string> changes;
};

/// The name under which a run's record is attached to its checkpoints.
inline constexpr const char* kRecord = "train";
/// Returns the record of a run after the step of `progress`. The functions below read it.
std::string record_of(const RunSettings& run, const Progress& progress);
/// Replaces the record of the checkpoint after the step of `progress`, in one piece. Throws
/// CheckpointError.
void write_record(const RunFolder& folder, const RunSettings& run, const Progress& progress);
/// Reads the progress of the checkpoint after `step`. Throws CheckpointError if it cannot be read.
Progress progress_at(const RunFolder& folder, int64_t step);

/// Returns the step of the checkpoint with the lowest validation loss; of equal ones, the first;
/// none if no checkpoint has one. A checkpoint whose record cannot be read does not count.
/// Steps beyond `most` do not count.
std::optional<int64_t> best_checkpoint(const RunFolder& folder,
                                       int64_t most = std::numeric_limits<int64_t>::max());

/// A checkpoint that a run goes on from.
struct Source {
  int64_t step = 0;
  std::filesystem::path path;
  std::string record;
  /// A sentence for each newer checkpoint that is damaged, about its damage.
  std::vector<std::string> damaged{};
};

/// Returns whether these options name one checkpoint, so that no other may be taken.
bool names_checkpoint(const Options& options);
/// Returns whether a launcher says that it has started one of `jobs` before, and the run in this
/// folder is that job's.
bool is_started_again(const RunFolder& folder, const std::vector<comm::LaunchedJob>& jobs);
/// Returns the options as they act in this folder. `auto` means to resume where there is a
/// checkpoint and else to begin, in place of an earlier attempt that came to none. The checkpoints
/// of a run that is started again come before all that the options say. Throws ConfigError if such
/// a run is complete and has no checkpoint.
Options with_auto_resume(Options options, const std::vector<comm::LaunchedJob>& jobs);
/// Returns whether the checkpoint that is resumed lies in the run's own folder: then its log and
/// monitors go on too.
bool continues(const Options& options);
/// Returns the folder of the checkpoint of step `step` that these options mean.
std::filesystem::path checkpoint_of(const Options& options, int64_t step);

/// Finds the checkpoint that `resume` asks for. If there are several it takes the newest that is
/// sound, as far as its manifest and the sizes of its files tell, and that is not among the steps
/// in `damaged`. Throws ConfigError if there is none, DamagedCheckpoint if all are damaged or the
/// one that was asked for is, and CheckpointError if no run wrote it.
Source find_checkpoint(const Options& options, const std::vector<int64_t>& damaged = {});

/// Returns this host's folder for the copies in memory of a run with these options, below the
/// launcher's. Throws ConfigError if there is no launcher that keeps one.
std::filesystem::path memory_folder(const Options& options);
/// Returns a copy in memory, of which this host need not have every file. Throws CheckpointError.
Source source_of(const MemoryCopies::Found& copy);
/// Starts a thread that brings a rank's part of the checkpoint's files into the page cache, while
/// the process makes its group and its model. It does nothing if they take more than half of the
/// memory that is available.
std::jthread read_ahead(const Source& source, int rank, int ranks);

/// Returns a checkpoint's position in a run with these settings. Throws ConfigError, naming the
/// setting, both values and the remedy, if this run cannot go on from there: another size of tiles,
/// other sizes of the model (its dropout may change), or no step left to do (with `auto` such a run
/// only writes its weights again). Throws CheckpointError if the checkpoint's record cannot be
/// read.
ResumePoint resume_point(const Source& source, const RunSettings& run);

/// The settings that a resumed run starts from, unless it is given others.
struct SavedSettings {
  std::string configuration;  ///< a configuration file's text: the engine's keys, and "train"
  int ranks = 1;
};

/// Returns the settings of a checkpoint, without the folder's name and the options about it; none
/// if it has no settings. Throws CheckpointError.
std::optional<SavedSettings> saved_settings(const Source& source);
/// Returns the configuration of `saved` with the number of micro-batches that gives steps of the
/// same samples on `ranks` ranks. Throws ConfigError if no number does.
std::string keep_global_batch(const SavedSettings& saved, int ranks);

/// Returns the configuration `saved` with the keys of `file`, a configuration file's text, in place
/// of its own; "auto" and null leave the saved value, and so does a section `optimizer` of the same
/// kind that leaves a key out. If the kind of optimizer, schedule or batch differs, the saved one
/// is dropped. Throws ConfigError, which names `origin`.
std::string override_settings(std::string_view saved, std::string_view file,
                              std::string_view origin);

}  // namespace zero::train
