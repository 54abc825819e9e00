// Reads the tensors of a model's weights as Hugging Face keeps them: in one safetensors file, or in
// a folder with several files and an index.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "zero/checkpoint/safetensors.h"

namespace zero {

/// The names of the file of weights and of the index in a folder.
inline constexpr const char* kWeightsFile = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";

/// The index of weights that lie in several files in the same folder.
struct WeightIndex {
  std::map<std::string, std::string> file_of;   ///< the file of each tensor
  std::map<std::string, std::string> metadata;  ///< texts of the index
};
/// Reads an index. A CheckpointError names it and the fault: it is not an object of names and
/// files, or a file is missing.
WeightIndex read_weight_index(const std::filesystem::path& index);

/// Reads ranges of tensors from whichever file has them. Opening reads only headers. A
/// CheckpointError names the file and the fault: a folder without weights, an index that is not an
/// object of names and files, a file that is missing or damaged, or a tensor that its file does not
/// have or that two files have.
class WeightFiles {
 public:
  /// `path` is a safetensors file, or a folder with `model.safetensors.index.json` or
  /// `model.safetensors`. If a folder has both, the one file is read, as in transformers.
  explicit WeightFiles(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  bool contains(std::string_view name) const { return file_of_.find(name) != file_of_.end(); }
  /// Returns all names in order.
  std::vector<std::string> names() const;
  /// Both throw as the functions of SafetensorsReader do.
  const TensorInfo& info(std::string_view name) const { return reader(name).info(name); }
  at::Tensor read(std::string_view name, int64_t begin, int64_t count) const {
    return reader(name).read(name, begin, count);
  }
  at::Tensor read(std::string_view name) const { return reader(name).read(name); }

 private:
  void add(const std::filesystem::path& file);
  void add_index(const std::filesystem::path& index);
  const SafetensorsReader& reader(std::string_view name) const;

  std::filesystem::path path_;
  std::vector<std::unique_ptr<SafetensorsReader>> files_;
  std::map<std::string, size_t, std::less<>> file_of_;  // by tensor
};

}  // namespace zero
