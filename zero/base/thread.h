// Threads that the system may refuse.
#pragma once

#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

namespace zero {

/// The message for a thread that was refused: for whom, why, and what to do about it.
std::string refused_thread(std::string_view what, const std::system_error& error);

/// Starts a thread that runs `body`. Throws `Exception`, naming `what` it is for and the remedy,
/// where the system refuses it (a limit on the processes of a user or a container).
template <class Exception, class Body>
std::thread start_thread(std::string_view what, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw Exception(refused_thread(what, error));
  }
}

}  // namespace zero
