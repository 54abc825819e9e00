// The limit on the size of files (RLIMIT_FSIZE, `ulimit -f`).
//
// Note [File size limit]
// A write beyond the limit is not refused: the kernel sends SIGXFSZ, which kills, and only a
// process that ignores or handles the signal gets EFBIG. A program may decide about a signal, but
// not a library. So libzero compares whatever it writes with the limit first, and an excess is an
// error that names the file. The program `zero` also handles the signal, for what other libraries
// write.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace zero {

/// Returns the most bytes that a file of this process may have; nothing where there is no limit.
std::optional<int64_t> largest_file();

/// Returns true, and sets errno to EFBIG, if a file may not grow to `bytes`. Otherwise leaves errno
/// alone.
bool beyond_file_limit(int64_t bytes);

/// Returns " This process may write files of at most 1 MiB: ...", to end a message; "" without a
/// limit.
std::string file_limit_remedy();

}  // namespace zero
