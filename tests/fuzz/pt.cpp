// Files of torch.save. The first byte chooses: even, the rest is a file; odd, the rest is the
// pickle of one that has a storage "0" of 64 bytes.
#include "zero/checkpoint/pt.h"

#include <caffe2/serialize/inline_container.h>

#include <string>
#include <string_view>

#include "tests/fuzz/fuzz.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/foreign/pickle.h"

namespace {

std::string with_storage(std::string_view pickle) {
  std::string file;
  caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t size) {
    file.append(static_cast<const char*>(data), size);
    return size;
  });
  zip.writeRecord("data.pkl", pickle.data(), pickle.size());
  const std::string storage(64, 'x');
  zip.writeRecord("data/0", storage.data(), storage.size());
  zip.writeEndOfFile();
  return file;
}

}  // namespace

namespace zero {

std::vector<std::string> seeds() {
  using namespace foreign::pickled;
  const auto storage = tuple(
      {text("storage"), global("torch", "FloatStorage"), text("0"), text("cpu"), integer(16)});
  const auto tensor = [&](int64_t offset, const std::string& sizes, const std::string& strides) {
    return call(global("torch._utils", "_rebuild_tensor_v2"),
                {storage + "Q", integer(offset), sizes, strides, boolean(false),
                 call(global("collections", "OrderedDict"), {})});
  };
  const auto two = tuple({integer(2), integer(3)});
  const auto rows = tuple({integer(3), integer(1)});
  const auto huge = tuple({integer(int64_t{1} << 62), integer(8)});
  const auto dict_of = [](const std::string& value) {
    return whole(dict({{text("x"), value}, {integer(3), none()}}));
  };
  const auto good = dict_of(tensor(1, two, rows));
  return {"1" + good,
          "1" + dict_of(tensor(16, two, rows)),
          "1" + dict_of(tensor(0, huge, tuple({integer(0), integer(0)}))),
          "1" + dict_of(tensor(-1, two, tuple({integer(-1), integer(1)}))),
          "1" + whole(list({tensor(0, two, rows), real(1), text("y")})),
          "0" + with_storage(good),
          "0" + with_storage(good).substr(0, 200),
          std::string("0\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 16)};
}

}  // namespace zero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static const zero::TemporaryFolder folder;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto path = folder.write("a.pt", data[0] % 2 == 0 ? std::string(rest) : with_storage(rest));
  try {
    for (const auto& [name, tensor] : zero::load_pt(path)) {
      if (tensor.numel() < 100) tensor.contiguous();
    }
  } catch (const zero::CheckpointError& error) {
    zero::ensure(std::string_view(error.what()).find(path.string()) != std::string_view::npos,
                 "a message that names the file");
  }
  return 0;
}
