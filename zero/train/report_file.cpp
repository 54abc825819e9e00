#include "zero/train/report_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/file_limit.h"

namespace zero::train {

ReportFile::ReportFile(std::string path, std::string_view what)
    : path_(std::move(path)),
      what_(what),
      file_(open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_APPEND, 0666)) {
  if (!file_)
    throw ConfigError(fmt::format("Cannot open {} {}: {}.", what_, path_, std::strerror(errno)));
}

void ReportFile::write(std::string_view bytes) {
  struct stat status {};
  const bool is_file = fstat(file_.get(), &status) == 0 && S_ISREG(status.st_mode);
  if (is_file && beyond_file_limit(status.st_size + static_cast<int64_t>(bytes.size()))) fail();
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_.get(), bytes.data(), bytes.size());
    if (written > 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      fail();
    }
  }
}

void ReportFile::clear() {
  if (ftruncate(file_.get(), 0) != 0 && errno != EINVAL) fail();
}

void ReportFile::fail() const {
  const int error = errno;
  throw Error(fmt::format("Cannot write {} {}: {}. What was written before is kept.{}", what_,
                          path_, std::strerror(error), error == EFBIG ? file_limit_remedy() : ""));
}

void cut_file(const std::filesystem::path& path, uintmax_t bytes, std::string_view what,
              std::string_view place) {
  std::error_code error;
  std::filesystem::resize_file(path, bytes, error);
  if (error) {
    throw Error(fmt::format("{} {} cannot be cut back to {}: {}.", what, path.string(), place,
                            error.message()));
  }
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  return name.data();
}

}  // namespace zero::train
