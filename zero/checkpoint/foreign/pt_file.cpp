#include "zero/checkpoint/foreign/pt_file.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/foreign/zip.h"

namespace zero::foreign {

using Kind = Value::Kind;

namespace {

struct DtypeNames {
  at::ScalarType dtype;
  std::string_view name;     // torch.NAME
  std::string_view storage;  // torch.STORAGE; "": an untyped one
};
constexpr std::array<DtypeNames, 17> kTorchDtypes{{
    {at::kFloat, "float32", "FloatStorage"},
    {at::kDouble, "float64", "DoubleStorage"},
    {at::kHalf, "float16", "HalfStorage"},
    {at::kBFloat16, "bfloat16", "BFloat16Storage"},
    {at::kLong, "int64", "LongStorage"},
    {at::kInt, "int32", "IntStorage"},
    {at::kShort, "int16", "ShortStorage"},
    {at::kChar, "int8", "CharStorage"},
    {at::kByte, "uint8", "ByteStorage"},
    {at::kBool, "bool", "BoolStorage"},
    {at::kComplexFloat, "complex64", "ComplexFloatStorage"},
    {at::kComplexDouble, "complex128", "ComplexDoubleStorage"},
    {at::kUInt16, "uint16", ""},
    {at::kUInt32, "uint32", ""},
    {at::kUInt64, "uint64", ""},
    {at::kFloat8_e4m3fn, "float8_e4m3fn", ""},
    {at::kFloat8_e5m2, "float8_e5m2", ""},
}};

// The bytes that a file of the legacy form begins with: the opcodes PROTO 2 and LONG1 with the
// form's first number, 0x1950a86a20f9469cfc6c.
constexpr std::string_view kLegacyMagic =
    "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
constexpr uint64_t kMostPickle = uint64_t{1} << 30;

std::string piece_of(const InputFile& file, uint64_t offset, uint64_t size) {
  std::string bytes(size, '\0');
  file.read_at(offset, bytes.data(), size);
  return bytes;
}

// Reads pickles and numbers that lie one behind the other in a part of a file.
class Sequence {
 public:
  Sequence(const InputFile& file, uint64_t begin, uint64_t end)
      : file_(file), at_(begin), end_(end) {}
  // Reads a pickle. Its length is not known before, so longer and longer pieces are tried.
  Pickle pickle() {
    for (uint64_t size = uint64_t{1} << 16;; size *= 16) {
      const uint64_t left = std::min(size, end_ - at_);
      try {
        Pickle read(piece_of(file_, at_, left));
        at_ += read.size();
        return read;
      } catch (const CheckpointError&) {
        if (left == end_ - at_ || size > kMostPickle) throw;
      }
    }
  }
  template <class Number>
  Number number() {
    Number value{};
    const auto offset = take(sizeof value);
    file_.read_at(offset, &value, sizeof value);
    return value;
  }
  // Steps over bytes, and returns the place where they begin.
  uint64_t take(uint64_t size) {
    if (size > end_ - at_)
      throw CheckpointError(
          fmt::format("{} bytes are wanted at byte {}, and {} follow: it is "
                      "truncated",
                      size, at_, end_ - at_));
    return std::exchange(at_, at_ + size);
  }
  bool at_end() const { return at_ == end_; }

