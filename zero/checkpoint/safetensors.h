// Files of named tensors in the safetensors format: a u64 header length, a JSON header {name:
// {dtype, shape, data_offsets}}, and the tensors' bytes without gaps, little-endian.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

class InputFile;
class OutputFile;
struct FileSums;

/// The entry of a tensor in a safetensors header.
struct TensorInfo {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;

  bool operator==(const TensorInfo&) const = default;
};

/// Returns the dtype that the format calls so: "BF16".
std::optional<at::ScalarType> safetensors_dtype(std::string_view name);
/// Returns the format's name of a dtype, or nothing where it has none.
std::string_view safetensors_name(at::ScalarType dtype);

/// Writes a safetensors file without holding more than one tensor: all are declared first, then
/// written in any order, each once. The file appears under its name at `commit`, complete and on
/// the disk; without it nothing remains. Every failure is a CheckpointError.
class SafetensorsWriter {
 public:
  /// `metadata` is kept in the header. CheckpointError for names that repeat or are not UTF-8, or a
  /// dtype without a name in the format.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();

  /// Writes the tensor declared as `name`, of its dtype and shape, on any device. CheckpointError
  /// when it does not fit the declaration, was not declared or is written already.
  void write(std::string_view name, const at::Tensor& tensor);
  /// CheckpointError when a declared tensor is missing.
  void commit();

  /// Returns the tensors in the order of their bytes.
  const std::vector<TensorInfo>& order() const { return order_; }
  /// Returns the file's checksums, where the tensors were written in that order. After `commit`.
  const FileSums& sums() const;

 private:
  struct Slot {
    TensorInfo info;
    uint64_t offset = 0;
    bool written = false;
  };
  std::filesystem::path path_;
  std::vector<TensorInfo> order_;
  std::map<std::string, Slot, std::less<>> slots_;
  std::unique_ptr<OutputFile> file_;
};

/// Reads a safetensors file: opening reads the header alone, and checks it. A CheckpointError names
/// the file and the fault: a wrong length of the header, bad or too deep JSON, repeated names,
/// unknown dtypes or shapes, and offsets that overlap, leave a gap or do not match the file's size.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path);
  ~SafetensorsReader();

  /// All tensors, in the order of their bytes.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const { return places_.find(name) != places_.end(); }
  /// Returns what the header says of a tensor. CheckpointError when there is no such tensor.
  const TensorInfo& info(std::string_view name) const { return tensors_[place(name).index]; }
  const std::filesystem::path& path() const;

  /// Returns a copy of the tensor on the CPU. CheckpointError when there is no such tensor, or when
  /// the file was truncated since it was opened.
  at::Tensor read(std::string_view name) const;
  /// Returns a copy of elements [begin, begin + count) of the tensor, counted in row-major order,
  /// as a 1-D tensor on the CPU. Reads their bytes alone. CheckpointError as above, and when the
  /// tensor does not have these elements.
  at::Tensor read(std::string_view name, int64_t begin, int64_t count) const;

 private:
  struct Place {
    size_t index = 0;   // in tensors_
    size_t offset = 0;  // in the file
  };
  const Place& place(std::string_view name) const;

  std::unique_ptr<InputFile> file_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, Place, std::less<>> places_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace zero
