#include "zero/checkpoint/foreign/pt_writer.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/pickle.h"
#include "zero/checkpoint/foreign/pt_file.h"

namespace zero::foreign {

std::string PtWriter::tensor(const at::Tensor& tensor, bool shares) {
  using namespace pickled;
  auto values = tensor.detach();
  const void* memory = shares ? values.storage().unsafeGetStorageImpl() : nullptr;
  const std::pair identity(memory, values.scalar_type());
  const auto found = std::find(shared_.begin(), shared_.end(), identity);
  auto key = static_cast<size_t>(found - shared_.begin());
  if (!shares) {
    values = values.to(at::kCPU).contiguous();
    key = storages_.size();
  }
  if (key == storages_.size()) {
    const auto elements =
        shares ? static_cast<int64_t>(values.storage().nbytes() / values.element_size())
               : values.numel();
    const auto whole = values.as_strided({elements}, {1}, shares ? 0 : values.storage_offset());
    storages_.push_back(whole.to(at::kCPU));
    shared_.push_back(identity);
  }
  const auto dtype = values.scalar_type();
  const auto storage = torch_storage(dtype);
  const bool untyped = storage.empty();
  const auto size = static_cast<int64_t>(untyped ? storages_[key].nbytes()
                                                 : static_cast<size_t>(storages_[key].numel()));
  const auto id =
      tuple({text("storage"),
             untyped ? global("torch.storage", "UntypedStorage") : global("torch", storage),
             text(std::to_string(key)), text("cpu"), integer(size)});
  const auto numbers = [](at::IntArrayRef list) {
    std::vector<std::string> items;
    for (const auto each : list) items.push_back(integer(each));
    return tuple(items);
  };
  std::vector<std::string> arguments{id + "Q",
                                     integer(shares ? values.storage_offset() : 0),
                                     numbers(values.sizes()),
                                     numbers(values.strides()),
                                     boolean(false),
                                     call(global("collections", "OrderedDict"), {})};
  if (untyped) arguments.push_back(global("torch", torch_name(dtype)));
  return call(global("torch._utils", untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2"),
              arguments);
}

size_t PtWriter::append(OutputFile& file, const std::string& root) const {
  size_t written = 0;
  caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t size) {
    file.write(data, size);
    written += size;
    return size;
  });
  const auto pickle = pickled::whole(root);
  zip.writeRecord("data.pkl", pickle.data(), pickle.size());
  zip.writeRecord("byteorder", "little", 6);
  for (size_t key = 0; key < storages_.size(); ++key)
    zip.writeRecord(fmt::format("data/{}", key), storages_[key].const_data_ptr(),
                    storages_[key].nbytes());
  zip.writeEndOfFile();
  return written;
}

void PtWriter::write(const std::filesystem::path& path, const std::string& root) const {
  OutputFile file(path, &fail<CheckpointError>);
  append(file, root);
  file.commit();
}

}  // namespace zero::foreign
