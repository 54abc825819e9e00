// The models of the compositions: a chain of small blocks, of any kinds in any order.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/models/language/layer_sequence.h"

namespace zero::compositions {

/// A chain of blocks from (3, 7) to (3, 7), and a head of one output. Its values depend on nothing
/// but the words, so that each rank and each run builds the same model.
class Network : public torch::nn::Module {
 public:
  /// `rank` decides the data, and `expert` which of the ranks' experts this one uses. `dtype` is
  /// that of the parameters once the engine has them.
  Network(const std::vector<std::string_view>& words, int expert, int rank, at::ScalarType dtype,
          bool recomputes);

  /// Returns the words that a block may be. The first means that there is no block.
  static const std::vector<std::string_view>& words();

  /// Returns the loss of micro-batch `number` of this rank; `other` is another loss function.
  at::Tensor loss(int64_t number, bool other = false);
  /// Returns the model as layers, for micro-batches `first` to `first` + `count` - 1.
  LayerSequence layers(int64_t first, int64_t count);

  int64_t step = 0;    ///< blocks that take turns depend on it
  bool skips = false;  ///< every second block is left out
  /// Backward throws `Thrown` when it comes to the output of the first block.
  bool throws = false;
  struct Thrown : std::exception {};

 private:
  using Block = std::function<at::Tensor(const at::Tensor&)>;
  Block make(size_t place, std::string_view word);
  at::Tensor weight(const std::string& name, at::IntArrayRef sizes, bool trained = true);
  at::Tensor input(int64_t number) const;
  at::Tensor loss_of(const at::Tensor& last, bool other) const;
  bool skipped(size_t block) const { return skips && block % 2 == 1; }

  int expert_;
  int rank_;
  at::ScalarType dtype_;
  bool recomputes_;
  double phase_ = 0;
  std::vector<Block> blocks_;
  at::Tensor head_;
};

}  // namespace zero::compositions
