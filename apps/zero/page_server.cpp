#include "apps/zero/page_server.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <list>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/comm/socket.h"

namespace zero::app {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostClients = 32;
constexpr size_t kMostOfRequest = 16384;  // bytes
constexpr std::chrono::seconds kPatience{10};

struct Client {
  Descriptor socket;
  Clock::time_point until;
  std::string request{};
  std::string answer{};  // empty until the request is whole
  size_t sent = 0;
};

std::string answer(std::string_view status, std::string_view type, std::string_view body,
                   bool whole = true) {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}; charset=utf-8\r\nContent-Length: {}\r\nCache-Control: "
      "no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n{}",
      status, type, body.size(), whole ? body : std::string_view());
}

std::string refusal(std::string_view status, std::string_view why) {
  return answer(status, "text/plain", why);
}

/// Returns the value of a field of a request's head; empty if there is none.
std::string_view field(std::string_view head, std::string_view name) {
  while (!head.empty()) {
    const auto line = head.substr(0, head.find("\r\n"));
    head.remove_prefix(std::min(head.size(), line.size() + 2));
    const auto colon = line.find(':');
    if (colon != name.size()) continue;
    bool same = true;
    for (size_t i = 0; i < colon; ++i) same = same && (line[i] | 0x20) == (name[i] | 0x20);
    if (!same) continue;
    auto value = line.substr(colon + 1);
    while (value.starts_with(' ') || value.starts_with('\t')) value.remove_prefix(1);
    while (value.ends_with(' ') || value.ends_with('\t')) value.remove_suffix(1);
    return value;
  }
  return {};
}

std::string answer_to(std::string_view request, std::string_view page, uint16_t port) {
  const auto line = request.substr(0, request.find("\r\n"));
  const auto method = line.substr(0, line.find(' '));
  const auto rest = line.substr(std::min(line.size(), method.size() + 1));
  const auto path = rest.substr(0, rest.find(' '));
  const auto version = rest.substr(std::min(rest.size(), path.size() + 1));
  if (!version.starts_with("HTTP/1.")) return refusal("400 Bad Request", "No request of HTTP/1.\n");
  const auto host = field(request.substr(line.size()), "host");
  if (host != fmt::format("127.0.0.1:{}", port) && host != fmt::format("localhost:{}", port))
    return refusal("403 Forbidden", "The page is for browsers of this machine.\n");
  if (method != "GET" && method != "HEAD")
    return refusal("405 Method Not Allowed", "There is a page to GET.\n");
  if (path != "/") return refusal("404 Not Found", "The page is at /.\n");
  return answer("200 OK", "text/html", page, method == "GET");
}

}  // namespace

class PageServer::Clients {
 public:
  explicit Clients(uint16_t port) : listener_(comm::listen_at("127.0.0.1", port)) {
    if (!listener_.socket)
      throw ConfigError(
          fmt::format("--port {} of 127.0.0.1 cannot be listened at: {}. Give "
                      "another, or 0 for a free one.",
                      port, listener_.reason));
    port_ = comm::own_port(listener_.socket);
  }

  uint16_t port() const { return port_; }
  void show(std::string page) { page_ = std::move(page); }

  void serve(std::chrono::milliseconds most) {
    std::vector<pollfd> waiting;
    if (clients_.size() < kMostClients) waiting.push_back({listener_.socket.get(), POLLIN, 0});
    for (const auto& client : clients_) {
      const auto events = static_cast<short>(client.answer.empty() ? POLLIN : POLLOUT);
      waiting.push_back({client.socket.get(), events, 0});
    }
    if (poll(waiting.data(), waiting.size(), static_cast<int>(most.count())) < 0) return;
    const auto now = Clock::now();
    std::erase_if(clients_, [&](Client& client) { return now > client.until || !go_on(client); });
    while (clients_.size() < kMostClients) {
      Descriptor socket(
          accept4(listener_.socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) return;
      clients_.push_back({.socket = std::move(socket), .until = now + kPatience});
    }
  }

 private:
  /// Reads and writes what can be without waiting. Returns whether something is left to do.
  bool go_on(Client& client) const {
    while (client.answer.empty()) {
      std::array<char, 4096> bytes;
      const auto size = recv(client.socket.get(), bytes.data(), bytes.size(), 0);
      if (size < 0) return errno == EAGAIN || errno == EINTR;
      if (size == 0) return false;
      client.request.append(bytes.data(), static_cast<size_t>(size));
      if (client.request.find("\r\n\r\n") != std::string::npos) {
        client.answer = answer_to(client.request, page_, port_);
      } else if (client.request.size() > kMostOfRequest) {
        client.answer =
            refusal("431 Request Header Fields Too Large", "The request is too long.\n");
      }
    }
    while (client.sent < client.answer.size()) {
      const auto size = send(client.socket.get(), client.answer.data() + client.sent,
                             client.answer.size() - client.sent, MSG_NOSIGNAL);
      if (size < 0) return errno == EAGAIN || errno == EINTR;
      client.sent += static_cast<size_t>(size);
    }
    shutdown(client.socket.get(), SHUT_WR);
    return false;
  }

  comm::Listener listener_;
  uint16_t port_ = 0;
  std::string page_;
  std::list<Client> clients_;
};

PageServer::PageServer(uint16_t port) : clients_(std::make_unique<Clients>(port)) {}
PageServer::~PageServer() = default;

std::string PageServer::url() const {
  return fmt::format("http://127.0.0.1:{}/", clients_->port());
}
void PageServer::show(std::string page) { clients_->show(std::move(page)); }
void PageServer::serve(std::chrono::milliseconds most) { clients_->serve(most); }

}  // namespace zero::app