 private:
  const InputFile& file_;
  uint64_t at_;
  uint64_t end_;
};

std::string text_at(const Value& tuple, size_t index) {
  if (tuple.is_sequence() && index < tuple.items.size()) {
    if (const auto text = tuple.items[index]->as_text()) return *text;
    if (const auto number = tuple.items[index]->as_integer()) return std::to_string(*number);
  }
  throw CheckpointError("a storage has no key");
}

at::ScalarType dtype_at(const Value& tuple, size_t index) {
  if (!tuple.is_sequence() || index >= tuple.items.size() || !tuple.items[index]->is(Kind::global))
    throw CheckpointError("a storage has no type");
  const auto dtype = torch_dtype(tuple.items[index]->text);
  if (!dtype)
    throw CheckpointError(fmt::format("a storage has the unknown type '{}'",
                                      excerpt(std::string(tuple.items[index]->text))));
  return *dtype;
}

}  // namespace

namespace {

void add_tensors(const PtFile& file, const Value& value, const std::string& name, int depth,
                 size_t& steps, std::vector<std::pair<std::string, StoredTensor>>& found) {
  steps += 1 + name.size() / 64;  // names may be long
  if (steps > kMostSteps || depth > kMostDepth)
    throw CheckpointError(fmt::format("'{}' nests too deep, or in itself", excerpt(name)));
  if (auto tensor = file.tensor(value)) {
    found.emplace_back(name, std::move(*tensor));
    return;
  }
  const auto add = [&](const std::string& key, const Value& item) {
    add_tensors(file, item, name.empty() ? key : name + "." + key, depth + 1, steps, found);
  };
  if (value.is(Kind::dict)) {
    for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
      const auto& key = *value.items[i];
      if (const auto text = key.as_text()) add(*text, *value.items[i + 1]);
      if (const auto number = key.as_integer()) add(std::to_string(*number), *value.items[i + 1]);
    }
  } else if (value.is_sequence()) {
    for (size_t i = 0; i < value.items.size(); ++i) add(std::to_string(i), *value.items[i]);
  }
}

}  // namespace

std::vector<std::pair<std::string, StoredTensor>> tensors_in(const PtFile& file,
                                                             const Value& value) {
  std::vector<std::pair<std::string, StoredTensor>> found;
  size_t steps = 0;
  add_tensors(file, value, "", 0, steps, found);
  return found;
}

std::optional<at::ScalarType> torch_dtype(std::string_view name) {
  if (!name.starts_with("torch.")) return {};
  name.remove_prefix(6);
  if (name == "storage.UntypedStorage") return at::kByte;
  // Torch 0.1 names tensors differently: torch.FloatTensor.
  const auto stem = name.ends_with("Tensor") ? name.substr(0, name.size() - 6) : "";
  for (const auto& each : kTorchDtypes) {
    if (each.name == name || (!each.storage.empty() && each.storage == name)) return each.dtype;
    if (!stem.empty() && each.storage.starts_with(stem) && each.storage.size() == stem.size() + 7)
      return each.dtype;
  }
  return {};
}

std::string torch_name(at::ScalarType dtype) {
  for (const auto& each : kTorchDtypes) {
    if (each.dtype == dtype) return std::string(each.name);
  }
  throw CheckpointError(
      fmt::format("The dtype {} has no name in files of torch.save.", c10::toString(dtype)));
}

std::string torch_storage(at::ScalarType dtype) {
  torch_name(dtype);
  for (const auto& each : kTorchDtypes) {
    if (each.dtype == dtype) return std::string(each.storage);
  }
  return {};
}

int64_t StoredTensor::numel() const {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return numel;
}

bool StoredTensor::is_contiguous() const {
  int64_t expected = 1;
  for (size_t d = sizes.size(); d > 0; --d) {
    if (sizes[d - 1] != 1 && strides[d - 1] != expected) return numel() == 0;
    expected *= sizes[d - 1];
  }
  return true;
}

at::Tensor StoredTensor::read() const {
  int64_t span = numel() == 0 ? 0 : 1;
  for (size_t d = 0; d < sizes.size() && span > 0; ++d) span += (sizes[d] - 1) * strides[d];
  const InputFile input(*file, &fail<CheckpointError>);
  auto values = at::empty({span}, dtype);
  const auto element = static_cast<uint64_t>(c10::elementSize(dtype));
  if (span > 0)
    input.read_at(storage + static_cast<uint64_t>(offset) * element, values.mutable_data_ptr(),
                  values.nbytes());
  return values.as_strided(sizes, strides);
}

at::Tensor StoredTensor::read(int64_t begin, int64_t count) const {
  if (!is_contiguous() || begin < 0 || count < 0 || count > numel() - begin)
    throw CheckpointError(
        fmt::format("'{}' holds {} elements of a tensor, and {} from number {} on "
                    "were asked for.",
                    file->string(), numel(), count, begin));
  auto part = *this;
  part.offset += begin;
  part.sizes = {count};
  part.strides = {1};
  return part.read();
}

