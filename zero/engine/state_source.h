// Sources that an engine loads saved states from.
//
// Note [Sources of states]
// A source gives ranges of a parameter's elements for each state, and knows how its files lie: the
// slices of a checkpoint, one file of whole tensors, which may be another program's, or what
// earlier versions saved. Its constructor checks all that the model needs before anything of the
// engine changes. `restore` puts what a source gives into the table, one piece of a parameter at a
// time.
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
  /// Returns whether `read` gives a moment of a parameter; else it begins as zeros.
  virtual bool has(int64_t parameter, State moment) const = 0;
  /// Returns elements of a parameter, counted in the order of its storage, as a 1-D tensor on the
  /// CPU of any floating-point dtype; or the bytes of whole blocks where the state is one of 8 bits
  /// both in the file and in the engine: then `elements` begin with a block. Master weights that a
  /// file does not have are its parameters.
  virtual at::Tensor read(int64_t parameter, State state, partition::Range elements) const = 0;
  /// Returns a factored state, or an undefined tensor: then it begins as zeros.
  virtual at::Tensor factored(int64_t parameter, std::string_view state) const = 0;
  /// Returns a buffer by its place among the model's plain ones, or an undefined tensor: then it
  /// stays as it is.
  virtual at::Tensor buffer(size_t index) const = 0;
};

// Each opens its files and checks all that the model needs: CheckpointError.

/// A checkpoint as `save_slices` wrote it, at any number of ranks. `manifest` is its own; `rank` is
/// that whose buffers are taken. Checks the model, and leaves the bytes of the files to `verify`.
std::unique_ptr<StateSource> open_slices(const StateParts& parts,
                                         const std::filesystem::path& folder, Manifest manifest,
                                         int rank);
/// The files that earlier versions saved at as many ranks (earlier_saves.cpp): `owner` has the
/// states of this rank, and `rank` its buffers.
std::unique_ptr<StateSource> open_shards(const StateParts& parts,
                                         const std::filesystem::path& folder, int owner, int rank,
                                         int ranks);
/// A file by Engine::save_full, with all states as whole tensors.
std::unique_ptr<StateSource> open_tensors(const StateParts& parts,
                                          const std::filesystem::path& path);

/// Replaces every state of the table, the factored states and the buffers. Not collective.
void restore(const StateParts& parts, const StateSource& source);

}  // namespace zero
