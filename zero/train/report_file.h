// A file to which a monitor appends.
#pragma once

#include <cstdint>
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

}  // namespace zero::train
