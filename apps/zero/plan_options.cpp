#include "apps/zero/plan_options.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/base/json_kind.h"
#include "zero/checkpoint/file.h"
#include "zero/planner/here.h"

namespace zero::app::planning {
namespace {

constexpr const char* kDescription =
    "Says before a run which configurations of ZeRO fit on described machines, how fast each is, "
    "what binds it, and\n"
    "whether ZeRO is needed. Nothing runs: the model's step is traced without memory, and the rest "
    "is arithmetic.\n\n"
    "  zero plan --model gpt2-xl --batch 512 --seq 1024 --device h100 --hosts 4\n"
    "  zero plan --model my/config.json --batch 64 --device v100 --per-host 1 --nvme 3GB/s --out "
    "ds_config.json\n"
    "  zero plan --model gpt2-xl --batch 512 --seq 1024 --device h100 --hosts 4 --scale 8..4096\n"
    "  zero plan --model gpt2 --batch 64 --device h100 --tokens 10G --price 2.5 --svg plan.svg\n"
    "  zero plan --model gpt2-nano --batch 16 --seq 256 --here\n"
    "  zero plan --model gpt2 --batch 8 --device h100 --operators --flops 800T --bandwidth "
    "3TB/s\n\n"
    "Speeds are bytes a second (12GB/s) or bits (400Gbit); one of less than 1 MB a second needs a "
    "unit. The columns:\n"
    "  device, host, disk  bytes of a rank there, at the most in a step\n"
    "  step                milliseconds, and those that operators take (compute), that are spent "
    "waiting for gathers,\n"
    "                      reductions, copies between device and host (offload) and the disk, and "
    "in the update\n"
    "  MFU                 FLOPs of the model, without recomputation, of the devices' peak";
// Throws ConfigError where a result would replace what the plan reads, another result, or a file
// that is no configuration.
void check_results(const Options& o) {
  namespace fs = std::filesystem;
  const std::array results{std::pair("--out", o.out), std::pair("--svg", o.svg),
                           std::pair("--json", o.json.path())};
  const auto same = [](const std::string& a, const std::string& b) {
    std::error_code ignored;
    return fs::equivalent(a, b, ignored) ||
           fs::absolute(a).lexically_normal() == fs::absolute(b).lexically_normal();
  };
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& [option, file] = results[i];
    if (file.empty()) continue;
    for (const auto& [source, read] :
         {std::pair("--model", o.model), std::pair("--hardware", o.hardware)}) {
      if (!read.empty() && same(file, read))
        throw ConfigError(fmt::format("{} is {}, which is what {} reads. Give it another file.",
                                      option, file, source));
    }
    for (size_t other = 0; other < i; ++other) {
      if (!results[other].second.empty() && same(file, results[other].second))
        throw ConfigError(fmt::format("{} is {}, as {} is. Give each a file of its own.", option,
                                      file, results[other].first));
    }
  }
  std::error_code ignored;
  if (o.out.empty() || !fs::exists(o.out, ignored)) return;
  try {
    if (kind_of(parse_json(read_file(o.out, fail<ConfigError>))) == JsonKind::training) return;
  } catch (const Error&) {  // it is no JSON
  }
  throw ConfigError(
      fmt::format("--out is {}, which is there and is no configuration of training. Remove it, or "
                  "give another file.",
                  o.out));
}

}  // namespace

