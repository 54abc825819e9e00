// The network: links to other hosts, this host's name, and what carries bytes.
#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "apps/zero/doctor_checks.h"
#include "zero/base/error.h"
#include "zero/comm/rail_address.h"
#include "zero/comm/socket.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

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

std::string speed_of(int64_t megabits) {
  if (megabits <= 0) return "speed not told";
  return megabits % 1000 == 0 ? fmt::format("{} Gb/s", megabits / 1000)
                              : fmt::format("{} Mb/s", megabits);
}

void check_interfaces(Report& report, const fs::path& root, const std::string& chosen, int hosts) {
  constexpr int64_t kSlow = 10000;  // Mb/s
  std::error_code ignored;
  std::set<fs::path> interfaces;
  for (const auto& entry : fs::directory_iterator(root / "sys/class/net", ignored)) {
    constexpr const char* kLoopback = "772";
    if (first_line(entry.path() / "type") != kLoopback) interfaces.insert(entry.path());
  }
  if (interfaces.empty()) {
    report.check(hosts == 1, Mark::problem, "interfaces", "none but loopback",
                 "Give the container a network (docker --network=host), or connect the host to "
                 "one.",
                 "Ranks of other hosts cannot be reached.");
  }
  for (const auto& folder : interfaces) {
    const auto name = folder.filename().string();
    const auto state = first_line(folder / "operstate");
    const auto megabits = number(first_line(folder / "speed")).value_or(0);
    const bool used = hosts > 1 && state == "up" && (chosen.empty() || chosen == name);
    // 2 bytes a parameter, of which (H-1)/H cross: docs/clusters.md.
    const double bits = 16e9 * (hosts - 1) / hosts;
    report.check(!used || megabits <= 0 || megabits >= kSlow, Mark::advice, name,
                 fmt::format("{}, {}, MTU {}", state, speed_of(megabits),
                             number(first_line(folder / "mtu")).value_or(0)),
                 "Name a faster interface in ZERO_INTERFACE, if there is one, and see "
                 "docs/clusters.md, Fewer bytes.",
                 fmt::format("Gathering 1e9 bf16 parameters over {} hosts takes this link at "
                             "least {:.1f} s (computed from its speed).",
                             hosts, bits / (static_cast<double>(megabits) * 1e6)));
  }
}

void check_own_name(Report& report, const fs::path& root, int hosts) {
  const auto host = first_line(root / "proc/sys/kernel/hostname");
  const auto addresses = host.empty() ? std::vector<std::string>() : addresses_of(host);
  const bool loopback = std::any_of(addresses.begin(), addresses.end(), comm::is_loopback);
  report.check(
      !loopback && !addresses.empty(), hosts > 1 ? Mark::problem : Mark::advice, "own name",
      fmt::format("{}: {}", host.empty() ? "none" : host,
                  addresses.empty() ? "no address" : fmt::format("{}", fmt::join(addresses, ", "))),
      loopback ? fmt::format("Take {} off the loopback addresses in /etc/hosts, or give "
                             "MASTER_ADDR in digits.",
                             host)
               : "Add this host to /etc/hosts or to the name service, or give MASTER_ADDR in "
                 "digits.",
      loopback ? "Where MASTER_ADDR is this name, other hosts are refused at the start of a job; "
                 "on one host it costs nothing."
               : "Where MASTER_ADDR is this name, no job over several hosts starts; on one host "
                 "it costs nothing.");
}

void check_transport(Report& report, const comm::Lookup& variable) {
  auto transport = variable("ZERO_TRANSPORT").value_or("");
  if (transport.empty()) transport = "gloo";
  std::vector<std::string> plugins;
  std::error_code ignored;
  for (const char* name : {"openmpi", "mpich"}) {
    if (fs::exists(library_folder() / fmt::format("libzero_rail_{}.so", name), ignored))
      plugins.emplace_back(name);
  }
  const auto value =
      fmt::format("{}; plugins for MPI: {}", transport,
                  plugins.empty() ? "none" : fmt::format("{}", fmt::join(plugins, ", ")));
  try {
    (void)comm::transport_from_environment(variable);
  } catch (const ConfigError& error) {
    report.check(false, Mark::problem, "transport", value,
                 std::string(error.what()) + " Or unset the variable.",
                 "No job starts with it, on one host or several.");
    return;
  }
  const bool there = transport == "gloo" || (transport == "mpi" && !plugins.empty()) ||
                     std::find(plugins.begin(), plugins.end(), transport) != plugins.end();
  report.check(there, Mark::problem, "transport", value,
               fmt::format("Install {} and build libzero again, or unset ZERO_TRANSPORT.",
                           transport == "mpich" ? "libmpich-dev" : "libopenmpi-dev"),
               "A job over several hosts does not start: the plugin that ZERO_TRANSPORT asks for "
               "is not beside libzero.");
}

}  // namespace

void check_links(Report& report, const fs::path& root, const comm::Lookup& variable, int hosts) {
  report.begin("links");
  std::string chooser, chosen;
  for (const char* name : {"GLOO_SOCKET_IFNAME", "ZERO_INTERFACE"}) {
    const auto interface = variable(name).value_or("");
    if (interface.empty()) continue;
    chooser = name;
    chosen = interface;
  }
  check_interfaces(report, root, chosen, hosts);
  check_own_name(report, root, hosts);
  if (!chosen.empty()) {
    std::string refusal;
    try {
      (void)comm::address_of_interface(chosen, chooser);
    } catch (const Error& error) {
      refusal = error.what();
    }
    report.check(refusal.empty(), Mark::problem, "chosen", chooser + "=" + chosen,
                 refusal + " Name one of these, or unset the variable.",
                 "A job over several hosts does not start with it.");
  }
  check_transport(report, variable);
}

}  // namespace zero::app::checkup
