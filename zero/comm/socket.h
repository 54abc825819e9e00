// TCP sockets by host names. A `host` is a name or an address in digits.
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

#include "zero/base/descriptor.h"

namespace zero::comm {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Returns the addresses of `host` as a list, for sockets of `type`. If it has none, returns null,
/// and `reason` says why.
Addresses find_addresses(const std::string& host, uint16_t port, std::string& reason,
                         int type = SOCK_STREAM);

/// Returns an IPv4 or IPv6 address in digits, "" for one of another family.
std::string text_of(const sockaddr& address);

/// Returns true for 127.0.0.0/8 and ::1.
bool on_loopback(const sockaddr& address);

/// Returns the address that `socket` is bound to. If it has none its family is AF_UNSPEC.
sockaddr_storage own_address(const Descriptor& socket);

/// Returns the port that `socket` is bound to, or 0.
uint16_t own_port(const Descriptor& socket);

/// Returns a non-blocking connection to the first address of `host` where somebody listens, or
/// none, and `reason` says why. Waits at most a second for each address.
Descriptor connect_to(const std::string& host, uint16_t port, std::string& reason);

/// A socket that listens on one address alone; if there is none, `reason` says why.
struct Listener {
  Descriptor socket{};
  std::string reason{};
  bool taken = false;  ///< another socket has the port
};

/// Listens on the first address of `host` that is this machine's; port 0 means any free one. A
/// host's own name may mean its loopback interface (Debian's /etc/hosts), which no other host can
/// reach. Such an address is left out if ranks are `across` hosts, unless `host` names that
/// interface expressly.
Listener listen_at(const std::string& host, uint16_t port, bool across = false);

}  // namespace zero::comm
