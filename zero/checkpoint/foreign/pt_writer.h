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

/// Collects the storages of one object. The caller puts its pickle together from `tensor` and
/// zero::foreign::pickled.
class PtWriter {
 public:
  /// Returns the pickle of a tensor, whose storage goes into the file. With `shares`, tensors that
  /// share a storage in memory share it in the file. Otherwise the file has only the elements, in
  /// row-major order. Throws CheckpointError for a dtype that has no name in such files.
  std::string tensor(const at::Tensor& tensor, bool shares = false);
  /// Appends the zip file of the object to a file that is being written. Returns the bytes of the
  /// zip file.
  size_t append(OutputFile& file, const std::string& root) const;
  /// Writes the zip file to `path`, whole or not at all. Throws CheckpointError.
  void write(const std::filesystem::path& path, const std::string& root) const;

 private:
  std::vector<at::Tensor> storages_;  // on the CPU and one-dimensional
  // The address and the dtype that each storage had in memory.
  std::vector<std::pair<const void*, at::ScalarType>> shared_;
};

}  // namespace zero::foreign
