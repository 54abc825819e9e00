#include "zero/checkpoint/safetensors.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"

namespace zero {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr const char* kMetadata = "__metadata__";
constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit

constexpr std::array<std::pair<std::string_view, at::ScalarType>, 15> kDtypes{
    {{"F64", at::kDouble},
     {"F32", at::kFloat},
     {"F16", at::kHalf},
     {"BF16", at::kBFloat16},
     {"I64", at::kLong},
     {"I32", at::kInt},
     {"I16", at::kShort},
     {"I8", at::kChar},
     {"U64", at::kUInt64},
     {"U32", at::kUInt32},
     {"U16", at::kUInt16},
     {"U8", at::kByte},
     {"BOOL", at::kBool},
     {"F8_E4M3", at::kFloat8_e4m3fn},
     {"F8_E5M2", at::kFloat8_e5m2}}};

std::optional<at::ScalarType> dtype_of(std::string_view name) {
  for (const auto& [known, dtype] : kDtypes) {
    if (known == name) return dtype;
  }
  return {};
}

std::optional<std::string_view> name_of(at::ScalarType dtype) {
  for (const auto& [name, known] : kDtypes) {
    if (known == dtype) return name;
  }
  return {};
}

std::string describe(at::ScalarType dtype, at::IntArrayRef shape) {
  return fmt::format("{} ({})", c10::toString(dtype), fmt::join(shape, ", "));
}

// Returns the bytes of a tensor, or nothing if a dimension is negative or the product does not fit
// in an int64. A dimension of 0 does not excuse large ones, since strides are products of the
// others.
std::optional<uint64_t> byte_size(const TensorInfo& info) {
  auto size = static_cast<int64_t>(c10::elementSize(info.dtype));
  bool empty = false;
  for (const int64_t dimension : info.shape) {
    empty |= dimension == 0;
    if (dimension < 0 || __builtin_mul_overflow(size, std::max<int64_t>(dimension, 1), &size))
      return {};
  }
  return empty ? 0 : static_cast<uint64_t>(size);
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path) {
  const auto refuse = [&](const std::string& why) {
    throw CheckpointError(fmt::format("Cannot write {}: {}.", path.string(), why));
  };
  // Tensors with wide elements come first, as other writers do: every tensor then lies at a
  // multiple of its element's size.
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  uint64_t end = 0;
  for (const auto& info : tensors) {
    const auto dtype = name_of(info.dtype);
    const auto size = byte_size(info);
    if (!dtype)
      refuse(fmt::format("the tensor '{}' is of dtype {}, which safetensors has no name for",
                         info.name, c10::toString(info.dtype)));
    if (!size)
      refuse(fmt::format("the tensor '{}' has the shape {}", info.name,
                         describe(info.dtype, info.shape)));
    if (info.name == kMetadata) refuse(fmt::format("a tensor cannot be named '{}'", kMetadata));
    const uint64_t begin = end;
    end += *size;
    header[info.name] = {{"dtype", *dtype}, {"shape", info.shape}, {"data_offsets", {begin, end}}};
    if (!slots_.try_emplace(info.name, Slot{info, begin}).second) {
      refuse(fmt::format("two tensors are named '{}'", info.name));
    }
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    refuse(fmt::format("a name is not UTF-8 ({})", error.what()));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  file_ = std::make_unique<OutputFile>(path, &fail<CheckpointError>);
  file_->write(&length, sizeof length);
  file_->write(text.data(), text.size());
  for (auto& [name, slot] : slots_) slot.offset += sizeof length + length;
  order_ = std::move(tensors);
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(std::string_view name, const at::Tensor& tensor) {
  const auto refuse = [&](const std::string& why) {
    throw CheckpointError(
        fmt::format("Cannot write the tensor '{}' to {}: {}.", name, path_.string(), why));
  };
  const auto found = slots_.find(name);
  if (found == slots_.end()) refuse("it was not declared");
  auto& slot = found->second;
  if (slot.written) refuse("it is written already");
  if (tensor.scalar_type() != slot.info.dtype || !tensor.sizes().equals(slot.info.shape)) {
    refuse(fmt::format("it was declared as {} and is {}",
                       describe(slot.info.dtype, slot.info.shape),
                       describe(tensor.scalar_type(), tensor.sizes())));
  }
  const auto values = tensor.detach().to(at::kCPU).contiguous();
  if (slot.offset == file_->size()) {
    file_->write(values.const_data_ptr(), values.nbytes());
  } else {
    file_->write_at(slot.offset, values.const_data_ptr(), values.nbytes());
  }
  slot.written = true;
}

void SafetensorsWriter::commit() {
  for (const auto& [name, slot] : slots_) {
    if (!slot.written)
      throw CheckpointError(fmt::format("Cannot complete {}: the tensor '{}' was not written.",
                                        path_.string(), name));
  }
  file_->commit();
}

const FileSums& SafetensorsWriter::sums() const { return file_->sums(); }

std::optional<at::ScalarType> safetensors_dtype(std::string_view name) { return dtype_of(name); }
std::string_view safetensors_name(at::ScalarType dtype) { return name_of(dtype).value_or(""); }

namespace {

struct Entry {
  TensorInfo info;
  uint64_t begin = 0;
  uint64_t end = 0;
};

Entry parse_entry(const std::string& name, const json& value) {
  const auto refuse = [&](const std::string& why) {
    throw CheckpointError(fmt::format("the tensor '{}' {}", excerpt(name), why));
  };
  const auto is_sizes = [](const json& list) {
    return list.is_array() && std::all_of(list.begin(), list.end(), [](const json& item) {
             return item.is_number_unsigned();
           });
  };
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    refuse("lacks a dtype, a shape or data_offsets");
  }
  const auto& dtype = value["dtype"];
  const auto& shape = value["shape"];
  const auto& offsets = value["data_offsets"];
  const auto known = dtype.is_string() ? dtype_of(dtype.get<std::string>()) : std::nullopt;
  if (!known) refuse(fmt::format("has the unknown dtype {}", excerpt(dtype.dump())));
  if (!is_sizes(shape)) refuse(fmt::format("has the shape {}", excerpt(shape.dump())));
  if (!is_sizes(offsets) || offsets.size() != 2)
    refuse(fmt::format("has the data_offsets {}", excerpt(offsets.dump())));
  Entry entry{{name, *known, shape.get<std::vector<int64_t>>()},
              offsets[0].get<uint64_t>(),
              offsets[1].get<uint64_t>()};
  const auto size = byte_size(entry.info);
  if (!size) refuse(fmt::format("has the shape {}, which is too large", excerpt(shape.dump())));
  if (entry.end < entry.begin || entry.end - entry.begin != *size) {
    refuse(fmt::format("of {} has {} bytes, and its data_offsets are {}",
                       excerpt(describe(entry.info.dtype, entry.info.shape)), *size,
                       offsets.dump()));
  }
  return entry;
}

// Returns the header's entries in the order of their bytes. The bytes must follow each other from 0
// to `size`.
std::vector<Entry> parse_entries(const json& header, uint64_t size) {
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != kMetadata) entries.push_back(parse_entry(name, value));
  }
  // Entries are sorted by begin, then by end: a tensor without elements goes before its neighbour.
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const auto& entry : entries) {
    if (entry.begin != end) {
      throw CheckpointError(
          fmt::format("the tensor '{}' begins at {}, and the one before it ends at {}: they {}",
                      excerpt(entry.info.name), entry.begin, end,
                      entry.begin < end ? "overlap" : "leave a gap"));
    }
    end = entry.end;
  }
  if (end != size) {
    throw CheckpointError(
        fmt::format("the tensors have {} bytes, and the file has {} after its header: it {}", end,
                    size, end > size ? "is truncated" : "holds bytes of no tensor"));
  }
  return entries;
}

