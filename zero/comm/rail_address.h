// Finds the address of this machine by which the other hosts reach it.
#pragma once

#include <string>
#include <vector>

namespace zero::comm {

/// Returns the address that this machine uses towards `peer`, a name or an address. It asks the
/// routes and sends nothing. Throws CommError if the name has no address or no route leads
/// there.
std::string address_towards(const std::string& peer);

/// Returns the first address (IPv4 before IPv6) of `interface`, as "eth0", which `variable` names.
/// Throws ConfigError, with the interfaces that there are, if it has none.
std::string address_of_interface(const std::string& interface, const std::string& variable);

/// Returns true for 127.0.0.0/8 and ::1.
bool is_loopback(const std::string& address);

/// Returns the address at which this host's rails listen: that of the interface that ZERO_INTERFACE
/// or GLOO_SOCKET_IFNAME names, or else the one by which this host reaches `store_host`, where the
/// ranks meet. (It may be that address already: a host reaches itself by it.) Throws ConfigError
/// where the variable names the loopback interface and `store_host` is elsewhere, since no other
/// host could connect.
std::string rail_address(const std::string& store_host);

/// Returns `own`, an address of this host; or, if that is of the loopback interface and one of
/// `others` is not, the address towards that one. A host's own name may mean its loopback interface
/// (Debian's /etc/hosts), and the ranks may meet at that name.
std::string reachable_address(const std::string& own, const std::vector<std::string>& others);

}  // namespace zero::comm
