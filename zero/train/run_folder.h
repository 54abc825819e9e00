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

/// Files of Hugging Face's folders that belong to a model and not to its weights. A run copies
/// them.
inline constexpr std::string_view kBesideWeights[] = {
    "added_tokens.json", "chat_template.jinja",     "generation_config.json",
    "merges.txt",        "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json",
    "vocab.txt"};

/// The files that runs have written to their folder at their end. Others there are not theirs.
struct RunFiles {
  bool weights = false;
  bool adapter = false;
  bool merged = false;    ///< weights in the folder `merged`
  bool replaced = false;  ///< the runs are not continued, but replaced (--overwrite)
};

class RunFolder {
 public:
  explicit RunFolder(std::filesystem::path path) : path_(std::move(path)) {}

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path log() const { return path_ / "log.jsonl"; }
  std::filesystem::path model() const { return path_ / "model.safetensors"; }
  /// Returns the folder of the weights with an adapter merged into them.
  std::filesystem::path merged() const { return path_ / "merged"; }
  /// Returns what the log says of the runs here.
  RunFiles written() const;
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

  /// Throws ConfigError if the folder cannot serve: it is a file, it cannot be written, it holds an
  /// earlier run and neither `overwrite` nor `resume` says what to do with it, or it holds no log
  /// of a run, but a file that a run would replace or remove. So it does for a run that `merges` if
  /// the folder for that has weights that no run wrote. Changes nothing.
  void check(bool overwrite, bool resume, bool merges = false) const;
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
  /// Returns whether the log is that of a run. One that cannot be read again, as a pipe, is.
  bool has_log() const;
  /// Returns a file that a run replaces or removes, if there is one.
  std::optional<std::filesystem::path> file_in_the_way() const;

  std::filesystem::path path_;
};

}  // namespace zero::train
