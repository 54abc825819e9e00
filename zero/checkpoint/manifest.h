// The manifest of a checkpoint: it says what the files hold, and has a checksum of every byte of
// them.
//
// Note [Checkpoints]
// A checkpoint is a folder with manifest.json and a safetensors file of each rank. A file holds
// slices: ranges of a parameter's elements, each a tensor of its own for every state of the
// parameter. The manifest says which file holds which range. So a reader asks for ranges of
// parameters, and need not know how many ranks wrote, at which stage, or in which units. The
// manifest has a checksum of each block of each file and one of itself, and is written last. So a
// folder whose manifest is sound is complete, and no byte of it can change unnoticed.
// docs/checkpoint-format.md describes both byte by byte.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/optim/loss_scale.h"

namespace zero {

/// A checkpoint is not as it was written: a file is missing, cut off or changed. An earlier
/// checkpoint may still be sound.
class DamagedCheckpoint : public CheckpointError {
  using CheckpointError::CheckpointError;
};

/// Texts that a program keeps in a checkpoint beside the states: UTF-8, by name.
using Attached = std::map<std::string, std::string>;

/// Returns the version of this library.
const char* library_version();

struct Manifest {
  static constexpr const char* kFile = "manifest.json";
  static constexpr const char* kFormat = "libzero checkpoint";
  static constexpr int64_t kVersion = 2;

  /// A state of a parameter. Its slices are tensors "STATE.PARAMETER", where STATE is "parameter",
  /// "master", or the optimizer's name of the state.
  struct State {
    std::string name;
    /// A dtype as safetensors names it, or "8bit" or "8bit_positive" for blocks of codes
    /// (optim/state_format.h), which have dtype U8.
    std::string format;
    bool operator==(const State&) const = default;
  };
  struct Parameter {
    std::string name;
    std::vector<std::string> other_names;  ///< the other names of a tied parameter
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;  ///< slices have the elements in the order of the storage
    std::string optimizer;         ///< name of its optimizer; empty: the parameter is frozen
    int64_t group = 0;             ///< its number among `groups`
    int64_t steps = 0;             ///< updates that it has had
    std::vector<State> states;
    /// Names and shapes of factored states. One file has each of them whole, as
    /// "STATE.PARAMETER".
    std::vector<std::pair<std::string, std::vector<int64_t>>> factored;

    int64_t numel() const;
    const State* find(std::string_view state) const;
  };
  /// Elements [begin, end) of a parameter.
  struct Slice {
    int64_t parameter = 0;
    int64_t begin = 0;
    int64_t end = 0;
    bool operator==(const Slice&) const = default;
  };
  /// The file that a rank wrote. Every file also has all buffers of its rank, under "buffer.NAME".
  struct File {
    std::string name;
    FileSums sums;
    std::vector<Slice> slices;
    std::vector<int64_t> factored;  ///< parameters whose factored states it has
    Attached attached;
  };

  std::string library = library_version();  ///< the version that wrote it
  int64_t stage = 0;  ///< only for people, like `configuration`: nothing depends on the two
  std::string configuration = "{}";
  int64_t steps = 0;
  std::optional<LossScaleState> loss_scale;
  /// Norm of the mean gradient in the last step that updated with finite gradients, before
  /// clipping. The next step may be clipped by it (Config::clip_by_previous_norm).
  std::optional<double> grad_norm;
  std::vector<std::string> groups;  ///< optimizer and hyper-parameters of each, as JSON text
  std::vector<Parameter> parameters;
  std::vector<TensorInfo> buffers;
  std::string buffer_policy;
  std::vector<File> files;  ///< one for each rank

  /// Returns the file from which a rank takes buffers and attached texts: its own, if there is one.
  const File& file_of(int rank) const { return files[static_cast<size_t>(rank) % files.size()]; }
  /// Returns, by parameter, the index of the file that has its factored states: the first, unless
  /// another says so.
  std::vector<size_t> factored_files() const;
};

/// Returns whether a folder has a manifest, sound or not.
bool has_manifest(const std::filesystem::path& folder);
/// Returns whether a folder holds what a save writes: a manifest of this format, or a rank's file.
/// Folders of other programs may have a manifest.json too.
bool is_save(const std::filesystem::path& folder);
/// Returns whether a file has the name of a rank's file.
bool is_rank_file(std::string_view name);
/// Writes the manifest into a folder that already has the files: whole, or not at all.
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);
/// Reads the manifest. Throws DamagedCheckpoint if it is missing or not as it was written, and
/// CheckpointError if another version wrote it.
Manifest read_manifest(const std::filesystem::path& folder);

/// Convert a file's entry to JSON text and back. Ranks send this text to the rank that writes the
/// manifest.
std::string to_text(const Manifest::File& file);
Manifest::File file_from_text(std::string_view text);

/// Checks that every file is there and has its size. Throws DamagedCheckpoint, which names the
/// file.
void verify_sizes(const std::filesystem::path& folder, const Manifest& manifest);
/// Reads part `part` of `parts` of the bytes of all files. Throws DamagedCheckpoint, which names
/// the file and the place, if they are not as they were written.
void verify(const std::filesystem::path& folder, const Manifest& manifest, int part = 0,
            int parts = 1);
/// Brings the same part of the files into the page cache, so that a process that starts has its
/// checkpoint there when it has made its model. Blocks while the disk reads. Throws as
/// `verify_sizes` does.
void read_ahead(const std::filesystem::path& folder, const Manifest& manifest, int part, int parts);

/// Replaces the text that rank 0 has attached under a name, in one step.
void attach(const std::filesystem::path& folder, const std::string& name, std::string text);

}  // namespace zero
