// Files of tensors. The first byte chooses: odd, the rest is the file; even, the rest up to a NUL
// is its header, to which the length is put, and what follows its tensors.
#include "zero/checkpoint/safetensors.h"

#include <ATen/core/Tensor.h>

#include <cstring>
#include <string_view>

#include "tests/fuzz/fuzz.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"

namespace {

std::string with_length(std::string_view header, std::string_view tensors) {
  const uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(header).append(tensors);
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
  };
  return seeds;
}

}  // namespace zero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static const zero::TemporaryFolder folder;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto end = std::min(rest.find('\0'), rest.size());
  const auto path = folder.write(
      "a.safetensors", data[0] % 2 == 1 ? std::string(rest)
                                        : with_length(rest.substr(0, end),
                                                      rest.substr(std::min(rest.size(), end + 1))));
  try {
    const zero::SafetensorsReader reader(path);
    for (const auto& info : reader.tensors()) {
      const auto tensor = reader.read(info.name);
      zero::ensure(tensor.scalar_type() == info.dtype && tensor.sizes() == info.shape,
                   "a tensor as its header says");
    }
  } catch (const zero::CheckpointError& error) {
    const std::string_view what = error.what();
    zero::ensure(what.find(path.string()) != what.npos && what.size() < 1000,
                 "a message that names the file");
  }
  return 0;
}
