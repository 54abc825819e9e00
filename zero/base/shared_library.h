// Loads those parts of libzero at run time that need libraries which not every machine has.
#pragma once

#include <string>

namespace zero {

/// Loads the shared library `file`, from the folder of libzero's own library or from where the
/// system looks. It stays loaded until the process ends, and libraries that are loaded later see
/// its symbols. Returns null on failure, and sets `why` to the system's reason.
void* load_beside(const std::string& file, std::string& why);

}  // namespace zero
