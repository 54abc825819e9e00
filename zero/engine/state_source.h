// Sources that an engine loads saved states from.
//
// Note [Sources of states]
// A source gives ranges of a parameter's elements for each state, and knows how its files lie: the
// files of a sharded save, or one file of whole tensors, which may be another program's. Its
// constructor checks all that the model needs before anything of the engine changes. `restore` puts
// what a source gives into the table, cell by cell: it holds one cell, and one parameter's part of
// it, at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "zero/engine/state_file.h"
#include "zero/engine/unit_plan.h"
#include "zero/partition/layout.h"

namespace zero {

class StateSource {
 public:
  virtual ~StateSource() = default;
  virtual Progress progress() const = 0;
  /// Returns whether `read` gives a state of a unit. An engine derives a state that no source
  /// gives: master weights from the parameters, and moments as zeros.
  virtual bool has(int64_t unit, State state) const = 0;
  /// Returns elements of a parameter, counted in the order of its storage, as a 1-D tensor on the
  /// CPU of any floating-point dtype; or their bytes where the source `has_codes` and the state is
  /// one of 8 bits: then `elements` are whole blocks.
  virtual at::Tensor read(int64_t parameter, State state, partition::Range elements) const = 0;
  /// Returns whether 8-bit states come as the bytes of their blocks.
  virtual bool has_codes() const = 0;
  /// Returns a factored state by its key, or an undefined tensor: then it begins as zeros.
  virtual at::Tensor factored(const std::string& key) const = 0;
  /// Returns a buffer by its place among the model's plain ones, or an undefined tensor: then it
  /// stays as it is.
  virtual at::Tensor buffer(size_t index) const = 0;
};

// Each opens its files and checks all that the model needs: CheckpointError.

/// The files of a sharded save, each with the elements that one rank owned, by unit. `states` has
/// the states of this rank, and `own` its buffers; saves of earlier versions have the buffers of
/// all ranks in `first`.
std::unique_ptr<StateSource> open_shards(const StateParts& parts,
                                         const std::filesystem::path& states,
                                         const std::filesystem::path& own,
                                         const std::filesystem::path& first);
/// A file by Engine::save_full, with all states as whole tensors.
std::unique_ptr<StateSource> open_tensors(const StateParts& parts,
                                          const std::filesystem::path& path);
/// The weights alone, from a file of any program whose tensors have the names of the parameters.
std::unique_ptr<StateSource> open_weights(const StateParts& parts,
                                          const std::filesystem::path& path);

/// Replaces every state of the table, the factored states and the buffers. Not collective.
void restore(const StateParts& parts, const StateSource& source);

}  // namespace zero