PtFile::PtFile(const std::filesystem::path& path, uint64_t begin, std::optional<uint64_t> part)
    : path_(std::make_shared<const std::filesystem::path>(path)) {
  const InputFile file(path, &fail<CheckpointError>);
  const uint64_t size = part.value_or(file.size() - std::min(begin, file.size()));
  try {
    if (begin > file.size() || size > file.size() - begin)
      throw CheckpointError(fmt::format("bytes [{}, {}) are wanted of {}: it is truncated", begin,
                                        begin + size, file.size()));
    const auto head = piece_of(file, begin, std::min<uint64_t>(size, 512));
    if (head.starts_with("PK")) {
      read_zip(file, begin, size);
    } else if (head.starts_with(kLegacyMagic)) {
      read_legacy(file, begin, size);
    } else if (head.size() == 512 && head.substr(257, 5) == "ustar") {
      read_tar(file, begin, size);
    } else {
      throw CheckpointError("it is neither a zip file, nor of the earlier forms");
    }
  } catch (const CheckpointError& error) {
    refuse(error.what());
  }
}

void PtFile::refuse(const std::string& why) const {
  throw CheckpointError(
      fmt::format("'{}' is not a file of torch.save or is damaged: {}.", path_->string(), why));
}

void PtFile::read_zip(const InputFile& file, uint64_t begin, uint64_t size) {
  const auto entries = read_zip_directory(file, begin, size);
  const std::string tail = "data.pkl";
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const auto& each) {
    return each.first == tail || each.first.ends_with("/" + tail);
  });
  if (found == entries.end()) throw CheckpointError("no entry is named data.pkl");
  const auto root = found->first.substr(0, found->first.size() - tail.size());
  const auto read = [&](const ZipEntry& entry, const std::string& name) {
    if (entry.size > kMostPickle)
      throw CheckpointError(fmt::format("the entry '{}' has {} bytes", name, entry.size));
    auto bytes = piece_of(file, entry.offset, entry.size);
    if (entry.crc != 0 && crc32_of(bytes.data(), bytes.size()) != entry.crc)
      throw CheckpointError(
          fmt::format("the checksum of the entry '{}' is not that of its bytes", name));
    return bytes;
  };
  if (const auto order = entries.find(root + "byteorder"); order != entries.end()) {
    if (read(order->second, "byteorder") != "little")
      throw CheckpointError("its numbers are big-endian");
  }
  pickle_.emplace(read(found->second, tail));
  const auto data = root + "data/";
  for (auto entry = entries.lower_bound(data);
       entry != entries.end() && entry->first.starts_with(data); ++entry) {
    storages_[entry->first.substr(data.size())] = {entry->second.offset, entry->second.size,
                                                   entry->second.crc};
  }
}

void PtFile::read_legacy(const InputFile& file, uint64_t begin, uint64_t size) {
  Sequence sequence(file, begin, begin + size);
  for (int i = 0; i < 2; ++i) sequence.pickle();  // the magic number, and the version
  const auto system = sequence.pickle();
  const auto* little = system.root().find("little_endian");
  if (little == nullptr || little->as_integer() != 1)
    throw CheckpointError("it does not say that its numbers are little-endian");
  pickle_.emplace(sequence.pickle());
  const auto keys = sequence.pickle();
  // The numbers of elements stand with the references to storages.
  std::map<std::string, uint64_t> elements;
  std::set<const Value*> seen;
  std::vector<const Value*> open{&root()};
  while (!open.empty()) {
    const auto* value = open.back();
    open.pop_back();
    if (value == nullptr || !seen.insert(value).second) continue;
    if (value->is(Kind::persistent)) {
      const auto& id = *value->arguments;
      elements[text_at(id, 2)] = c10::elementSize(dtype_at(id, 1));
    }
    open.insert(open.end(), value->items.begin(), value->items.end());
    open.insert(open.end(), {value->arguments, value->state});
  }
  if (!keys.root().is_sequence()) throw CheckpointError("it has no list of its storages");
  for (size_t i = 0; i < keys.root().items.size(); ++i) {
    const auto key = text_at(keys.root(), i);
    const auto count = sequence.number<uint64_t>();
    uint64_t bytes = 0;
    if (!elements.contains(key) || __builtin_mul_overflow(count, elements[key], &bytes))
      throw CheckpointError(fmt::format("its storage '{}' has no type or size", excerpt(key)));
    storages_[key] = {sequence.take(bytes), bytes, 0};
  }
}