std::map<std::string, std::string> parse_metadata(const json& header) {
  std::map<std::string, std::string> metadata;
  const auto found = header.find(kMetadata);
  if (found == header.end()) return metadata;
  if (!found->is_object()) throw CheckpointError(fmt::format("its {} is not an object", kMetadata));
  for (const auto& [key, value] : found->items()) {
    if (!value.is_string())
      throw CheckpointError(fmt::format("the {} '{}' is not a string", kMetadata, excerpt(key)));
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path)
    : file_(std::make_unique<InputFile>(path, &fail<CheckpointError>)) {
  const auto refuse = [&](const std::string& why) {
    throw CheckpointError(
        fmt::format("{} is not a safetensors file or is damaged: {}.", path.string(), why));
  };
  uint64_t length = 0;
  if (file_->size() < sizeof length) refuse(fmt::format("it has only {} bytes", file_->size()));
  file_->read_at(0, &length, sizeof length);
  const uint64_t rest = file_->size() - sizeof length;
  if (length > rest)
    refuse(fmt::format("it promises a header of {} bytes, and {} follow", length, rest));
  if (length > kMaxHeader) {
    refuse(fmt::format("its header has {} bytes, and the format allows {}", length, kMaxHeader));
  }
  std::string text(length, '\0');
  file_->read_at(sizeof length, text.data(), length);
  try {
    const auto header = [&] {
      try {
        return parse_json(text);
      } catch (const Error& error) {
        throw CheckpointError(fmt::format("its header {}", error.what()));
      }
    }();
    if (!header.is_object()) throw CheckpointError("its header is not a JSON object");
    if (text.front() != '{') throw CheckpointError("its header does not begin with '{'");
    metadata_ = parse_metadata(header);
    for (auto& entry : parse_entries(header, rest - length)) {
      places_[entry.info.name] = {tensors_.size(), sizeof length + length + entry.begin};
      tensors_.push_back(std::move(entry.info));
    }
  } catch (const CheckpointError& error) {
    refuse(error.what());
  }
}

SafetensorsReader::~SafetensorsReader() = default;

const std::filesystem::path& SafetensorsReader::path() const { return file_->path(); }

const SafetensorsReader::Place& SafetensorsReader::place(std::string_view name) const {
  const auto found = places_.find(name);
  if (found != places_.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& info : tensors_) names.push_back(info.name);
  throw CheckpointError(
      fmt::format("{} holds no tensor '{}'.{}", path().string(), name, did_you_mean(name, names)));
}

at::Tensor SafetensorsReader::read(std::string_view name) const {
  const auto& info = this->info(name);
  const auto bytes = static_cast<int64_t>(byte_size(info).value());
  return read(name, 0, bytes / static_cast<int64_t>(c10::elementSize(info.dtype))).view(info.shape);
}

at::Tensor SafetensorsReader::read(std::string_view name, int64_t begin, int64_t count) const {
  const auto& [index, offset] = place(name);
  const auto& info = tensors_[index];
  const auto element = static_cast<int64_t>(c10::elementSize(info.dtype));
  const int64_t numel = static_cast<int64_t>(byte_size(info).value()) / element;
  if (begin < 0 || count < 0 || begin > numel || count > numel - begin) {
    throw CheckpointError(
        fmt::format("{}: {} elements from number {} on were asked of the tensor "
                    "'{}', which has {}.",
                    path().string(), count, begin, name, numel));
  }
  auto values = at::empty({count}, info.dtype);
  if (count > 0) {
    file_->read_at(offset + static_cast<size_t>(begin * element), values.mutable_data_ptr(),
                   values.nbytes());
  }
  return values;
}

}  // namespace zero
