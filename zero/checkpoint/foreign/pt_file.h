// Files of torch.save, read by ranges, without running anything of them: Note [Pickles].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/checkpoint/file.h"
#include "zero/checkpoint/foreign/pickle.h"

namespace zero::foreign {

/// A tensor in a file: a strided view of a storage, whose elements lie one behind the other. It is
/// read when that is asked for, each time by opening the file, so any number of them may be held.
struct StoredTensor {
  std::shared_ptr<const std::filesystem::path> file;
  uint64_t storage = 0;      ///< the place of the storage's first byte in the file
  int64_t storage_size = 0;  ///< in elements
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  ///< of the first element in the storage, in elements, as strides
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  int64_t numel() const;
  bool is_contiguous() const;
  /// Returns the values on the CPU, with the file's strides, from the bytes between the first
  /// element and the last. Throws CheckpointError where the file has become shorter.
  at::Tensor read() const;
  /// Returns elements [begin, begin + count) of a tensor that is contiguous, as a 1-D tensor.
  at::Tensor read(int64_t begin, int64_t count) const;
};

/// An object that torch.save has written: as a zip file (torch 1.6 on), in the form of earlier
/// versions, or as a tar (torch 0.1).
class PtFile {
 public:
  /// Reads the object, and no tensor. `begin` and `size` name a part of a file that is one (of a
  /// piece of a distributed checkpoint). Throws CheckpointError, which names the file, for one that
  /// is damaged or none of these.
  explicit PtFile(const std::filesystem::path& path, uint64_t begin = 0,
                  std::optional<uint64_t> size = {});

  const Value& root() const { return pickle_->root(); }
  /// Returns the tensor that a value is; nothing where it is none. Throws CheckpointError for one
  /// whose storage is missing or which reaches beyond it.
  std::optional<StoredTensor> tensor(const Value& value) const;
  /// Compares the checksums of all entries, where the file has them: of each storage once. Throws
  /// CheckpointError.
  void verify() const;

 private:
  struct Storage {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint32_t crc = 0;
  };
  struct Shape {
    at::ScalarType dtype = at::kFloat;
    int64_t offset = 0;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };
  [[noreturn]] void refuse(const std::string& why) const;
  void read_zip(const InputFile& file, uint64_t begin, uint64_t size);
  void read_legacy(const InputFile& file, uint64_t begin, uint64_t size);
  void read_tar(const InputFile& file, uint64_t begin, uint64_t size);
  StoredTensor view(const Storage& storage, Shape shape) const;
  std::optional<StoredTensor> call(const Value& function, const Value& arguments, int depth) const;

  std::shared_ptr<const std::filesystem::path> path_;
  std::optional<Pickle> pickle_;
  std::map<std::string, Storage> storages_;
  std::map<std::string, StoredTensor> tensors_;  // of a tar, by key
};

/// Returns the tensors within a value of a file by name: keys of dicts and places in lists, joined
/// by dots. Throws CheckpointError for values that nest too deep.
std::vector<std::pair<std::string, StoredTensor>> tensors_in(const PtFile& file,
                                                             const Value& value);

/// Returns the dtype of "torch.FloatStorage" or "torch.float32"; nothing for another name.
std::optional<at::ScalarType> torch_dtype(std::string_view name);
/// Returns torch's name of a dtype: "float32", and of its storage: "FloatStorage". Throws
/// CheckpointError where it has none here.
std::string torch_name(at::ScalarType dtype);
std::string torch_storage(at::ScalarType dtype);

}  // namespace zero::foreign
