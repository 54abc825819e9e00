// A file to which a monitor appends, and what such files say of themselves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "zero/base/descriptor.h"

namespace zero::train {

class ReportFile {
 public:
  /// Opens or creates it, and keeps what it holds. `what` it is, in errors: "the log". Throws
  /// ConfigError.
  ReportFile(std::string path, std::string_view what);

  const std::string& path() const { return path_; }
  /// Appends at once, so that a crash leaves whole pieces behind. Throws Error that names the file.
  void write(std::string_view bytes);
  /// Removes what it holds; a device or a pipe keeps nothing that could be removed. Throws Error.
  void clear();

 private:
  [[noreturn]] void fail() const;

  std::string path_;
  std::string what_;
  Descriptor file_;
};

/// Ends a file, which a monitor has written before, after its first `bytes`. Throws Error: "`what`
/// `path` cannot be cut back to `place`: ...".
void cut_file(const std::filesystem::path& path, uintmax_t bytes, std::string_view what,
              std::string_view place);

double seconds_since_1970();
/// Returns the name of this machine; "localhost" where it has none.
std::string host_name();

}  // namespace zero::train
