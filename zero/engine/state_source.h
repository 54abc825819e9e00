// Sources that an engine loads saved states from.
//
// Note [Sources of states]
// A source gives ranges of a parameter's elements for each state, and knows how its files lie: the
// slices of a checkpoint, one file of whole tensors, which may be another program's, or files of
// earlier versions. Its constructor checks all that the model needs before anything of the engine
// changes. `restore` puts the source's values into the table, one piece of a parameter at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "zero/checkpoint/manifest.h"
#include "zero/engine/state_file.h"
#include "zero/engine/unit_plan.h"
#include "zero/partition/layout.h"

namespace zero {

class StateSource {
 public:
  virtual ~StateSource() = default;
  virtual Progress progress() const = 0;
  /// Returns whether `read` gives a moment of a parameter. If it does not, the moment begins as
  /// zeros.
  virtual bool has(int64_t parameter, State moment) const = 0;
  /// Returns elements of a parameter, counted in the order of its storage, as a 1-D tensor on the
  /// CPU of any floating-point dtype. If the state has 8 bits both in the file and in the engine,
  /// it returns the bytes of whole blocks; `elements` then begin with a block. If a file has no
  /// master weights, it returns the file's parameters for them.
  virtual at::Tensor read(int64_t parameter, State state, partition::Range elements) const = 0;
  /// Returns whether a delayed update was under way when the states were saved. `read` then gives
  /// the parameters after it, and `in_force` those that the next step computes with.
  virtual bool has_in_force() const { return false; }
  virtual at::Tensor in_force(int64_t parameter, partition::Range elements) const {
    return read(parameter, State::parameters, elements);
  }
  /// Returns a factored state, or an undefined tensor if it begins as zeros.
  virtual at::Tensor factored(int64_t parameter, std::string_view state) const = 0;
  /// Returns a buffer by its place among the model's plain ones, or an undefined tensor if it must
  /// not change.
  virtual at::Tensor buffer(size_t index) const = 0;
};

// Each of the next functions opens its files and checks all that the model needs. It throws
// CheckpointError.

/// Opens a checkpoint that `save_slices` wrote at any number of ranks. `manifest` is the
/// checkpoint's, and `rank` is the rank whose buffers are taken. It does not check the bytes of the
/// files; `verify` does.
std::unique_ptr<StateSource> open_slices(const StateParts& parts,
                                         const std::filesystem::path& folder, Manifest manifest,
                                         int rank);
/// Returns the names of the checkpoint's files that hold what such a source reads for this rank.
std::vector<std::string> files_needed(const StateParts& parts, const std::filesystem::path& folder,
                                      const Manifest& manifest, int rank);
/// Opens the files that earlier versions saved at as many ranks (earlier_saves.cpp): `owner` has
/// the states of this rank, and `rank` its buffers.
std::unique_ptr<StateSource> open_shards(const StateParts& parts,
                                         const std::filesystem::path& folder, int owner, int rank,
                                         int ranks);
/// Opens a file of Engine::save_full, with all states as whole tensors.
std::unique_ptr<StateSource> open_tensors(const StateParts& parts,
                                          const std::filesystem::path& path);

/// Replaces every state of the table, the factored states and the buffers. With `delayed` the
/// source's parameters become new ones that are not in force yet, and its `in_force` those in force
/// (UpdateSchedule::resume_delayed). Not collective.
void restore(const StateParts& parts, const StateSource& source, bool delayed = false);

}  // namespace zero
