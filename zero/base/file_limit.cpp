#include "zero/base/file_limit.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <limits>

#include "zero/base/error.h"

namespace zero {

std::optional<int64_t> largest_file() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      limit.rlim_cur > static_cast<rlim_t>(std::numeric_limits<int64_t>::max()))
    return std::nullopt;
  return static_cast<int64_t>(limit.rlim_cur);
}

bool beyond_file_limit(int64_t bytes) {
  const auto most = largest_file();
  if (!most || bytes <= *most) return false;
  errno = EFBIG;
  return true;
}

std::string file_limit_remedy() {
  const auto most = largest_file();
  if (!most) return "";
  return fmt::format(" This process may write files of at most {}: raise that limit (ulimit -f).",
                     format_bytes(static_cast<double>(*most)));
}

}  // namespace zero
