// Random names that nobody can guess.
#pragma once

#include <string>
#include <string_view>

namespace zero::comm {

/// In this environment variable a local launcher gives all ranks of a job the same token.
inline constexpr const char* kTokenVariable = "ZERO_JOB_TOKEN";

/// Returns 128 random bits of the kernel's, as 32 hexadecimal digits in lower case.
std::string random_token();

/// Returns true if `text` could be a token: 32 digits, and nothing else.
bool is_token(std::string_view text);

}  // namespace zero::comm
