// Writes files of torch.save (zip form), which torch.load(weights_only=True) reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/file.h"

namespace zero::foreign {

/// Collects the storages of one object. Its pickle is put together by the caller, from `tensor` and
/// zero::foreign::pickled.
class PtWriter {
 public:
  /// Returns the pickle of a tensor, whose storage goes into the file. Tensors that share one in
  /// memory share it in the file where `shares`; else the file has the elements alone, in row-major
  /// order. Throws CheckpointError for a dtype that such files have no name for.
  std::string tensor(const at::Tensor& tensor, bool shares = false);
  /// Appends the zip file of the object to a file that is being written; returns its bytes.
  size_t append(OutputFile& file, const std::string& root) const;
  /// Writes it to `path`, whole or not at all. Throws CheckpointError.
  void write(const std::filesystem::path& path, const std::string& root) const;

 private:
  std::vector<at::Tensor> storages_;  // on the CPU and one-dimensional
  // What each was in memory.
  std::vector<std::pair<const void*, at::ScalarType>> shared_;
};

}  // namespace zero::foreign
