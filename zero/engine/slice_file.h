// The file that a rank writes to a checkpoint: its slices of all states, and its buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/engine/state_file.h"

namespace zero {

class SliceFile {
 public:
  /// A tensor of the file: elements of a cell, or a tensor that is no cell.
  struct Piece {
    std::string key;
    int64_t unit = -1;  ///< -1: no cell
    State state = State::parameters;
    bool in_force = true;      ///< else the values after a delayed update: StateTable::read_new
    partition::Range owned{};  ///< counted from the first element that this rank owns of the unit
    at::Tensor whole{};        ///< the tensor that is no cell
    int64_t bytes = 0;
    bool exposed = true;  ///< code outside the table may write its memory between updates
  };

  struct Contents {
    bool owned = true;  ///< false: another rank saves this rank's states
    /// A delayed update is computed, and its parameters are not in force: the file has both.
    bool in_force = false;
  };

  /// Lists the pieces. The first rank saves factored states that every rank has. `parts` outlive
  /// this.
  SliceFile(const StateParts& parts, int rank, int ranks, Contents contents);

  /// Creates the file in `folder`, writes its header, and brings the pieces into their order there.
  /// Throws CheckpointError.
  void create(const std::filesystem::path& folder);
  /// Returns the pieces, after `create` in the order of their bytes in the file.
  const std::vector<Piece>& pieces() const { return pieces_; }
  /// Returns the values of a piece as they are now: the memory itself where the file has its bytes,
  /// else a copy.
  at::Tensor values(const Piece& piece) const;
  /// Writes the values of a piece, on any device. Each piece is written once, and in their order.
  void write(const Piece& piece, const at::Tensor& values) { file_->write(piece.key, values); }
  /// Completes the file, and returns its entry in the manifest without attached texts.
  Manifest::File commit();

 private:
  void add_slices(bool in_force);
  void add_factored(int64_t parameter, int rank, bool owned);
  void add(std::string key, at::ScalarType dtype, std::vector<int64_t> shape, Piece piece);
  void add(std::string key, const at::Tensor& whole);

  StateParts parts_;
  std::vector<TensorInfo> infos_;
  std::vector<Piece> pieces_;
  Manifest::File entry_;
  std::unique_ptr<SafetensorsWriter> file_;
};

}  // namespace zero
