// Starts threads, which the system may refuse.
#pragma once

#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

namespace zero {

/// Returns the message about a thread that the system refused: its purpose, the reason, and the
/// remedy.
std::string refused_thread(std::string_view what, const std::system_error& error);

/// Starts a thread that runs `body`. If the system refuses it (a limit on the processes of a user
/// or a container), throws `Exception`, which names the thread's purpose `what` and the remedy.
template <class Exception, class Body>
std::thread start_thread(std::string_view what, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw Exception(refused_thread(what, error));
  }
}

}  // namespace zero
