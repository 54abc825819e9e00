#include "zero/comm/socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "zero/comm/rail_address.h"

namespace zero::comm {
namespace {

Descriptor stream_socket(int family) {
  return Descriptor(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

const sockaddr_in& inet(const sockaddr& address) {
  return reinterpret_cast<const sockaddr_in&>(address);
}
const sockaddr_in6& inet6(const sockaddr& address) {
  return reinterpret_cast<const sockaddr_in6&>(address);
}

}  // namespace

Addresses find_addresses(const std::string& host, uint16_t port, std::string& reason, int type) {
  addrinfo hints{};
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  reason = status != 0 ? gai_strerror(status) : "it has no address";
  return {status == 0 ? found : nullptr, freeaddrinfo};
}

std::string text_of(const sockaddr& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.sa_family == AF_INET) inet_ntop(AF_INET, &inet(address).sin_addr, text, sizeof text);
  if (address.sa_family == AF_INET6)
    inet_ntop(AF_INET6, &inet6(address).sin6_addr, text, sizeof text);
  return text;
}

bool on_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) return ntohl(inet(address).sin_addr.s_addr) >> 24 == 127;
  return address.sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&inet6(address).sin6_addr);
}

sockaddr_storage own_address(const Descriptor& socket) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) return {};
  return own;
}

uint16_t own_port(const Descriptor& socket) {
  const auto own = own_address(socket);
  const auto& address = reinterpret_cast<const sockaddr&>(own);
  return ntohs(own.ss_family == AF_INET6 ? inet6(address).sin6_port : inet(address).sin_port);
}

Descriptor connect_to(const std::string& host, uint16_t port, std::string& reason) {
  const auto addresses = find_addresses(host, port, reason);
  for (const auto* at = addresses.get(); at != nullptr; at = at->ai_next) {
    auto connection = stream_socket(at->ai_family);
    if (!connection) continue;
    int error = connect(connection.get(), at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd writable{connection.get(), POLLOUT, 0};
      socklen_t size = sizeof error;
      if (poll(&writable, 1, 1000) != 1) {
        error = ETIMEDOUT;
      } else {
        getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
    if (error == 0) return connection;
    reason = std::strerror(error);
  }
  return Descriptor();
}

Listener listen_at(const std::string& host, uint16_t port, bool across) {
  Listener result;
  const bool loopback_meant = host == "localhost" || is_loopback(host);
  const auto addresses = find_addresses(host, port, result.reason);
  for (const auto* at = addresses.get(); at != nullptr; at = at->ai_next) {
    if (across && on_loopback(*at->ai_addr) && !loopback_meant) {
      result.reason =
          "on this host the name means the loopback interface, which no other host can reach "
          "(/etc/hosts); give an address in digits";
      continue;
    }
    auto listener = stream_socket(at->ai_family);
    const int on = 1;  // connections of an earlier job may linger on the port
    if (listener && setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(listener.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        listen(listener.get(), SOMAXCONN) == 0) {
      result.socket = std::move(listener);
      break;
    }
    const int error = errno;
    result.reason = std::strerror(error);
    result.taken = error == EADDRINUSE;
    if (result.taken) break;  // the ranks do not look at the next address first
  }
  return result;
}

}  // namespace zero::comm