std::optional<int> read_command_line(const Arguments& arguments, Options& o) {
  OptionParser parser("plan", kDescription);
  parser.add_option("--model", o.model,
                    "A name, as gpt2, gpt2-xl or llama-nano, or a Hugging Face config.json");
  parser.add_option("--batch", o.batch, "Sequences of a step, over all ranks")->check(positive());
  parser.add_option("--seq", o.seq, "Tokens of a sequence")->check(positive());
  const auto* dtype =
      parser
          .add_option("--dtype", o.dtype,
                      "fp32, or bf16 with fp32 master weights; fp16 where a device has no bf16")
          ->check(CLI::IsMember({"fp32", "bf16"}));
  parser
      .add_option("--autocast", o.autocast,
                  "bf16 (fp16 where a device has none) or fp16: matrix products in it, as of `zero "
                  "train --autocast`; parameters are in fp32 then")
      ->check(CLI::IsMember({"bf16", "fp16"}));
  const auto* device = parser.add_option("--device", o.device, "A device; --devices lists them");
  parser.add_option("--hardware", o.hardware, "A JSON file that describes the machines instead")
      ->type_name("FILE");
  parser.add_flag("--here", o.here,
                  "This machine instead, measured in some seconds: with --per-host ranks (else 2), "
                  "and the disk of --nvme-path where that is given; or --hosts like it");
  const auto* hosts = parser.add_option("--hosts", o.hosts, "Hosts")->check(positive());
  const auto* per_host =
      parser.add_option("--per-host", o.per_host, "Devices of a host; 0: as many as usual")
          ->check(not_negative());
  parser.add_option("--host-memory", o.host_memory, "Memory of a host, as 1TB")->type_name("BYTES");
  const auto add_speed = [&](const char* name, std::string& value, const char* what) {
    parser.add_option(name, value, what)->type_name("SPEED");
  };
  add_speed("--link", o.link, "Speed of a device to the others of its host, one way");
  add_speed("--network", o.network, "Speed of a host to the others, one way, as 400Gbit");
  add_speed("--pcie", o.pcie, "Between a device and its host, each way");
  add_speed("--nvme", o.nvme,
            "Speed of a host's disks, reads and writes together; without it there is none");
  parser.add_option("--most-micro-batch", o.most_micro_batch, "The largest micro-batch to try")
      ->check(positive());
  parser
      .add_option("--updates", o.updates,
                  "Updates to try beside those in the step: in-backward (which does not clip), "
                  "delayed (which uses weights one update old)")
      ->delimiter(',')
      ->check(CLI::IsMember({"in-backward", "delayed"}))
      ->type_name("LIST");
  parser
      .add_option("--jitter", o.jitter,
                  "How much a rank's computing differs from step to step: its standard deviation, "
                  "as a part of its time")
      ->check(between(0, 1));
  parser
      .add_option("--stragglers", o.stragglers, "The chance that a rank is a straggler in a step")
      ->check(between(0, 1));
  const auto* slower = parser
                           .add_option("--straggler-slower", o.straggler_slower,
                                       "How many times as long a straggler computes (1.5)")
                           ->check(between(1, 1e6));
  parser.add_option("--rows", o.rows, "Candidates to show")->check(positive());
  parser
      .add_option("--scale", o.scale,
                  "Other numbers of ranks, doubling, as 8..4096, with the "
                  "batch of a rank")
      ->type_name("FROM..TO");
  parser
      .add_option("--tokens", o.tokens, "Tokens to train on, as 300G: says the time that they take")
      ->type_name("N");
  parser
      .add_option("--price", o.price,
                  "Price of a device for an hour: says what --tokens cost; 0: does not")
      ->check(not_negative());
  parser
      .add_option("--svg", o.svg,
                  "File for a picture: memory and steps of the first rows, and --scale")
      ->type_name("FILE");
  parser.add_option("--out", o.out, "File for the best candidate's configuration")
      ->type_name("FILE");
  const auto* disk =
      parser.add_option("--nvme-path", o.nvme_path, "The folder for states on disk in that file");
  parser
      .add_option("--mtbf", o.mtbf,
                  "Hours between failures of one device: says how often to save; 0: does not")
      ->check(not_negative());
  parser.add_option("--checkpoint", o.checkpoint, "Seconds that a checkpoint stops training")
      ->check(positive());
  parser.add_option("--restart", o.restart, "Seconds from a failure until training goes on")
      ->check(not_negative());
  const auto* operators = parser.add_flag(
      "--operators", o.operators,
      "Print instead what each kind of operator of one device's step moves and computes, and the "
      "least time that this takes: to be laid beside a profile. --batch is the micro-batch");
  const auto* flops =
      parser
          .add_option(
              "--flops", o.flops,
              "With --operators: FLOPs a second that products reach, as 800T; else what the "
              "device reaches by --devices")
          ->type_name("FLOPS");
  const auto* bandwidth = parser
                              .add_option("--bandwidth", o.bandwidth,
                                          "With --operators: bytes a second that other operators "
                                          "reach")
                              ->type_name("SPEED");
  parser.add_flag("--devices", o.devices, "List the devices, with the sources of their figures");
  parser.add_flag("--papers", o.papers, "Print the tables of papers beside what is predicted");
  o.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  o.disk_given = disk->count() > 0;
  if (!o.autocast.empty()) {
    if (dtype->count() > 0 && o.dtype != "fp32" && o.autocast != o.dtype) {
      throw ConfigError(fmt::format(
          "--autocast is {}, but --dtype is {}: weights in one format of 16 bits would be cast to "
          "the other. Use one for both, or --dtype fp32.",
          o.autocast, o.dtype));
    }
    if (dtype->count() == 0) o.dtype = "fp32";
  }
  o.json.check();
  benchmarks::check_file("--out", o.out);
  benchmarks::check_file("--svg", o.svg);
  check_results(o);
  (void)quantity("--tokens", o.tokens, Quantity::count);
  for (const auto* option : {flops, bandwidth}) {
    if (option->count() > 0 && operators->count() == 0) {
      throw ConfigError(fmt::format(
          "{} is of --operators, which is not given. Give it too, or describe the machines in a "
          "file for --hardware.",
          option->get_name()));
    }
  }
  if (o.price > 0 && o.tokens.empty()) {
    throw ConfigError(fmt::format(
        "--price is {}, but there are no --tokens that could cost something. Give them, as 300G.",
        o.price));
  }
  if (slower->count() > 0 && o.stragglers == 0 && o.hardware.empty()) {
    throw ConfigError(
        fmt::format("--straggler-slower is {}, but no rank is a straggler. Give their part, as "
                    "--stragglers 0.001.",
                    o.straggler_slower));
  }
  if (o.here && !o.hardware.empty()) {
    throw ConfigError(fmt::format(
        "--here measures this machine, and --hardware {} describes another. Give one of them.",
        o.hardware));
  }
  for (const auto* option : {device, hosts, per_host}) {
    if (!o.hardware.empty() && option->count() > 0) {
      throw ConfigError(
          fmt::format("{} is given, but --hardware {} says which machines there are. Leave it out, "
                      "or change that file.",
                      option->get_name(), o.hardware));
    }
  }
  if (o.here && device->count() > 0) {
    throw ConfigError(fmt::format(
        "--here measures this machine, and --device {} names another. Give one of them.",
        o.device));
  }
  if (o.here && o.hosts > 1 && o.network.empty()) {
    throw ConfigError(fmt::format(
        "--here cannot measure the network to the other {} of --hosts {}. Give its speed, as "
        "--network 10Gbit, or start `zero train --plan` on the hosts.",
        o.hosts - 1, o.hosts));
  }
  return std::nullopt;
}

