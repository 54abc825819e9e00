#include "zero/base/thread.h"

#include <fmt/format.h>

namespace zero {

std::string refused_thread(std::string_view what, const std::system_error& error) {
  return fmt::format(
      "Cannot start a thread for {}: {}. Start fewer ranks or threads here, or raise the limit on "
      "the processes of this user (ulimit -u) or of the container (pids.max).",
      what, error.code().message());
}

}  // namespace zero
