// Where saved states come from when an engine loads them.
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

/// The files of a sharded save, each with the elements that one rank owned, by unit.
class ShardSource final : public StateSource {
 public:
  /// `states` has the states of this rank, `own` its buffers; saves of earlier versions have the
  /// buffers of all in `first`.
  ShardSource(const StateParts& parts, const std::filesystem::path& states,
              const std::filesystem::path& own, const std::filesystem::path& first);
  Progress progress() const override { return states_->progress(parts_); }
  bool has(int64_t unit, State state) const override;
  at::Tensor read(int64_t parameter, State state, partition::Range elements) const override;
  bool has_codes() const override { return true; }
  at::Tensor factored(const std::string& key) const override;
  at::Tensor buffer(size_t index) const override;

 private:
  StateParts parts_;
  std::unique_ptr<StateFile> states_;
  std::unique_ptr<StateFile> with_buffers_;
  std::vector<std::string> buffers_;  // their keys
};

/// A file of whole tensors: all states by Engine::save_full, or the weights alone of any model
/// whose tensors have the names of this one's parameters.
class TensorSource final : public StateSource {
 public:
  enum class Holds : uint8_t { states, weights };
  TensorSource(const StateParts& parts, const std::filesystem::path& path, Holds holds);
  Progress progress() const override;
  bool has(int64_t unit, State state) const override;
  at::Tensor read(int64_t parameter, State state, partition::Range elements) const override;
  bool has_codes() const override { return false; }
  at::Tensor factored(const std::string& key) const override;
  at::Tensor buffer(size_t index) const override;

 private:
  void find_states();
  void find_weights();
  StateParts parts_;
  StateFile file_;
  Holds holds_;
  std::vector<std::string> names_;    // of parameters in the file
  std::vector<std::string> buffers_;  // the same of buffers; empty where the file has none
};

/// Replaces every state of the table, the factored states and the buffers. Not collective.
void restore(const StateParts& parts, const StateSource& source);

}  // namespace zero