plan::Cluster Options::cluster() const {
  constexpr int64_t kRanksHere = 2;
  auto machines =
      here ? plan::measured_here(per_host > 0 ? per_host : kRanksHere,
                                 disk_given ? std::vector{nvme_path} : std::vector<std::string>())
      : hardware.empty()
          ? plan::cluster_of(plan::device_named(device), hosts, per_host)
          : plan::cluster_from_json(read_file(hardware, fail<ConfigError>), hardware);
  if (here) machines.hosts = hosts;
  constexpr double kLeastMemory = 1e6;
  if (!host_memory.empty()) {
    machines.host_memory = quantity("--host-memory", host_memory, Quantity::bytes);
    if (machines.host_memory < kLeastMemory) {
      throw ConfigError(
          fmt::format("--host-memory is {}, which is {:.0f} bytes, and less than a million is "
                      "hardly meant. Give a unit, as 1TB.",
                      host_memory, machines.host_memory));
    }
  }
  if (!link.empty()) machines.inside.bandwidth = speed("--link", link);
  if (!network.empty()) machines.between.bandwidth = speed("--network", network);
  if (!pcie.empty()) machines.device.pcie = speed("--pcie", pcie);
  if (!nvme.empty()) machines.nvme = speed("--nvme", nvme);
  auto& differ = machines.speeds_differ;
  if (jitter > 0) differ.jitter = jitter;
  if (stragglers > 0) differ.stragglers = stragglers;
  if (straggler_slower > 0) differ.slower = straggler_slower;
  if (straggler_slower > 0 && differ.stragglers == 0) {
    throw ConfigError(
        fmt::format("--straggler-slower is {}, but {} has no stragglers. Give their part, as "
                    "--stragglers 0.001.",
                    straggler_slower, hardware.empty() ? "this machine" : hardware));
  }
  return machines;
}

std::optional<at::ScalarType> Options::autocast_dtype() const {
  if (autocast.empty()) return std::nullopt;
  return autocast == "bf16" ? at::kBFloat16 : at::kHalf;
}

plan::Device Options::device_of_operators() const {
  auto reached = cluster().device;
  const double per_second = speed("--flops", flops, Quantity::flops);
  const double bytes = speed("--bandwidth", bandwidth);
  if (per_second > 0) {
    reached.flops = reached.flops_fp32 = per_second;
    reached.products = 1;
    reached.attention = 0;
  }
  if (bytes > 0) {
    reached.bandwidth = bytes;
    reached.streams = 1;
  }
  return reached;
}

std::pair<int64_t, int64_t> Options::scale_range() const {
  const auto dots = scale.find("..");
  int64_t first = 0;
  int64_t last = 0;
  const auto read = [](std::string_view part, int64_t& value) {
    const auto end = part.data() + part.size();
    const auto [at, error] = std::from_chars(part.data(), end, value);
    return error == std::errc() && at == end && value > 0;
  };
  const std::string_view all(scale);
  if (dots == std::string::npos || !read(all.substr(0, dots), first) ||
      !read(all.substr(dots + 2), last) || first > last) {
    throw ConfigError(
        fmt::format("--scale is '{}'; it should be two numbers of ranks, as 8..4096.", scale));
  }
  return {first, last};
}

std::optional<plan::Failures> Options::failures(int64_t devices) const {
  if (mtbf == 0) return std::nullopt;
  return plan::Failures{
      .between = mtbf * 3600, .devices = devices, .checkpoint = checkpoint, .restart = restart};
}

std::optional<plan::Training> Options::training(const plan::Candidate& candidate) const {
  if (tokens.empty() || !candidate.fits()) return std::nullopt;
  plan::Training asked{.tokens = quantity("--tokens", tokens, Quantity::count),
                       .tokens_per_second = candidate.tokens_per_second,
                       .devices = candidate.ranks,
                       .price = price};
  if (const auto expected = failures(candidate.ranks))
    asked.goodput = plan::goodput(*expected, plan::best_interval(*expected));
  return asked;
}

}  // namespace zero::app::planning
