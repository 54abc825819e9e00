// Reads the tensors of a model's weights as other programs keep them: in a file of safetensors or
// of torch.save, or in a folder with one of these or with several and an index.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "zero/checkpoint/weight_place.h"

namespace zero {

/// The names of the file of weights and of the index in a folder, as this library writes them.
inline constexpr const char* kWeightsFile = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";
/// Returns the files of weights in a folder that have names of this library's: those two, and
/// model-00001-of-00003.safetensors. Sorted; none where the folder cannot be read.
std::vector<std::filesystem::path> own_weights_in(const std::filesystem::path& folder);
/// The names that transformers gave to files of torch.save.
inline constexpr const char* kTorchWeightsFile = "pytorch_model.bin";
inline constexpr const char* kTorchWeightsIndex = "pytorch_model.bin.index.json";

/// Reads ranges of tensors from whichever file has them. Opening reads only what describes them;
/// nothing in a file is run. Of a file of torch.save the weights are what stands under
/// "state_dict", "model_state_dict", "model" or "module", if one of these is there; if all names
/// begin with "module." (DistributedDataParallel), they lose it. A matrix that bitsandbytes has
/// quantised is one in floating point here: Note [Files of bitsandbytes]. A CheckpointError names
/// the file and the fault: a folder without weights, an index that is not an object of names and
/// files, a file that is missing or damaged, or a tensor that its file does not have or that two
/// files have.
class WeightFiles {
 public:
  /// The files of a folder. `of_a_model` are, in this order: model.safetensors, its index,
  /// pytorch_model.bin, its index, and model.pt or pytorch_model.pt. `any` are, where there are
  /// none of these, those of another index, or all files of safetensors, or all of torch.save.
  enum class Folder : uint8_t { of_a_model, any };

  /// `path` is a file, or a folder. The file is of torch.save if it is called .pt, .bin, .pth or
  /// .ckpt; of `any`, if it is not called .safetensors.
  explicit WeightFiles(const std::filesystem::path& path, Folder folder = Folder::of_a_model);

  const std::filesystem::path& path() const { return path_; }
  bool contains(std::string_view name) const { return places_.find(name) != places_.end(); }
  /// Returns all names in order.
  std::vector<std::string> names() const;
  /// Returns all names, those of each file in its order.
  const std::vector<std::string>& names_by_file() const { return by_file_; }
  const TensorInfo& info(std::string_view name) const { return place(name).info; }
  /// Return the elements [begin, begin + count), in row-major order, or the tensor. Only their
  /// bytes are read; but a tensor that torch.save has kept as a view with other strides is read
  /// whole. Both throw as the functions of SafetensorsReader do.
  at::Tensor read(std::string_view name, int64_t begin, int64_t count) const;
  at::Tensor read(std::string_view name) const { return place(name).read(); }
  /// Reads all files of torch.save, and compares the checksums that they have.
  void verify() const;

  /// Names that the index has for tensors under other names.
  const std::map<std::string, std::string>& ties() const { return ties_; }
  /// Says what files have beside weights.
  const std::vector<std::string>& left_out() const { return left_out_; }

 private:
  void add(const std::filesystem::path& file);
  void add_safetensors(const std::filesystem::path& file);
  void add_torch_file(const std::filesystem::path& file);
  void add_place(WeightPlace place);
  void add_index(const std::filesystem::path& index);
  void add_folder(Folder folder);
  void drop_wrapper();
  void read_back_quantised();
  const WeightPlace& place(std::string_view name) const;

  std::filesystem::path path_;
  WeightPlaces places_;
  std::vector<std::string> by_file_;
  std::vector<std::function<void()>> checks_;
  std::map<std::string, std::string> ties_;
  std::vector<std::string> left_out_;
};

}  // namespace zero
