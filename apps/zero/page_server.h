// Serves one page to browsers of this machine.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace zero::app {

/// Answers GET and HEAD of "/" with a page, over HTTP/1.1 (RFC 9112), on 127.0.0.1 alone. It has no
/// thread of its own. A request that names another host is refused, so that a page of a stranger
/// whose name was made to mean 127.0.0.1 cannot read this one.
class PageServer {
 public:
  /// Listens at a port; 0 means any free one. Throws ConfigError for one that is taken.
  explicit PageServer(uint16_t port);
  PageServer(const PageServer&) = delete;
  PageServer& operator=(const PageServer&) = delete;
  ~PageServer();

  /// Returns the address of the page for a browser.
  std::string url() const;
  /// The next requests get this page.
  void show(std::string page);
  /// Waits until a browser asks for something or takes more of an answer, but at most so long, and
  /// goes on with all of them. A client that takes longer than 10 s is let go, and at most 32 are
  /// answered at a time.
  void serve(std::chrono::milliseconds most);

 private:
  class Clients;
  std::unique_ptr<Clients> clients_;
};

}  // namespace zero::app
