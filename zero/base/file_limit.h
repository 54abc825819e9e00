// The limit on the size of files (RLIMIT_FSIZE, `ulimit -f`).
//
// Note [File size limit]
// A write beyond the limit is not refused. The kernel sends SIGXFSZ, which ends the process, and
// only a process that ignores or handles the signal gets EFBIG. A program may decide about a
// signal, but a library may not. So libzero compares the size of each file that it writes with the
// limit first, and throws an error that names the file if it is too large. The program `zero` also
// handles the signal, since other libraries write files too.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace zero {

/// Returns the most bytes that a file of this process may have; nothing if there is no limit.
std::optional<int64_t> largest_file();

/// Returns true, and sets errno to EFBIG, if a file may not grow to `bytes`. Otherwise leaves errno
/// alone.
bool beyond_file_limit(int64_t bytes);

/// Returns " This process may write files of at most 1 MiB: ...", which ends a message, or "" if
/// there is no limit.
std::string file_limit_remedy();

}  // namespace zero
