// The network: links to other hosts, this host's name, and what carries bytes.
#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "apps/zero/doctor_checks.h"
#include "zero/base/error.h"
#include "zero/comm/rail_address.h"
#include "zero/comm/socket.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLinks = "links";

std::vector<std::string> addresses_of(const std::string& name) {
  std::string reason;
  const auto all = comm::find_addresses(name, 0, reason);
  std::vector<std::string> addresses;
  for (const auto* one = all.get(); one != nullptr; one = one->ai_next)
    addresses.push_back(comm::text_of(*one->ai_addr));
  return addresses;
}

// Returns the folder of libzero, in which plugins are looked for first.
fs::path library_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&comm::is_loopback), &info) == 0 ||
      info.dli_fname == nullptr)
    return {};
  return fs::path(info.dli_fname).parent_path();
}

std::string speed_of(int megabits) {
  if (megabits <= 0) return "speed not told";
  return megabits % 1000 == 0 ? fmt::format("{} Gb/s", megabits / 1000)
                              : fmt::format("{} Mb/s", megabits);
}

}  // namespace

Links read_links(const fs::path& root, const comm::Lookup& variable) {
  Links links;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root / "sys/class/net", ignored)) {
    constexpr const char* kLoopback = "772";
    if (first_line(entry.path() / "type") == kLoopback) continue;
    const auto value = [&](const char* file) { return number(first_line(entry.path() / file)); };
    links.interfaces.push_back({.name = entry.path().filename().string(),
                                .state = first_line(entry.path() / "operstate"),
                                .megabits = static_cast<int>(value("speed").value_or(-1)),
                                .mtu = static_cast<int>(value("mtu").value_or(0))});
  }
  std::sort(links.interfaces.begin(), links.interfaces.end(),
            [](const Interface& a, const Interface& b) { return a.name < b.name; });
  for (const auto& entry : fs::directory_iterator(root / "sys/class/infiniband", ignored))
    links.adapters.push_back(entry.path().filename().string());
  std::sort(links.adapters.begin(), links.adapters.end());
  links.host = first_line(root / "proc/sys/kernel/hostname");
  if (!links.host.empty()) links.addresses = addresses_of(links.host);
  for (const char* name : {"ZERO_INTERFACE", "GLOO_SOCKET_IFNAME"}) {
    const auto interface = variable(name).value_or("");
    if (interface.empty()) continue;
    links.chosen = fmt::format("{}={}", name, interface);
    try {
      (void)comm::address_of_interface(interface, name);
    } catch (const Error& error) {
      links.refusal = error.what();
    }
    break;
  }
  links.transport = variable("ZERO_TRANSPORT").value_or("");
  try {
    (void)comm::transport_from_environment(variable);
  } catch (const ConfigError& error) {
    links.transport_refusal = error.what();
  }
  const auto folder = library_folder();
  for (const char* name : {"openmpi", "mpich"}) {
    if (fs::exists(folder / fmt::format("libzero_rail_{}.so", name), ignored))
      links.plugins.emplace_back(name);
  }
  return links;
}

Findings judge(const Links& links, int hosts) {
  constexpr int kSlow = 10000;  // Mb/s
  Findings all;
  if (links.interfaces.empty()) {
    const auto none = fine(kLinks, "interfaces", "none but loopback");
    all.push_back(hosts == 1 ? none
                             : problem(none,
                                       "Give the container a network (docker --network=host), or "
                                       "connect the host to one.",
                                       "Ranks of other hosts cannot be reached."));
  }
  for (const auto& link : links.interfaces) {
    const auto line =
        fine(kLinks, link.name,
             fmt::format("{}, {}, MTU {}", link.state, speed_of(link.megabits), link.mtu));
    const bool chosen = links.chosen.empty() || links.chosen.ends_with("=" + link.name);
    const bool used = hosts > 1 && link.state == "up" && chosen;
    if (used && link.megabits > 0 && link.megabits < kSlow) {
      // 2 bytes a parameter, of which (H-1)/H cross: docs/clusters.md.
      const double bytes = 2e9 * (hosts - 1) / hosts;
      all.push_back(advice(
          line,
          "Name a faster interface in ZERO_INTERFACE, if there is one, and see "
          "docs/clusters.md, Fewer bytes.",
          fmt::format("Gathering 1e9 bf16 parameters over {} hosts takes this link at least {:.1f} "
                      "s (computed from its speed).",
                      hosts, bytes * 8 / (link.megabits * 1e6))));
    } else {
      all.push_back(line);
    }
  }
  if (!links.adapters.empty()) {
    all.push_back(fine(kLinks, "InfiniBand",
                       fmt::format("{}: used by an MPI alone (ZERO_TRANSPORT), or as IP by the "
                                   "interface that ZERO_INTERFACE names",
                                   fmt::join(links.adapters, ", "))));
  }

  const auto name = fine(
      kLinks, "own name",
      fmt::format("{}: {}", links.host.empty() ? "none" : links.host,
                  links.addresses.empty() ? std::string("no address")
                                          : fmt::format("{}", fmt::join(links.addresses, ", "))));
  const bool loopback =
      std::any_of(links.addresses.begin(), links.addresses.end(), comm::is_loopback);
  if (loopback || links.addresses.empty()) {
    const std::string change =
        loopback ? fmt::format(
                       "Take {} off the loopback addresses in /etc/hosts, or give "
                       "MASTER_ADDR in digits.",
                       links.host)
                 : "Add this host to /etc/hosts or to the name service, or give MASTER_ADDR in "
                   "digits.";
    const char* cost =
        loopback ? "Where MASTER_ADDR is this name, other hosts are refused at the start of a job; "
                   "on one host it costs nothing."
                 : "Where MASTER_ADDR is this name, no job over several hosts starts; on one host "
                   "it costs nothing.";
    all.push_back(hosts > 1 ? problem(name, change, cost) : advice(name, change, cost));
  } else {
    all.push_back(name);
  }

  if (!links.chosen.empty()) {
    all.push_back(links.refusal.empty()
                      ? fine(kLinks, "chosen", links.chosen)
                      : problem(fine(kLinks, "chosen", links.chosen),
                                links.refusal + " Name one of these, or unset the variable.",
                                "A job over several hosts does not start with it."));
  }
  const auto& transport = links.transport;
  const auto carried =
      fine(kLinks, "transport",
           fmt::format("{}; plugins for MPI: {}", transport.empty() ? "gloo" : transport,
                       links.plugins.empty() ? std::string("none")
                                             : fmt::format("{}", fmt::join(links.plugins, ", "))));
  const bool missing = transport == "mpi"
                           ? links.plugins.empty()
                           : (transport == "openmpi" || transport == "mpich") &&
                                 std::find(links.plugins.begin(), links.plugins.end(), transport) ==
                                     links.plugins.end();
  if (!links.transport_refusal.empty()) {
    all.push_back(problem(carried, links.transport_refusal + " Or unset the variable.",
                          "No job starts with it, on one host or several."));
    return all;
  }
  all.push_back(!missing
                    ? carried
                    : problem(carried,
                              fmt::format("Install {} and build libzero again, or unset "
                                          "ZERO_TRANSPORT.",
                                          transport == "mpich" ? "libmpich-dev" : "libopenmpi-dev"),
                              "A job over several hosts does not start: the plugin that "
                              "ZERO_TRANSPORT asks for is not beside libzero."));
  return all;
}

}  // namespace zero::app::checkup
