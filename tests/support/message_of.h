// Returns the message of the error that an action throws.
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
