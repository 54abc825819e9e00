// What an action complains of, for tests of errors.
#pragma once

#include <functional>
#include <string>

namespace zero {

/// The message of the `Exception` that `action` throws.
template <class Exception>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace zero
