#include "zero/checkpoint/pt.h"

#include <fmt/format.h>

#include <map>
#include <set>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/pickle.h"
#include "zero/checkpoint/foreign/pt_file.h"
#include "zero/checkpoint/foreign/pt_writer.h"

namespace zero {

std::vector<std::pair<std::string, at::Tensor>> load_pt(const std::filesystem::path& path) {
  const foreign::PtFile file(path);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::map<std::pair<uint64_t, at::ScalarType>, at::Tensor> storages;
  std::vector<std::pair<std::string, foreign::StoredTensor>> found;
  try {
    found = foreign::tensors_in(file, file.root());
  } catch (const CheckpointError& error) {
    const std::string message = error.what();
    if (message.ends_with('.')) throw;
    throw CheckpointError(fmt::format("'{}': {}.", path.string(), message));
  }
  file.verify();
  for (const auto& [name, view] : found) {
    auto& storage = storages[{view.storage, view.dtype}];
    if (!storage.defined()) {
      auto whole = view;
      whole.offset = 0;
      whole.sizes = {view.storage_size};
      whole.strides = {1};
      storage = whole.read();
    }
    tensors.emplace_back(name, storage.as_strided(view.sizes, view.strides, view.offset));
  }
  return tensors;
}

void save_pt(const std::filesystem::path& path,
             const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::set<std::string> names;
  std::map<const void*, int> users;
  for (const auto& [name, tensor] : tensors) {
    if (!names.insert(name).second)
      throw CheckpointError(
          fmt::format("Cannot write '{}': two tensors are named '{}'.", path.string(), name));
    ++users[tensor.storage().unsafeGetStorageImpl()];
  }
  foreign::PtWriter writer;
  std::vector<std::pair<std::string, std::string>> items;
  for (const auto& [name, tensor] : tensors) {
    const bool shares = users[tensor.storage().unsafeGetStorageImpl()] > 1;
    items.emplace_back(foreign::pickled::text(name), writer.tensor(tensor, shares));
  }
  writer.write(path, foreign::pickled::dict(items));
}

}  // namespace zero
