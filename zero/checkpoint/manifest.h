// The manifest of a checkpoint: what its files hold, and a checksum of every byte of them.
//
// Note [Checkpoints]
// A checkpoint is a folder with a safetensors file of each rank and manifest.json. A file holds
// slices: ranges of a parameter's elements, of every state of it, as tensors of their own. The
// manifest says which file holds which range, so whoever reads asks for ranges of parameters and
// need not know how many ranks wrote, at which stage, or in which units. It has a checksum of each
// block of each file, and one of itself, and is written last: a folder with a manifest that is
// sound is complete, and no byte of it can change unnoticed. docs/checkpoint-format.md describes
// both byte by byte.
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

/// A checkpoint is not as it was written: a file is missing, cut off or changed. What was written
/// may be sound elsewhere, in an earlier checkpoint.
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

  /// A state of a parameter, whose slices are tensors "STATE.PARAMETER": "parameter", "master", or
  /// the optimizer's name of it.
  struct State {
    std::string name;
    /// A dtype as safetensors names it; or "8bit" and "8bit_positive", blocks of codes as
    /// optim/state_format.h has them, which are U8.
    std::string format;
    bool operator==(const State&) const = default;
  };
  struct Parameter {
    std::string name;
    std::vector<std::string> other_names;  ///< of one that is tied
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;  ///< slices have the elements in the order of the storage
    std::string optimizer;         ///< its kind; empty: the parameter is frozen
    int64_t group = 0;             ///< its number among `groups`
    int64_t steps = 0;             ///< updates that it has had
    std::vector<State> states;
    /// Factored states, whole in the first file under "STATE.PARAMETER", and their shapes.
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
  /// The file that a rank wrote. Every one also has all buffers, its rank's, under "buffer.NAME".
  struct File {
    std::string name;
    FileSums sums;
    std::vector<Slice> slices;
    Attached attached;
  };

  std::string library = library_version();  ///< the version that wrote it
  int64_t stage = 0;  ///< for people, as `configuration`: nothing depends on them
  std::string configuration = "{}";
  int64_t steps = 0;
  std::optional<LossScaleState> loss_scale;
  std::vector<std::string> groups;  ///< optimizer and hyper-parameters in force, as JSON text
  std::vector<Parameter> parameters;
  std::vector<TensorInfo> buffers;
  std::string buffer_policy;
  std::vector<File> files;  ///< by rank

  /// Returns the file whose buffers and attached texts a rank takes: its own, where there is one.
  const File& file_of(int rank) const { return files[static_cast<size_t>(rank) % files.size()]; }
};

/// Returns whether a folder has a manifest, sound or not.
bool has_manifest(const std::filesystem::path& folder);
/// Writes the manifest of a folder whose files are there: whole, or not at all.
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);
/// Reads it. Throws DamagedCheckpoint where it is missing or not as it was written, and
/// CheckpointError where another version wrote it.
Manifest read_manifest(const std::filesystem::path& folder);

/// A file's entry as JSON text, and back: what ranks tell the one that writes the manifest.
std::string to_text(const Manifest::File& file);
Manifest::File file_from_text(std::string_view text);

/// Looks for every file, and at its size. Throws DamagedCheckpoint, which names the file.
void verify_sizes(const std::filesystem::path& folder, const Manifest& manifest);
/// Reads part `part` of `parts` of the bytes of all files. Throws DamagedCheckpoint, which names
/// the file and the place, where they are not as they were written.
void verify(const std::filesystem::path& folder, const Manifest& manifest, int part = 0,
            int parts = 1);

/// Replaces what rank 0 has attached under a name, in one piece.
void attach(const std::filesystem::path& folder, const std::string& name, std::string text);

}  // namespace zero
