// Parts of libzero that are loaded at run time, since they need what not every machine has.
#pragma once

#include <string>

namespace zero {

/// Loads the shared library `file`, which lies beside libzero's own or where the system looks. It
/// stays as long as the process, and its symbols are seen by all that is loaded later. Null where
/// that fails: then `why` is what the system says of it.
void* load_beside(const std::string& file, std::string& why);

}  // namespace zero
