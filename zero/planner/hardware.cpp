#include "zero/planner/hardware.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/base/json_kind.h"

namespace zero::plan {
namespace {

using Json = nlohmann::json;

constexpr double kT = 1e12;
constexpr double kG = 1e9;

// Latency of a message: some 5 us over NVLink or PCIe with the launch of a kernel, and 10 us
// between hosts over InfiniBand. Small beside the bytes of a unit.
constexpr double kInside = 5e-6;
constexpr double kBetween = 10e-6;

std::string lower(std::string_view text) {
  std::string all(text);
  std::ranges::transform(all, all.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::erase_if(all, [](char c) { return c == ' ' || c == '-' || c == '_'; });
  return all;
}

}  // namespace

const std::vector<Device>& devices() {
  static const std::vector<Device> all = {
      {.name = "V100",
       .flops = 125 * kT,
       .flops_fp32 = 15.7 * kT,
       .memory = 32 * kG,
       .bandwidth = 900 * kG,
       .link = 150 * kG,
       .pcie = 4 * kG,
       .per_host = 16,
       .network = 100 * kG,
       .products = 0.52,
       .bf16 = false,
       .source =
           "NVIDIA's data sheet (fp16); a DGX-2 of 16 with 8 EDR cards; PCIe with all 16 busy: "
           "DeepSpeed's SC21 slides 8 and 9; products: fitted on ZeRO's and ZeRO-Infinity's "
           "tables"},
      {.name = "A100",
       .flops = 312 * kT,
       .flops_fp32 = 156 * kT,
       .memory = 80 * kG,
       .bandwidth = 2039 * kG,
       .link = 300 * kG,
       .pcie = 25 * kG,
       .network = 200 * kG,
       .source = "NVIDIA's data sheet (SXM, 80 GB; fp32 as TF32); 8 HDR cards a host; products: "
                 "H100's"},
      {.name = "H100",
       .flops = 989.4 * kT,
       .flops_fp32 = 494.7 * kT,
       .memory = 80 * kG,
       .bandwidth = 3350 * kG,
       .link = 450 * kG,
       .pcie = 50 * kG,
       .network = 400 * kG,
       .attention = 0.46,
       .source = "NVIDIA's data sheet (SXM; fp32 as TF32); 8 cards of 400 Gbit/s a host; products: "
                 "fitted on Megatron-LM's and llmq's tables (a product alone reached 803 TFLOP/s); "
                 "attention: measured at 1024 tokens (docs/benchmarks.md)"},
      {.name = "H200",
       .flops = 989.4 * kT,
       .flops_fp32 = 494.7 * kT,
       .memory = 141 * kG,
       .bandwidth = 4800 * kG,
       .link = 450 * kG,
       .pcie = 50 * kG,
       .network = 400 * kG,
       .attention = 0.46,
       .source = "NVIDIA's data sheet; hosts and products: H100's; attention: measured at 1024 "
                 "tokens (docs/benchmarks.md)"},
      {.name = "B200",
       .flops = 2250 * kT,
       .flops_fp32 = 1100 * kT,
       .memory = 180 * kG,
       .bandwidth = 7700 * kG,
       .link = 900 * kG,
       .pcie = 50 * kG,
       .network = 400 * kG,
       .source = "NVIDIA's data sheet of the HGX B200, a device of eight; products: H100's"},
      {.name = "MI300X",
       .flops = 1307.4 * kT,
       .flops_fp32 = 653.7 * kT,
       .memory = 192 * kG,
       .bandwidth = 5300 * kG,
       .link = 448 * kG,
       .pcie = 50 * kG,
       .network = 400 * kG,
       .products = 0.5,
       .source = "AMD's data sheet (fp32 as TF32); links to the seven others together; products: "
                 "an estimate"},
      {.name = "RTX 4090",
       .flops = 165.2 * kT,
       .flops_fp32 = 82.6 * kT,
       .memory = 24 * kG,
       .bandwidth = 1008 * kG,
       .link = 12 * kG,
       .pcie = 20 * kG,
       .per_host = 4,
       .network = 1.25 * kG,
       .source = "NVIDIA's Ada white paper (sums in fp32; fp32 as TF32); PCIe 4 through the host, "
                 "and 10 Gbit/s: an estimate; products: H100's"},
      {.name = "RTX 5090",
       .flops = 209.5 * kT,
       .flops_fp32 = 104.8 * kT,
       .memory = 32 * kG,
       .bandwidth = 1792 * kG,
       .link = 25 * kG,
       .pcie = 40 * kG,
       .per_host = 4,
       .network = 1.25 * kG,
       .source = "NVIDIA's RTX Blackwell white paper (sums in fp32; fp32 as TF32); PCIe 5 through "
                 "the host, and 10 Gbit/s: an estimate; products: H100's"},
      {.name = "EPYC 9654",
       .flops = 14.7 * kT,
       .flops_fp32 = 7.4 * kT,
       .memory = 768 * kG,
       .bandwidth = 460.8 * kG,
       .link = 200 * kG,
       .pcie = 200 * kG,
       .per_host = 2,
       .network = 3.125 * kG,
       .products = 0.6,
       .cpu = true,
       .source = "computed: 96 cores x 2.4 GHz x 32 (bf16: 64) FLOPs a cycle, 12 channels of "
                 "DDR5-4800; a rank a socket, 25 Gbit/s: an estimate"},
      {.name = "Xeon 8480",
       .flops = 229 * kT,
       .flops_fp32 = 7.2 * kT,
       .memory = 512 * kG,
       .bandwidth = 307.2 * kG,
       .link = 100 * kG,
       .pcie = 100 * kG,
       .per_host = 2,
       .network = 3.125 * kG,
       .products = 0.3,
       .cpu = true,
       .source = "computed: 56 cores x 2.0 GHz x 2048 (AMX, bf16) and 64 (fp32) FLOPs a cycle, 8 "
                 "channels of DDR5-4800; a rank a socket, 25 Gbit/s: an estimate"}};
  return all;
}

namespace {

const Device* find_device(std::string_view name) {
  const auto& all = devices();
  const auto found = std::ranges::find_if(all, [&](const Device& device) {
    return lower(device.name) == lower(name) || lower(device.name) == "rtx" + lower(name);
  });
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

const Device& device_named(std::string_view name) {
  if (const auto* found = find_device(name)) return *found;
  std::vector<std::string> names;
  for (const auto& device : devices()) names.push_back(device.name);
  throw ConfigError(
      fmt::format("No device is known as '{}'. Known are {}; describe another one in a JSON file "
                  "(--hardware FILE).",
                  name, fmt::join(names, ", ")));
}

namespace {

double usual_host_memory(const Device& device) {
  return device.cpu ? device.memory * static_cast<double>(device.per_host) : 1e12;
}

}  // namespace

Cluster cluster_of(const Device& device, int64_t hosts, int64_t per_host) {
  return {.device = device,
          .hosts = hosts,
          .per_host = per_host > 0 ? per_host : device.per_host,
          .inside = {.bandwidth = device.link, .latency = kInside, .efficiency = 0.8},
          .between = {.bandwidth = device.network, .latency = kBetween, .efficiency = 0.7},
          .host_memory = usual_host_memory(device)};
}

namespace {

// A key of the JSON file and the number that it sets.
constexpr double kLeastPart = 1e-6;
constexpr double kMostLatency = 10;  // seconds
constexpr size_t kMostOfName = 100;  // bytes

struct Number {
  const char* key;
  double& value;
  enum class Kind : uint8_t { other, part, speed, latency };
  /// A part is at least kLeastPart and at most 1, a speed at least kLeastSpeed, a latency at most
  /// kMostLatency.
  Kind kind = Kind::other;
  bool may_be_0 = false;
};

std::vector<Number> numbers(Cluster& c) {
  constexpr auto kPart = Number::Kind::part, kSpeed = Number::Kind::speed,
                 kLatency = Number::Kind::latency;
  return {{"flops", c.device.flops, kSpeed},
          {"flops_fp32", c.device.flops_fp32, kSpeed},
          {"memory", c.device.memory},
          {"bandwidth", c.device.bandwidth, kSpeed},
          {"pcie", c.device.pcie, kSpeed},
          {"products", c.device.products, kPart},
          {"attention", c.device.attention, kPart},
          {"streams", c.device.streams, kPart},
          {"link", c.inside.bandwidth, kSpeed},
          {"link_latency", c.inside.latency, kLatency},
          {"link_efficiency", c.inside.efficiency, kPart},
          {"link_processors", c.inside.processors, kPart, true},
          {"network", c.between.bandwidth, kSpeed},
          {"network_latency", c.between.latency, kLatency},
          {"network_efficiency", c.between.efficiency, kPart},
          {"network_processors", c.between.processors, kPart, true},
          {"host_memory", c.host_memory},
          {"nvme", c.nvme, kSpeed},
          {"nvme_bytes", c.nvme_bytes},
          {"host_update", c.host_update, kSpeed},
          {"jitter", c.speeds_differ.jitter, kPart, true},
          {"stragglers", c.speeds_differ.stragglers, kPart, true},
          {"straggler_slower", c.speeds_differ.slower}};
}

}  // namespace

Cluster cluster_from_json(std::string_view text, std::string_view source) {
  const auto fail = [&](const std::string& why) {
    throw ConfigError(fmt::format("The hardware file {}: {}", source, why));
  };
  Json json;
  try {
    json = parse_json(text, /*comments=*/true);
  } catch (const Error& error) {
    fail(fmt::format("it {}.", error.what()));
  }
  if (!json.is_object()) fail("it must be an object.");
  if (const auto kind = kind_of(json);
      kind != JsonKind::machines && kind != JsonKind::unknown && !json.contains("device"))
    fail(fmt::format("it is {}. Give one with a device, as {{\"device\": \"H100\"}}.",
                     what_it_is(kind)));
  Device device;
  device.name = "a device";
  if (json.contains("device")) {
    if (!json["device"].is_string()) fail("'device' must be a name.");
    // The figures of a device may be given with a name of its own.
    const bool described =
        json.contains("flops") && json.contains("memory") && json.contains("bandwidth");
    device.name = json["device"].get<std::string>();
    const bool printable =
        std::ranges::none_of(device.name, [](unsigned char c) { return c < 0x20 || c == 0x7F; });
    if (device.name.size() > kMostOfName || !printable)
      fail(fmt::format("'device' must be a name of at most {} bytes, without control characters.",
                       kMostOfName));
    if (const auto* known = find_device(device.name)) {
      device = *known;
    } else if (!described) {
      device = device_named(device.name);
    }
  }
  if (json.contains("cpu")) {
    if (!json["cpu"].is_boolean()) fail("'cpu' must be true or false.");
    device.cpu = json["cpu"].get<bool>();
  }
  const auto whole = [&](const char* key, int64_t otherwise) {
    if (!json.contains(key)) return otherwise;
    if (!json[key].is_number_integer() || json[key].get<int64_t>() < 1)
      fail(fmt::format("'{}' must be a whole number above 0.", key));
    return json[key].get<int64_t>();
  };
  const bool known = find_device(device.name) != nullptr;
  if (!known) device.per_host = whole("per_host", device.per_host);
  auto cluster = cluster_of(device, whole("hosts", 1), whole("per_host", device.per_host));
  for (const auto& [key, value] : json.items()) {
    if (key == "device" || key == "hosts" || key == "per_host" || key == "source" || key == "cpu")
      continue;
    auto list = numbers(cluster);
    const auto found = std::ranges::find_if(list, [&](const Number& n) { return n.key == key; });
    if (found == list.end()) {
      std::vector<std::string> keys;
      for (const auto& each : list) keys.emplace_back(each.key);
      fail(fmt::format("'{}' is unknown; the keys are device, cpu, hosts, per_host, {}.", key,
                       fmt::join(keys, ", ")));
    }
    const double number = value.is_number() ? value.get<double>() : NAN;
    const bool zero = number == 0 && found->may_be_0;
    if (!std::isfinite(number) || !(number > 0 || zero))
      fail(fmt::format("'{}' is {}; it must be a number above 0.", key, value.dump()));
    if (found->kind == Number::Kind::part &&
        (number > 1 || (number < kLeastPart && !found->may_be_0))) {
      fail(fmt::format("'{}' is {}; it is a part, at least {} and at most 1.", key, value.dump(),
                       found->may_be_0 ? 0 : kLeastPart));
    }
    if (found->kind == Number::Kind::latency && number > kMostLatency) {
      fail(fmt::format("'{}' is {}; it is in seconds, and more than {:.0f} are hardly meant.", key,
                       value.dump(), kMostLatency));
    }
    if (found->kind == Number::Kind::speed && number < kLeastSpeed) {
      const bool flops = key.starts_with("flops");
      fail(fmt::format(
          "'{}' is {}, which is {} {} a second, and less than {:.0f} million is hardly meant. "
          "Write "
          "all of them, as {} for {}.",
          key, value.dump(), value.dump(), flops ? "FLOPs" : "bytes", kLeastSpeed * 1e-6,
          flops ? "1e14" : "1.25e9", flops ? "100 TFLOP/s" : "10 Gbit/s"));
    }
    found->value = number;
  }
  if (cluster.device.flops == 0 || cluster.device.memory == 0 || cluster.device.bandwidth == 0)
    fail("give 'device', or 'flops', 'memory' and 'bandwidth'.");
  if (cluster.speeds_differ.slower < 1) {
    fail(
        fmt::format("'straggler_slower' is {}; it is how many times as long a straggler takes, at "
                    "least 1.",
                    cluster.speeds_differ.slower));
  }
  constexpr double kMostSlower = 1e6;
  if (cluster.speeds_differ.slower > kMostSlower) {
    fail(fmt::format("'straggler_slower' is {}; more than {:.0f} times as long is hardly meant.",
                     cluster.speeds_differ.slower, kMostSlower));
  }
  if (cluster.device.flops_fp32 == 0) cluster.device.flops_fp32 = cluster.device.flops / 2;
  if (!json.contains("host_memory")) cluster.host_memory = usual_host_memory(cluster.device);
  return cluster;
}

double usable(const Cluster& cluster) {
  constexpr double kContext = 1e9;  // of the device's context and libraries
  constexpr double kFragments = 0.03;
  const double all = cluster.memory_of_rank();
  return cluster.device.cpu ? all : std::max(0.0, all * (1 - kFragments) - kContext);
}

void check(const Cluster& cluster) {
  if (cluster.hosts < 1 || cluster.per_host < 1 || cluster.hosts > kMostRanks / cluster.per_host) {
    throw ConfigError(fmt::format(
        "The cluster has {} hosts of {} devices each; a plan is for 1 to {} devices in all.",
        cluster.hosts, cluster.per_host, kMostRanks));
  }
  if (usable(cluster) <= 0) {
    throw ConfigError(fmt::format(
        "'memory' is {}, and a device's context and libraries take about 1 GB, so nothing is left "
        "for a model. Give the memory of a device in bytes, as 80e9; with \"cpu\": true nothing is "
        "taken off.",
        cluster.device.memory));
  }
  const auto need = [&](bool needed, double speed, const char* key, const std::string& why) {
    if (!needed || speed > 0) return;
    throw ConfigError(
        fmt::format("'{}' is missing: {}. Give the speed in bytes a second, as --{} 10GB/s or as "
                    "that key of the hardware file.",
                    key, why, key));
  };
  need(cluster.per_host > 1, cluster.inside.bandwidth, "link",
       fmt::format("{} devices of a host send to each other", cluster.per_host));
  need(cluster.hosts > 1, cluster.between.bandwidth, "network",
       fmt::format("{} hosts send to each other", cluster.hosts));
  need(!cluster.device.cpu, cluster.device.pcie, "pcie",
       "states may go between the device and its host");
}

std::string to_json(const Cluster& cluster) {
  auto copy = cluster;
  Json json = {{"device", cluster.device.name},
               {"hosts", cluster.hosts},
               {"per_host", cluster.per_host},
               {"cpu", cluster.device.cpu},
               {"source", cluster.device.source}};
  for (const auto& number : numbers(copy)) {
    if (number.value > 0) json[number.key] = number.value;
  }
  return json.dump(2);
}

double Collective::seconds(double sent, double leaves, int64_t ranks, int64_t hosts) const {
  if (ranks <= 1) return 0;
  const auto& c = cluster;
  const auto rate = [](const Link& link) { return link.bandwidth * link.efficiency; };
  const int64_t of_a_host = ranks / std::max<int64_t>(1, hosts);
  const auto local = static_cast<double>(of_a_host);
  const double stays = sent - leaves;
  // Both levels carry chunks of one collective at the same time.
  const double inside = stays > 0 ? stays / rate(c.inside) : 0;
  // All ranks of a host send at the same time, in one collective or in several side by side (sums
  // over replicas have one for each slice).
  const double between =
      leaves > 0 ? leaves * static_cast<double>(c.per_host) / rate(c.between) : 0;
  const auto steps = [](double count) { return std::ceil(std::log2(std::max(1.0, count))); };
  const double latency =
      c.inside.latency * steps(local) + c.between.latency * steps(static_cast<double>(hosts));
  return std::max(inside, between) + latency;
}

}  // namespace zero::plan
