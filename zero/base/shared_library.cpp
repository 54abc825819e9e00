#include "zero/base/shared_library.h"

#include <dlfcn.h>

#include <filesystem>

namespace zero {
namespace {

// Returns the folder of this code's own library.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr)
    return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

void* load_beside(const std::string& file, std::string& why) {
  const auto beside = own_folder() / file;
  std::error_code ignored;
  const auto path = std::filesystem::exists(beside, ignored) ? beside.string() : file;
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) why = dlerror();
  return library;
}

}  // namespace zero
