// The errors that a caller can meet, and the one way to state an invariant.
//
// Note [Error policy]
// Bad input, a lost peer or a full disk is an exception below, whose message names the thing, its
// value and the remedy. If an invariant of our own is broken, `ensure` fails: it prints file and
// line and aborts, since no caller can act on it.
#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace zero {

/// Base of every error that libzero throws on purpose. `what()` is one or more complete sentences.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A configuration, an option or an argument cannot be used. The message names the key, its value
/// and a value that could be used.
class ConfigError : public Error {
  using Error::Error;
};

/// A collective failed. The message names the rank, the collective, the unit and what the other
/// ranks were doing.
class CommError : public Error {
  using Error::Error;
};

/// A data file or split cannot be used.
class DataError : public Error {
  using Error::Error;
};

/// A checkpoint cannot be written or read. The message names the file, what was expected and what
/// was found.
class CheckpointError : public Error {
  using Error::Error;
};

/// States on disk cannot be made, written or read. The message names the file, the offset and the
/// system's reason.
class StoreError : public Error {
  using Error::Error;
};

/// There is not enough memory. The message names the bytes asked for and shows the ledger's table.
class OutOfMemory : public Error {
  using Error::Error;
};

/// States an invariant of libzero itself: if `holds` is false, prints `message` with file and line
/// and aborts. It must not be used for bad input.
void ensure(bool holds, std::string_view message,
            std::source_location where = std::source_location::current());

/// Returns the entry of `known` that is nearest to `word` by edit distance (upper and lower case
/// are the same), for "did you mean"; "" when none is near (more than max(2, a third of the word)
/// edits away).
std::string nearest(std::string_view word, std::span<const std::string> known);

/// Returns " Did you mean 'X'?" for the nearest of `known`, or "" when none is near.
std::string did_you_mean(std::string_view word, std::span<const std::string> known);

/// Returns `bytes` for a person: "512 B", "1.5 MiB", "2.25 GiB" (binary units, at most two
/// decimals).
std::string format_bytes(double bytes);

/// Returns the bytes that a person means by "4096", "512MiB" or "1.5 GB": units are powers of 1024,
/// with or without the i, in either case. Returns nothing if the text is no such number.
std::optional<int64_t> parse_bytes(std::string_view text);

/// Returns the seconds that a person means by "3h50m", "90s" or "1.5h": numbers, each with its unit
/// (d, h, m or s), the larger units first. Returns nothing if the text is no such time.
std::optional<double> parse_duration(std::string_view text);

}  // namespace zero
