// The limit on the size of files (RLIMIT_FSIZE, `ulimit -f`).
//
// Note [File size limit]
// A write beyond the limit is not refused: the kernel sends SIGXFSZ, which kills, and only a
// process that ignores or handles the signal gets EFBIG. What becomes of a signal is for the
// program to say and not for a library: so whatever libzero writes is compared with the limit
// first, and exceeding it is an error that names the file. The program `zero` also handles the
// signal, for what other libraries write.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace zero {

/// The most bytes that a file of this process may have; nothing where there is no limit.
std::optional<int64_t> largest_file();

/// Whether a file may not grow to `bytes`; then errno is EFBIG. Otherwise errno is left alone.
bool beyond_file_limit(int64_t bytes);

/// " This process may write files of at most 1 MiB: ...", to end a message; empty without a limit.
std::string file_limit_remedy();

}  // namespace zero
