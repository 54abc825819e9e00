// Loads parts of libzero at run time, since they need libraries that not every machine has.
#pragma once

#include <string>

namespace zero {

/// Loads the shared library `file`, which lies beside libzero's own or where the system looks. It
/// stays as long as the process, and all that is loaded later sees its symbols. Returns null if
/// that fails; then `why` is the system's reason.
void* load_beside(const std::string& file, std::string& why);

}  // namespace zero
