// A file to which a monitor appends; and the machine's name and the time, for such files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "zero/base/descriptor.h"

namespace zero::train {

class ReportFile {
 public:
  /// Opens or creates the file, and keeps its contents. `what` names it in errors: "the log".
  /// Throws ConfigError.
  ReportFile(std::string path, std::string_view what);

  const std::string& path() const { return path_; }
  /// Appends at once, so that a crash leaves whole pieces behind. Throws Error that names the file.
  void write(std::string_view bytes);
  /// Removes the contents; a device or a pipe has none that could be removed. Throws Error.
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
/// Returns the name of this machine; "localhost" if it has none.
std::string host_name();

}  // namespace zero::train
