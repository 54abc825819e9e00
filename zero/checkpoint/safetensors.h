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

/// Returns the dtype that has this name in the format, such as "BF16"; nothing if there is none.
std::optional<at::ScalarType> safetensors_dtype(std::string_view name);
/// Returns the format's name of a dtype; empty if it has none.
std::string_view safetensors_name(at::ScalarType dtype);

/// Writes a safetensors file without holding more than one tensor: all tensors are declared first,
/// then written in any order, each once. The file appears under its name at `commit`, complete and
/// on the disk; without `commit` nothing remains. Every failure is a CheckpointError.
class SafetensorsWriter {
 public:
  /// Declares the tensors. The header keeps `metadata`. Throws CheckpointError for names that
  /// repeat or are not UTF-8, and for a dtype that has no name in the format.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();

  /// Writes the tensor that was declared as `name`, with its dtype and shape, on any device. Throws
  /// CheckpointError if it does not fit the declaration, was not declared, or is written already.
  void write(std::string_view name, const at::Tensor& tensor);
  /// Completes the file. Throws CheckpointError if a declared tensor was not written.
  void commit();

  /// Returns the tensors in the order of their bytes.
  const std::vector<TensorInfo>& order() const { return order_; }
  /// Returns the file's checksums, if the tensors were written in that order. To be called after
  /// `commit`.
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

/// Reads a safetensors file. Opening reads and checks only the header. A CheckpointError names the
/// file and the fault: a wrong length of the header, bad or too deep JSON, repeated names, unknown
/// dtypes or shapes, or offsets that overlap, leave a gap or do not match the file's size.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path);
  ~SafetensorsReader();

  /// Returns all tensors, in the order of their bytes.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const { return places_.find(name) != places_.end(); }
  /// Returns the header's entry of a tensor. Throws CheckpointError if there is no such tensor.
  const TensorInfo& info(std::string_view name) const { return tensors_[place(name).index]; }
  const std::filesystem::path& path() const;

  /// Returns a copy of the tensor on the CPU. Throws CheckpointError if there is no such tensor, or
  /// if the file was truncated since it was opened.
  at::Tensor read(std::string_view name) const;
  /// Returns a copy of elements [begin, begin + count) of the tensor, counted in row-major order,
  /// as a 1-D tensor on the CPU. It reads only their bytes. Throws CheckpointError as above, and if
  /// the tensor does not have these elements.
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