// Reads the members `storages`, `tensors` and `pickle`, each of which is a sequence of pickles and
// numbers.
void PtFile::read_tar(const InputFile& file, uint64_t begin, uint64_t size) {
  std::map<std::string, std::pair<uint64_t, uint64_t>> members;
  for (uint64_t at = begin; begin + size - at >= 512;) {
    const auto header = piece_of(file, at, 512);
    if (header[0] == '\0') break;
    const auto digits = std::string_view(header).substr(124, 12);
    uint64_t bytes = 0;
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), bytes, 8);
    at += 512;
    if (parsed.ec != std::errc{} || bytes > begin + size - at)
      throw CheckpointError("a member of the tar reaches beyond its end");
    members[std::string(header.c_str(), strnlen(header.c_str(), 100))] = {at, at + bytes};
    at += std::min((bytes + 511) / 512 * 512, begin + size - at);
  }
  const auto open = [&](const char* name) {
    const auto found = members.find(name);
    if (found == members.end())
      throw CheckpointError(fmt::format("it is a tar without a member '{}'", name));
    return Sequence(file, found->second.first, found->second.second);
  };
  const auto count_of = [](Sequence& sequence) {
    const auto count = sequence.pickle().root().as_integer();
    if (!count || *count < 0) throw CheckpointError("it has no number of its storages or tensors");
    return *count;
  };
  auto storages = open("storages");
  for (auto left = count_of(storages); left > 0; --left) {
    const auto head = storages.pickle();
    const uint64_t element = c10::elementSize(dtype_at(head.root(), 2));
    const auto count = storages.number<uint64_t>();
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(count, element, &bytes))
      throw CheckpointError("a storage is too large");
    storages_[text_at(head.root(), 0)] = {storages.take(bytes), bytes, 0};
  }
  auto tensors = open("tensors");
  for (auto left = count_of(tensors); left > 0; --left) {
    const auto head = tensors.pickle();
    const auto dimensions = tensors.number<uint32_t>();
    tensors.take(4);
    if (dimensions > 64)
      throw CheckpointError(fmt::format("a tensor has {} dimensions", dimensions));
    Shape shape{dtype_at(head.root(), 2), 0, {}, {}};
    for (auto* list : {&shape.sizes, &shape.strides}) {
      for (uint32_t d = 0; d < dimensions; ++d) list->push_back(tensors.number<int64_t>());
    }
    shape.offset = tensors.number<int64_t>();
    const auto storage = storages_.find(text_at(head.root(), 1));
    if (storage == storages_.end()) throw CheckpointError("a tensor has no storage");
    tensors_[text_at(head.root(), 0)] = view(storage->second, std::move(shape));
  }
  pickle_.emplace(open("pickle").pickle());
}

// Returns the tensor of this shape. It must lie within its storage.
StoredTensor PtFile::view(const Storage& storage, Shape shape) const {
  const auto element = static_cast<uint64_t>(c10::elementSize(shape.dtype));
  const auto count = static_cast<int64_t>(storage.bytes / element);
  int64_t last = shape.offset;
  int64_t numel = 1;
  bool fits = shape.offset >= 0 && shape.sizes.size() == shape.strides.size();
  for (size_t d = 0; d < shape.sizes.size() && fits; ++d) {
    const auto size = shape.sizes[d];
    const auto stride = shape.strides[d];
    int64_t reach = 0;
    fits = size >= 0 && stride >= 0 &&
           !__builtin_mul_overflow(numel, std::max<int64_t>(size, 1), &numel) &&
           !__builtin_mul_overflow(std::max<int64_t>(size - 1, 0), stride, &reach) &&
           !__builtin_add_overflow(last, reach, &last);
  }
  const bool empty = std::find(shape.sizes.begin(), shape.sizes.end(), 0) != shape.sizes.end();
  if (!fits || numel > std::numeric_limits<int64_t>::max() / 16 || (!empty && last >= count))
    throw CheckpointError(fmt::format(
        "a tensor of sizes [{}] and strides [{}] from element {} on does not lie within its "
        "storage "
        "of {} elements",
        fmt::join(shape.sizes, ","), fmt::join(shape.strides, ","), shape.offset, count));
  return {path_,
          storage.offset,
          count,
          shape.dtype,
          shape.offset,
          std::move(shape.sizes),
          std::move(shape.strides)};
}

