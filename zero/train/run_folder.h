// The folder of a run: its log, its weights, its checkpoints.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zero::train {

/// Throws ConfigError if `path` is neither a folder that can be written nor one that can be made.
/// The message has `what` the folder is for, and the `remedy`. Changes nothing.
void check_folder(const std::filesystem::path& path, std::string_view what,
                  std::string_view remedy);

class RunFolder {
 public:
  explicit RunFolder(std::filesystem::path path) : path_(std::move(path)) {}

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path log() const { return path_ / "log.jsonl"; }
  std::filesystem::path model() const { return path_ / "model.safetensors"; }
  /// Returns whether a run has written its weights, or its adapter, here.
  bool has_weights() const;
  std::filesystem::path model_config() const { return path_ / "config.json"; }
  /// Returns the folder of the checkpoint after `step`. It is whole once it holds its manifest,
  /// which is written last, or `kEarlierMarker`, in the form of earlier versions.
  std::filesystem::path checkpoint(int64_t step) const;
  static constexpr const char* kEarlierMarker = "train.json";

  /// Returns the names of the jobs (comm::LaunchedJob) that the run in this folder belongs to. A
  /// job that is started again goes on with its own run, and with no other.
  std::set<std::string> jobs() const;
  /// Replaces them, in one piece. Throws CheckpointError.
  void write_jobs(const std::set<std::string>& names) const;

  /// Throws ConfigError if the folder cannot serve: it is a file, it cannot be written, it holds a
  /// config.json that is not a run's, or it holds an earlier run and neither `overwrite` nor
  /// `resume` says what to do with it. Changes nothing.
  void check(bool overwrite, bool resume) const;
  /// Makes the folder if absent. Throws ConfigError.
  void make() const;

  /// Returns the steps of all whole checkpoints, in order.
  std::vector<int64_t> checkpoints() const;
  /// Returns the step of the newest whole checkpoint, or of the newest of step `most` or before.
  std::optional<int64_t> last_checkpoint(int64_t most = std::numeric_limits<int64_t>::max()) const;
  /// Returns the bytes of all files of a checkpoint.
  int64_t checkpoint_bytes(int64_t step) const;
  /// Removes all checkpoints except those of steps for which `keep` is true.
  void keep_checkpoints(const std::function<bool(int64_t step)>& keep) const;
  /// Does the same, but leaves the files behind: the folders that are returned are no checkpoints
  /// any more, and remain to be removed.
  std::vector<std::filesystem::path> drop_checkpoints(
      const std::function<bool(int64_t step)>& keep) const;
  /// Ends the log before its first line of a later step than `step`, and removes a last line that
  /// is not whole: a run that goes on from there writes them again. Lines that say that training
  /// has gone back stay. Throws CheckpointError.
  void cut_log(int64_t step) const;
  /// Removes half-written files of a run that was killed while it saved.
  void remove_left_overs() const;

 private:
  std::filesystem::path path_;
};

}  // namespace zero::train
