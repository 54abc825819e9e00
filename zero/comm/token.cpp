#include "zero/comm/token.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "zero/base/error.h"

namespace zero::comm {

namespace {

constexpr size_t kBytes = 16;

}  // namespace

std::string random_token() {
  std::array<unsigned char, kBytes> bytes{};
  ensure(getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
         "the kernel gives no random bytes");
  std::string text;
  for (const auto byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

bool is_token(std::string_view text) {
  return text.size() == 2 * kBytes && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace zero::comm