std::optional<StoredTensor> PtFile::tensor(const Value& value) const {
  if (value.is(Kind::persistent) && value.arguments->is(Kind::text)) {
    const auto found = tensors_.find(std::string(value.arguments->text));
    return found == tensors_.end() ? std::nullopt : std::optional(found->second);
  }
  if (!value.is(Kind::object) || !value.callee->is(Kind::global)) return {};
  try {
    return call(*value.callee, *value.arguments, 0);
  } catch (const CheckpointError& error) {
    refuse(error.what());
  }
}

std::optional<StoredTensor> PtFile::call(const Value& function, const Value& arguments,
                                         int depth) const {
  if (!function.is(Kind::global) || !arguments.is_sequence() || depth > 8) return {};
  const auto name = function.text;
  const auto& items = arguments.items;
  if (name == "torch._tensor._rebuild_from_type_v2" && items.size() >= 3)
    return call(*items[0], *items[2], depth + 1);
  if ((name == "torch._utils._rebuild_parameter" ||
       name == "torch._utils._rebuild_parameter_with_state") &&
      !items.empty() && items[0]->is(Kind::object))
    return call(*items[0]->callee, *items[0]->arguments, depth + 1);
  const bool untyped = name == "torch._utils._rebuild_tensor_v3";
  if (!untyped && name != "torch._utils._rebuild_tensor_v2" &&
      name != "torch._utils._rebuild_tensor")
    return {};
  if (items.size() < (untyped ? 7 : 4) || !items[0]->is(Kind::persistent))
    throw CheckpointError("a tensor has no storage");
  const auto& id = *items[0]->arguments;
  if (!id.is_sequence() || id.items.size() < 5 || id.items[0]->as_text() != "storage")
    throw CheckpointError("the reference to a storage is not of the form that torch writes");
  if (id.items.size() > 5 && !id.items[5]->is(Kind::none))
    throw CheckpointError("a storage is a view of another one, as torch before 0.4 wrote it");
  Shape shape;
  shape.dtype = dtype_at(id, 1);
  if (untyped) {
    const auto& dtype = *items[6];
    const auto known = dtype.is(Kind::global) ? torch_dtype(dtype.text) : std::nullopt;
    if (!known) throw CheckpointError("a tensor has an unknown dtype");
    shape.dtype = *known;
  }
  const auto offset = items[1]->as_integer();
  auto sizes = items[2]->as_sizes();
  auto strides = items[3]->as_sizes();
  const auto key = text_at(id, 2);
  const auto storage = storages_.find(key);
  if (storage == storages_.end())
    throw CheckpointError(fmt::format("the storage '{}' is missing", excerpt(key)));
  if (!offset || !sizes || !strides) throw CheckpointError("a tensor has no sizes or strides");
  shape.offset = *offset;
  shape.sizes = std::move(*sizes);
  shape.strides = std::move(*strides);
  return view(storage->second, std::move(shape));
}

void PtFile::verify() const {
  const InputFile file(*path_, &fail<CheckpointError>);
  std::vector<char> buffer(size_t{1} << 20);
  for (const auto& [key, storage] : storages_) {
    if (storage.crc == 0) continue;
    uint32_t crc = 0;
    for (uint64_t at = 0; at < storage.bytes; at += buffer.size()) {
      const auto size = std::min<uint64_t>(buffer.size(), storage.bytes - at);
      file.read_at(storage.offset + at, buffer.data(), size);
      crc = crc32_of(buffer.data(), size, crc);
    }
    if (crc != storage.crc)
      refuse(fmt::format("the checksum of the storage '{}' is not that of its bytes", key));
  }
}

}  // namespace zero::foreign
