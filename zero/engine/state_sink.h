// Sinks that an engine's states are saved to.
//
// A sink names the tensors of a file, and writes cells of the table to them: this rank's as they
// are stored, or gathered ones, cut into parameters. One cell is held at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/engine/state_file.h"
#include "zero/engine/unit_plan.h"

namespace zero {

class StateSink {
 public:
  explicit StateSink(const StateParts& parts) : parts_(parts) {}
  virtual ~StateSink() = default;
  virtual const char* format() const = 0;
  /// Returns the tensors of the file that hold cells.
  virtual std::vector<TensorInfo> tensors() const = 0;
  /// Returns the states of a unit that are saved.
  virtual std::vector<State> states(int64_t unit) const = 0;
  /// Returns a cell as `write` takes it. Collective where `states` are gathered.
  virtual at::Tensor cell(int64_t unit, State state) const = 0;
  virtual void write(SafetensorsWriter& file, int64_t unit, State state,
                     const at::Tensor& cell) const = 0;

 protected:
  const StateParts& parts() const { return parts_; }

 private:
  StateParts parts_;
};

/// Makes a full unit of what each rank owns of it; collective.
using GatherUnit = std::function<at::Tensor(int64_t unit, const at::Tensor& owned)>;

/// The cells of this rank, as the table stores them. A rank whose states another one saves does not
/// `own` any.
std::unique_ptr<StateSink> shard_sink(const StateParts& parts, bool owns);
/// Whole tensors in fp32, by parameter.
std::unique_ptr<StateSink> tensor_sink(const StateParts& parts, GatherUnit gather);

/// A file that is being saved: the cells of a sink, factored states, buffers and the progress.
class SavedFile {
 public:
  SavedFile(const StateParts& parts, const StateSink& sink, const Progress& progress,
            const std::filesystem::path& path, bool with_factored);
  SafetensorsWriter& writer() { return *writer_; }
  /// Writes the rest, and makes the file appear.
  void commit();

 private:
  std::vector<std::pair<std::string, at::Tensor>> rest_;  // by key
  std::unique_ptr<SafetensorsWriter> writer_;
};

/// Takes each cell that `sink` saves, in order, and has `write` run on it.
void for_each_cell(const StateParts& parts, const StateSink& sink,
                   const std::function<void(int64_t unit, State state, const at::Tensor&)>& write);

}  // namespace zero
