#include "zero/comm/rail_address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "zero/base/error.h"
#include "zero/comm/socket.h"

namespace zero::comm {
namespace {

bool is_link_local(const sockaddr* address) {
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

std::string set_variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

std::string address_towards(const std::string& peer) {
  constexpr uint16_t kAnyPort = 9;  // connecting a datagram socket sends nothing
  std::string reason;
  const auto all = find_addresses(peer, kAnyPort, reason, SOCK_DGRAM);
  if (!all) {
    throw CommError(
        fmt::format("This host cannot find the address of '{}', where the ranks meet: {}. Give an "
                    "address that every host knows.",
                    peer, reason));
  }
  for (const auto* one = all.get(); one != nullptr; one = one->ai_next) {
    const Descriptor socket(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (socket && connect(socket.get(), one->ai_addr, one->ai_addrlen) == 0) {
      const auto own = own_address(socket);
      return text_of(reinterpret_cast<const sockaddr&>(own));
    }
    reason = std::strerror(errno);
  }
  throw CommError(fmt::format("No route leads from this host to '{}', where the ranks meet: {}.",
                              peer, reason));
}

std::string address_of_interface(const std::string& interface, const std::string& variable) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) {
    throw CommError(
        fmt::format("The network interfaces cannot be read: {}.", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(found, freeifaddrs);
  std::set<std::string> names;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* one = all.get(); one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family) continue;
      if ((one->ifa_flags & IFF_UP) == 0 || is_link_local(one->ifa_addr)) continue;
      names.insert(one->ifa_name);
      if (interface == one->ifa_name) return text_of(*one->ifa_addr);
    }
  }
  throw ConfigError(
      fmt::format("{} is '{}', which is no interface of this host that is up and has an address. "
                  "It has: {}.",
                  variable, interface, fmt::join(names, ", ")));
}

bool is_loopback(const std::string& address) {
  in_addr v4{};
  if (inet_pton(AF_INET, address.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  return inet_pton(AF_INET6, address.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

std::string rail_address(const std::string& store_host) {
  auto towards = address_towards(store_host);
  for (const char* variable : {"ZERO_INTERFACE", "GLOO_SOCKET_IFNAME"}) {
    const auto interface = set_variable(variable);
    if (interface.empty()) continue;
    auto address = address_of_interface(interface, variable);
    if (is_loopback(address) && !is_loopback(towards)) {
      throw ConfigError(
          fmt::format("{} is '{}', a loopback interface, which no other host reaches; the ranks "
                      "meet at '{}'. Name the interface of {}, or unset it.",
                      variable, interface, store_host, towards));
    }
    return address;
  }
  return towards;
}

std::string reachable_address(const std::string& own, const std::vector<std::string>& others) {
  if (!is_loopback(own)) return own;
  for (const auto& other : others) {
    if (!other.empty() && !is_loopback(other)) return address_towards(other);
  }
  return own;
}

}  // namespace zero::comm
