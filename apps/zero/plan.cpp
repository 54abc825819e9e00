// `zero plan`: which configurations of ZeRO fit on described machines, and how fast they are.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "apps/zero/bench.h"
#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/base/json_kind.h"
#include "zero/checkpoint/file.h"
#include "zero/models/architectures.h"
#include "zero/planner/answer_json.h"
#include "zero/planner/answer_text.h"
#include "zero/planner/budget.h"
#include "zero/planner/goodput.h"
#include "zero/planner/here.h"
#include "zero/planner/operator_table.h"
#include "zero/planner/papers.h"
#include "zero/planner/planner.h"
#include "zero/report/plan_picture.h"

namespace zero::app::planning {
namespace {

using benchmarks::Json;
using plan::Candidate;

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

struct Options {
  std::string model = "gpt2";
  int64_t batch = 256;
  int64_t seq = 1024;
  std::string dtype = "bf16";
  std::string autocast;
  std::string device = "h100";
  std::string hardware;
  int64_t hosts = 1;
  int64_t per_host = 0;
  std::string host_memory, link, network, nvme, pcie, scale, out, svg;
  std::string tokens;
  double price = 0;
  bool here = false;
  bool disk_given = false;
  std::string nvme_path = "/local_nvme";
  int64_t most_micro_batch = 64;
  int64_t rows = 8;
  std::vector<std::string> updates;
  double jitter = 0;
  double stragglers = 0;
  double straggler_slower = 0;
  double mtbf = 0;
  double checkpoint = 60;
  double restart = 300;
  bool operators = false;
  std::string flops, bandwidth;
  bool devices = false;
  bool papers = false;
  benchmarks::JsonFile json;
};

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

// Returns false if a tested row is further off than it may be.
bool print_papers() {
  std::string table;
  int failed = 0;
  for (const auto& row : plan::published_rows()) {
    if (row.table != table) {
      table = row.table;
      fmt::print("\n{}\n  {:<44} {:>10} {:>10} {:<6} {:>8} {:>6}\n", table, "row", "published",
                 "predicted", "", "off", "may be");
    }
    const bool tested = row.tolerance > 0;
    fmt::print("  {:<44} {:>10.4g} {:>10.4g} {:<6} {:>+7.1f}% {:>6}{}{}\n", row.name, row.published,
               row.predicted, row.unit, 100 * row.error(),
               tested ? fmt::format("{:.3g}%", 100 * row.tolerance) : "-",
               row.note.empty() ? "" : "  " + row.note, row.passes() ? "" : "  TOO FAR");
    if (!row.passes()) ++failed;
  }
  if (failed > 0) fmt::print("\n{} rows are further off than they may be.\n", failed);
  return failed == 0;
}

plan::Cluster cluster_of(const Options& o) {
  constexpr int64_t kRanksHere = 2;
  auto cluster =
      o.here ? plan::measured_here(
                   o.per_host > 0 ? o.per_host : kRanksHere,
                   o.disk_given ? std::vector{o.nvme_path} : std::vector<std::string>())
      : o.hardware.empty()
          ? plan::cluster_of(plan::device_named(o.device), o.hosts, o.per_host)
          : plan::cluster_from_json(read_file(o.hardware, fail<ConfigError>), o.hardware);
  if (o.here) cluster.hosts = o.hosts;
  constexpr double kLeastMemory = 1e6;
  if (!o.host_memory.empty()) {
    cluster.host_memory = quantity("--host-memory", o.host_memory, Quantity::bytes);
    if (cluster.host_memory < kLeastMemory) {
      throw ConfigError(
          fmt::format("--host-memory is {}, which is {:.0f} bytes, and less than a million is "
                      "hardly meant. Give a unit, as 1TB.",
                      o.host_memory, cluster.host_memory));
    }
  }
  if (!o.link.empty()) cluster.inside.bandwidth = speed("--link", o.link);
  if (!o.network.empty()) cluster.between.bandwidth = speed("--network", o.network);
  if (!o.pcie.empty()) cluster.device.pcie = speed("--pcie", o.pcie);
  if (!o.nvme.empty()) cluster.nvme = speed("--nvme", o.nvme);
  auto& differ = cluster.speeds_differ;
  if (o.jitter > 0) differ.jitter = o.jitter;
  if (o.stragglers > 0) differ.stragglers = o.stragglers;
  if (o.straggler_slower > 0) differ.slower = o.straggler_slower;
  if (o.straggler_slower > 0 && differ.stragglers == 0) {
    throw ConfigError(
        fmt::format("--straggler-slower is {}, but {} has no stragglers. Give their part, as "
                    "--stragglers 0.001.",
                    o.straggler_slower, o.hardware.empty() ? "this machine" : o.hardware));
  }
  return cluster;
}

std::optional<at::ScalarType> autocast_of(const Options& o) {
  if (o.autocast.empty()) return std::nullopt;
  return o.autocast == "bf16" ? at::kBFloat16 : at::kHalf;
}

/// The device of --operators: its speeds are those that operators reach.
plan::Device device_of(const Options& o) {
  auto device = cluster_of(o).device;
  const double flops = speed("--flops", o.flops, Quantity::flops);
  const double bandwidth = speed("--bandwidth", o.bandwidth);
  if (flops > 0) {
    device.flops = device.flops_fp32 = flops;
    device.products = 1;
    device.attention = 0;
  }
  if (bandwidth > 0) {
    device.bandwidth = bandwidth;
    device.streams = 1;
  }
  return device;
}

void print_operators(const Options& o, const LanguageModelConfig& sizes) {
  const auto device = device_of(o);
  const auto dtype = o.dtype == "fp32" ? at::kFloat : device.bf16 ? at::kBFloat16 : at::kHalf;
  auto autocast = autocast_of(o);
  if (autocast && !device.bf16) autocast = at::kHalf;
  const bool narrow = dtype != at::kFloat || autocast;
  const double flops = (narrow ? device.flops : device.flops_fp32) * device.products;
  const auto rows =
      plan::operator_rows(plan::trace(sizes, o.batch, o.seq, 0,
                                      {.dtype = dtype, .host = device.cpu, .autocast = autocast}),
                          device, dtype);
  double seconds = 0;
  for (const auto& row : rows) seconds += row.seconds;
  fmt::print(
      "{} in {}, {} sequences of {} tokens on one {}: {:.4g} TFLOP/s, {:.4g} GB/s\n\n{:>9} {:>6} "
      "{:>10} {:>10}  {:<7} {:<9} {:<46} {}\n",
      o.model, c10::toString(dtype), o.batch, o.seq, device.name, flops * 1e-12,
      device.bandwidth * device.streams * 1e-9, "ms", "count", "GFLOP", "MB", "bound", "pass",
      "operator", "module");
  Json results = Json::array();
  for (const auto& row : rows) {
    const bool by_memory = row.memory_seconds > row.seconds / 2;
    fmt::print("{:>9.3f} {:>6} {:>10.1f} {:>10.1f}  {:<7} {:<9} {:<46} {}\n", 1e3 * row.seconds,
               row.count, row.flops * 1e-9, row.bytes * 1e-6, by_memory ? "memory" : "compute",
               row.backward ? "backward" : "forward", row.name, row.module);
    results.push_back({{"operator", row.name},
                       {"module", row.module},
                       {"backward", row.backward},
                       {"count", row.count},
                       {"flops", row.flops},
                       {"bytes", row.bytes},
                       {"ms", 1e3 * row.seconds},
                       {"memory_ms", 1e3 * row.memory_seconds}});
  }
  fmt::print("{:>9.3f} ms together: {:.0f} tokens a second at the most\n", 1e3 * seconds,
             static_cast<double>(o.batch * o.seq) / seconds);
  o.json.write("operators", benchmarks::machine(),
               {{"model", o.model},
                {"micro_batch", o.batch},
                {"seq", o.seq},
                {"dtype", c10::toString(dtype)},
                {"flop_per_s", flops},
                {"bytes_per_s", device.bandwidth * device.streams}},
               results);
}

Json json_of(const Candidate& c) { return Json::parse(plan::to_json(c)); }

void print_devices() {
  fmt::print("{:<11} {:>9} {:>9} {:>8} {:>9} {:>9} {:>8} {:>5} {:>9} {:>8}  {}\n", "device",
             "TFLOP/s", "fp32", "memory", "GB/s", "link", "PCIe", "host", "network", "products",
             "source");
  for (const auto& d : plan::devices()) {
    fmt::print(
        "{:<11} {:>9.1f} {:>9.1f} {:>8.0f} {:>9.0f} {:>9.0f} {:>8.0f} {:>5} {:>9.1f} {:>8.2f}  "
        "{}\n",
        d.name, d.flops * 1e-12, d.flops_fp32 * 1e-12, d.memory * 1e-9, d.bandwidth * 1e-9,
        d.link * 1e-9, d.pcie * 1e-9, d.per_host, d.network * 1e-9, d.products, d.source);
  }
}

std::pair<int64_t, int64_t> range_of(const std::string& text) {
  const auto dots = text.find("..");
  int64_t first = 0;
  int64_t last = 0;
  const auto read = [](std::string_view part, int64_t& value) {
    const auto end = part.data() + part.size();
    const auto [at, error] = std::from_chars(part.data(), end, value);
    return error == std::errc() && at == end && value > 0;
  };
  const std::string_view all(text);
  if (dots == std::string::npos || !read(all.substr(0, dots), first) ||
      !read(all.substr(dots + 2), last) || first > last) {
    throw ConfigError(
        fmt::format("--scale is '{}'; it should be two numbers of ranks, as 8..4096.", text));
  }
  return {first, last};
}

/// The failures of a cluster, or none.
std::optional<plan::Failures> failures_of(const Options& o, int64_t devices) {
  if (o.mtbf == 0) return std::nullopt;
  return plan::Failures{.between = o.mtbf * 3600,
                        .devices = devices,
                        .checkpoint = o.checkpoint,
                        .restart = o.restart};
}

/// The training that --tokens asks for, or none.
std::optional<plan::Training> training_of(const Options& o, const Candidate& c) {
  if (o.tokens.empty() || !c.fits()) return std::nullopt;
  plan::Training training{.tokens = quantity("--tokens", o.tokens, Quantity::count),
                          .tokens_per_second = c.tokens_per_second,
                          .devices = c.ranks,
                          .price = o.price};
  if (const auto failures = failures_of(o, c.ranks))
    training.goodput = plan::goodput(*failures, plan::best_interval(*failures));
  return training;
}

void add_training(Json& json, const std::optional<plan::Training>& training) {
  if (training) json["training"] = Json::parse(plan::to_json(*training));
}

}  // namespace

int run(const Arguments& arguments) {
  Options o;
  if (const auto status = read_command_line(arguments, o)) return *status;
  if (o.devices) {
    print_devices();
    return 0;
  }
  if (o.papers) return print_papers() ? 0 : kFailed;
  const auto sizes = language_model_config(o.model);
  if (o.seq > sizes->context()) {
    throw ConfigError(fmt::format("--seq is {}, but the model {} takes at most {} tokens.", o.seq,
                                  o.model, sizes->context()));
  }
  if (o.operators) {
    print_operators(o, *sizes);
    return 0;
  }
  std::vector<plan::Updates> updates;
  for (const auto& name : o.updates) updates.push_back(plan::updates_named(name));
  plan::Question question{.trace = plan::tracer(*sizes, o.seq),
                          .global_batch = o.batch,
                          .sequence = o.seq,
                          .bf16 = o.dtype == "bf16",
                          .autocast = autocast_of(o),
                          .cluster = cluster_of(o),
                          .most_micro_batch = o.most_micro_batch,
                          .updates = std::move(updates)};
  plan::ask_of_depths(question, *sizes);
  const auto& cluster = question.cluster;
  std::pair<int64_t, int64_t> range;
  if (!o.scale.empty()) {
    range = range_of(o.scale);
    (void)plan::scaled(cluster, range.first, range.second);  // before time is spent
  }
  const auto answer = plan::plan(question);
  const auto title = plan::title(o.model, question, answer);
  fmt::print("{}\n", title);
  if (o.here) fmt::print("{}", plan::here_text(cluster));
  fmt::print("\n{}", plan::table_text(answer.candidates, static_cast<size_t>(o.rows)));
  if (answer.best().fits()) fmt::print("\n{}", plan::memory_text(answer.best(), "the first one"));
  fmt::print("\n{}", plan::sentences_text(answer));
  const double slowest = plan::slowest_rank(cluster.speeds_differ, cluster.ranks());
  if (slowest > 1) {
    fmt::print(
        "Each step waits for the slowest of {} ranks, which computes {:.3f} times as long as a "
        "usual one.\n",
        cluster.ranks(), slowest);
  }
  const auto failures = failures_of(o, cluster.ranks());
  Json of_failures;
  if (failures) {
    const double interval = plan::best_interval(*failures);
    of_failures = {{"seconds_between", failures->of_job()},
                   {"save_interval_seconds", interval},
                   {"goodput", plan::goodput(*failures, interval)}};
    fmt::print(
        "A failure comes every {:.3g} hours: save after each {:.3g} minutes of training, and "
        "{:.1f} % "
        "of the time is training.\n",
        failures->of_job() / 3600, interval / 60, 100 * plan::goodput(*failures, interval));
  }
  if (const auto training = training_of(o, answer.best()))
    fmt::print("{}", plan::training_text(*training, failures.has_value()));
  fmt::print("{}", plan::bounds_text(answer.bounds));
  Json results = Json::array();
  for (const auto& candidate : answer.candidates) {
    results.push_back(json_of(candidate));
    add_training(results.back(), training_of(o, candidate));
  }
  Json scale = Json::array();
  std::vector<plan::ScalePoint> points;
  if (!o.scale.empty()) {
    points = plan::scale(question, range.first, range.second);
    const auto of = [&](const Candidate& c) { return training_of(o, c); };
    fmt::print("\n{}", plan::scale_text(points, of));
    for (const auto& point : points)
      scale.push_back(Json::parse(plan::to_json(point, of(point.best))));
  }
  if (!o.svg.empty()) {
    const auto picture =
        report::plan_picture(title, answer, cluster, points, static_cast<size_t>(o.rows));
    OutputFile file(o.svg, fail<Error>);
    file.write(picture.data(), picture.size());
    file.commit();
    fmt::print("\nThe picture is in {}.\n", o.svg);
  }
  if (!o.out.empty()) {
    if (!answer.best().fits()) {
      throw ConfigError(
          fmt::format("Nothing fits, so {} was not written. {}", o.out, answer.binds));
    }
    const auto text = plan::ds_config(answer.best(), o.nvme_path);
    OutputFile file(o.out, fail<Error>);
    file.write(text.data(), text.size());
    file.commit();
    fmt::print("\nThe configuration of the first one is in {}.\n", o.out);
  }
  o.json.write("plan", benchmarks::machine(),
               {{"model", o.model},
                {"batch", o.batch},
                {"seq", o.seq},
                {"dtype", o.dtype},
                {"autocast", o.autocast},
                {"cluster", Json::parse(plan::to_json(cluster))},
                {"parameters", answer.parameters},
                {"zero_or_not", answer.zero_or_not},
                {"binds", answer.binds},
                {"helps", answer.helps},
                {"largest_model", answer.largest_model},
                {"fewest_devices", answer.fewest_devices},
                {"slowest_rank", slowest},
                {"failures", of_failures},
                {"bounds", Json::parse(plan::to_json(answer)).at("bounds")},
                {"scale", scale}},
               results);
  return 0;
}

}  // namespace zero::app::planning

namespace zero::app {

int plan_run(const Arguments& arguments) { return planning::run(arguments); }

}  // namespace zero::app
