// Reads files of torch.save by ranges, without running anything in them: Note [Pickles].
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

/// A tensor in a file: a strided view of a storage, whose elements lie one behind the other. Its
/// values are read only by `read`, which opens the file each time, so a program may hold any number
/// of these.
struct StoredTensor {
  std::shared_ptr<const std::filesystem::path> file;
  uint64_t storage = 0;      ///< the place of the storage's first byte in the file
  int64_t storage_size = 0;  ///< in elements
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  ///< place of the first element in the storage, in elements, as the strides
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  int64_t numel() const;
  bool is_contiguous() const;
  /// Returns the values on the CPU, with the file's strides. It reads the bytes between the first
  /// element and the last. Throws CheckpointError if the file has become shorter.
  at::Tensor read() const;
  /// Returns elements [begin, begin + count) of a contiguous tensor, as a 1-D tensor.
  at::Tensor read(int64_t begin, int64_t count) const;
};

/// An object that torch.save has written: as a zip file (since torch 1.6), in the form of earlier
/// versions, or as a tar (torch 0.1).
class PtFile {
 public:
  /// Reads the object without its tensors. `begin` and `size` may name a part of a file that is
  /// such an object (a piece of a distributed checkpoint). Throws CheckpointError, which names the
  /// file, if it is damaged or has none of these forms.
  explicit PtFile(const std::filesystem::path& path, uint64_t begin = 0,
                  std::optional<uint64_t> size = {});

  const Value& root() const { return pickle_->root(); }
  /// Returns the tensor that a value stands for; nothing if it is not a tensor. Throws
  /// CheckpointError if the tensor's storage is missing, or if the tensor reaches beyond it.
  std::optional<StoredTensor> tensor(const Value& value) const;
  /// Compares the checksums of all entries, if the file has them; each storage is read once. Throws
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

/// Returns the tensors within a value of a file by name. The names are keys of dicts and places in
/// lists, joined by dots. Throws CheckpointError for values that nest too deep.
std::vector<std::pair<std::string, StoredTensor>> tensors_in(const PtFile& file,
                                                             const Value& value);

/// Returns the dtype of "torch.FloatStorage" or "torch.float32"; nothing for another name.
std::optional<at::ScalarType> torch_dtype(std::string_view name);
/// Return torch's name of a dtype, such as "float32", and the name of its storage, such as
/// "FloatStorage". Throw CheckpointError if the dtype has no such name here.
std::string torch_name(at::ScalarType dtype);
std::string torch_storage(at::ScalarType dtype);

}  // namespace zero::foreign
