// Files of tensors, also of matrices that bitsandbytes has quantised, and matrices in NF4 and INT8.
// The first byte chooses: odd, the rest is the file; even, the rest up to a NUL is its header, to
// which the length is put, and what follows its tensors. The rest is the bytes of a matrix, too.
#include "zero/checkpoint/safetensors.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "tests/checkpoint/bitsandbytes.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/optim/base_format.h"

namespace {

std::string with_length(std::string_view header, std::string_view tensors) {
  const uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(header).append(tensors);
}

/// Returns the input whose header and tensors are those of a file with `tensors`.
std::string input_of(const zero::test::Tensors& tensors) {
  const zero::TemporaryFolder folder;
  zero::test::write_tensors(folder / "a.safetensors", tensors);
  const auto file = zero::TemporaryFolder::read(folder / "a.safetensors");
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  return "0" + file.substr(sizeof length, length) + '\0' + file.substr(sizeof length + length);
}

void expect_message(const zero::CheckpointError& error, const std::filesystem::path& path) {
  const std::string_view what = error.what();
  zero::ensure(what.find(path.string()) != what.npos && what.size() < 1000,
               "a message that names the file");
}

/// Reads all tensors, and parts of them, as a model's weights.
void read_weights(const std::filesystem::path& path) {
  try {
    const zero::WeightFiles files(path);
    for (const auto& name : files.names()) {
      const auto& info = files.info(name);
      const auto tensor = files.read(name);
      zero::ensure(tensor.scalar_type() == info.dtype && tensor.sizes() == info.shape,
                   "a tensor as it is described");
      const int64_t half = tensor.numel() / 2;
      const auto part = files.read(name, half, tensor.numel() - half);
      zero::ensure(part.view(at::kByte).equal(
                       tensor.reshape({-1}).slice(0, half).contiguous().view(at::kByte)),
                   "the part that the tensor has");
    }
  } catch (const zero::CheckpointError& error) {
    expect_message(error, path);
  }
}

/// Reads bytes as matrices that are kept in few bits: no bytes are wrong.
void read_matrices(std::string_view bytes) {
  for (const auto format : {zero::BaseFormat::nf4, zero::BaseFormat::int8}) {
    auto numel = static_cast<int64_t>(2 * bytes.size());
    const auto size = static_cast<int64_t>(bytes.size());
    while (numel > 0 && zero::optim::packed_bytes(format, numel) > size) --numel;
    if (numel == 0) continue;
    const auto* packed = reinterpret_cast<const std::byte*>(bytes.data());
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      auto values = at::empty({numel}, dtype);
      auto plain = at::empty({numel}, dtype);
      zero::optim::unpack(format, packed, numel, values.mutable_data_ptr(), dtype);
      zero::optim::unpack_reference(format, packed, numel, plain.mutable_data_ptr(), dtype);
      zero::ensure(at::allclose(values, plain, 0, 0, /*equal_nan=*/true),
                   "the values of plain loops");
    }
  }
}

}  // namespace

namespace zero {

std::vector<std::string> seeds() {
  using std::string_literals::operator""s;
  const std::string x = R"("x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::string y = R"("y":{"dtype":"BF16","shape":[1,0,3],"data_offsets":[8,8]})";
  const std::string z = R"("z":{"dtype":"U8","shape":[],"data_offsets":[8,9]})";
  std::vector<std::string> seeds{
      "0{" + x + "}\0"s + std::string(8, 'x'),
      R"(0{"__metadata__":{"format":"pt"},)" + x + "," + y + "," + z + "}  \0"s +
          std::string(9, 'x'),
      "0{" + x + "," + x + "}\0"s + std::string(8, 'x'),
      R"(0{"x":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})",
      R"(0{"x":{"dtype":"F32","shape":[-2],"data_offsets":[-8,18446744073709551615]}})",
      "0" + std::string(200, '[') + std::string(200, ']'),
      "1" + with_length("{" + x + "}", std::string(8, 'x')),
      "1" + std::string(16, '\xFF'),
      "1" + std::string(300, '\xFF'),  // scales that are NaN with all of its bits
  };
  at::manual_seed(3);
  test::Tensors nested, plain, rows;
  test::add_nf4(nested, "a.weight", 5, 26, {.dtype = "bfloat16"});
  test::add_nf4(plain, "a.weight", 3, 33, {.block = 32, .nested = false, .dtype = "float16"});
  test::add_int8(rows, "a", 4, 3);
  rows["b.weight"] = at::ones({2}, at::kHalf);
  for (const auto& tensors : {nested, plain, rows}) seeds.push_back(input_of(tensors));
  return seeds;
}

}  // namespace zero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static const zero::TemporaryFolder folder;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto end = std::min(rest.find('\0'), rest.size());
  const auto path = folder.write(
      zero::kWeightsFile,
      data[0] % 2 == 1
          ? std::string(rest)
          : with_length(rest.substr(0, end), rest.substr(std::min(rest.size(), end + 1))));
  try {
    const zero::SafetensorsReader reader(path);
    for (const auto& info : reader.tensors()) {
      const auto tensor = reader.read(info.name);
      zero::ensure(tensor.scalar_type() == info.dtype && tensor.sizes() == info.shape,
                   "a tensor as its header says");
    }
  } catch (const zero::CheckpointError& error) {
    expect_message(error, path);
  }
  read_weights(path);
  read_matrices(rest);
  return 0;
}
