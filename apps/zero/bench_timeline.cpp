// `zero bench timeline`: a step that was recorded, simulated at given speeds.
//
// Note [Recording without a device]
// Which units a step uses, and how much it computes, depends neither on ranks and stages nor on
// where the model lies. So one rank records it here, at stage 3 with parameters in host memory,
// where the pager sees every use. The plan and the costs of the ranks that are simulated come from
// the engine's own functions (engine/costs.h), for devices or for CPUs (--device). One sequence is
// recorded; a micro-batch of more computes as many times as much.
//
// Between hosts the gradient of a tied weight may leave while it is made (Note [Tied gradient in
// tiles] in engine/look_up_gradient.h), which one rank does not do. Its three products, of one
// size, are recorded with the output projection. So `in_tiles` cuts that operator after the first
// of them, the logits, and begins the reduction there. The tokens are random, so each rank looks
// other rows up. At stage 3 a rank computes the logits of its own rows while the others arrive
// (Note [Logits in blocks] in models/layers/cross_entropy.cpp): they count with the operator
// before, which does not wait for the weight. A look-up by rows (Note [Look-ups by rows] in
// engine/row_look_ups.h) does not gather a tied weight. Another table's rows come in its place.
#include <ATen/ops/randint.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/zero/bench.h"
#include "apps/zero/timeline_picture.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/checkpoint/file.h"
#include "zero/engine/costs.h"
#include "zero/engine/engine.h"
#include "zero/engine/plan_units.h"
#include "zero/models/language/language_model.h"
#include "zero/paging/simulation.h"

namespace zero::app::benchmarks {
namespace {

using paging::Resource;

constexpr const char* kDescription =
    "Simulates a training step at given speeds: what of gathers, reductions, copies and updates is "
    "not hidden behind\n"
    "computing, and how far ahead stage 3 should gather. Nothing is timed: one step of one "
    "sequence runs here, so that its\n"
    "uses of parameters and its FLOPs are known, and the rest is arithmetic.\n\n"
    "  zero bench timeline --model gpt2 --dtype bf16 --hosts 8 --micro-batch 4 --seq 1024 --flops "
    "50T --link 10Gbit\n"
    "  zero bench timeline --flops 50T --link 25GB/s --pcie 16GB/s --update 50GB/s "
    "--offload-optimizer cpu --svg step.svg\n\n"
    "Speeds are numbers with k, M, G, T or P (powers of 1000), and bytes a second (16G, 16GB, "
    "16GB/s) or bits (10Gbit).\n"
    "  ahead     bytes that stage 3 gathers ahead of their use; what is chosen is the least that "
    "is within 1% of the best\n"
    "  step      milliseconds of the step\n"
    "  compute   in which operators run, and updates on the device\n"
    "  exposed   in which nothing is computed, by what is waited for: the link, copies to the "
    "device (up) and to the\n"
    "            host (down), the disk, updates on the host\n"
    "  gathered  bytes of gathered units at most";

struct Options {
  std::string model = "gpt2";
  std::string dtype = "bf16";
  int64_t micro_batch = 1;
  int64_t seq = 1024;
  int64_t accumulate = 1;
  int64_t recompute = 0;
  int hosts = 1;
  int ranks_a_host = 1;
  std::vector<int> stages{1, 2, 3};
  std::string offload_optimizer = "none";
  std::string offload_param = "none";
  std::string device = "cuda";
  std::string compute, link, pcie, disk, update;
  double link_work = 0;
  std::optional<int64_t> ahead;
  int64_t live_parameters = Config{}.max_live_parameters;
  int64_t prefetch_parameters = Config{}.prefetch_bucket_size;
  int64_t bucket_size = Config{}.unit_bytes;
  std::string svg;
  JsonFile json;

  int64_t ranks() const { return int64_t{hosts} * ranks_a_host; }
  bool own_memory() const { return device != "cpu"; }
};

std::optional<int> read_command_line(const Arguments& arguments, Options& options) {
  OptionParser parser("bench timeline", kDescription);
  parser.add_option("--model", options.model,
                    "A name, as gpt2, gpt2-xl or gpt2-nano, or a Hugging Face config.json");
  parser.add_option("--dtype", options.dtype, "fp32, or bf16 with fp32 master weights")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  parser.add_option("--micro-batch", options.micro_batch, "Sequences that a rank passes at a time")
      ->check(positive());
  parser.add_option("--seq", options.seq, "Tokens of a sequence")->check(positive());
  parser.add_option("--accumulate", options.accumulate, "Micro-batches of a step")
      ->check(positive());
  parser
      .add_option("--recompute", options.recompute,
                  "Compute the first of every so many blocks again in backward; 0: none")
      ->check(not_negative());
  parser.add_option("--hosts", options.hosts, "Hosts of the ranks; the link is between them")
      ->check(positive());
  parser
      .add_option("--ranks-per-host", options.ranks_a_host,
                  "Ranks of a host, which share its link; with one host the link is a rank's")
      ->check(positive());
  parser.add_option("--stages", options.stages, "ZeRO stages")
      ->delimiter(',')
      ->check(CLI::Range(0, 3))
      ->default_str("1,2,3")
      ->type_name("STAGE,...");
  parser
      .add_option("--offload-optimizer", options.offload_optimizer,
                  "Place of master weights and moments: none (the device), cpu or nvme")
      ->check(CLI::IsMember({"none", "cpu", "nvme"}));
  parser
      .add_option("--offload-param", options.offload_param,
                  "Stage 3: where parameters are: none (the device), cpu or nvme")
      ->check(CLI::IsMember({"none", "cpu", "nvme"}));
  const auto speed = [&](const char* name, std::string& value, const char* what) {
    return parser.add_option(name, value, what)->type_name("SPEED");
  };
  speed("--flops", options.compute, "FLOPs a second of a rank")->required();
  speed("--link", options.link,
        "Speed of a rank's link, or of a host's; it takes no time where not given");
  speed("--pcie", options.pcie, "Between device and host, each way");
  speed("--disk", options.disk, "Speed of a rank's disk, reads and writes together");
  speed("--update", options.update,
        "Bytes that an update passes over in a second, 28 a parameter in bf16; no time where not "
        "given");
  parser
      .add_option(
          "--link-work", options.link_work,
          "The part of computing that is lost while the link is busy, 0 to 1: on CPUs, which "
          "carry messages too")
      ->check(CLI::Range(0.0, 1.0));
  parser
      .add_option("--device", options.device,
                  "What ranks compute on: cuda has memory of its own, cpu has the host's")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  parser
      .add_option("--prefetch", options.ahead,
                  "Stage 3: bytes to gather ahead, as 64MiB, instead of what is chosen")
      ->transform(CLI::AsSizeValue(false))
      ->check(not_negative())
      ->type_name("BYTES");
  parser
      .add_option("--live-parameters", options.live_parameters,
                  "Stage 3: parameters that may be gathered at once")
      ->check(not_negative());
  parser
      .add_option("--prefetch-parameters", options.prefetch_parameters,
                  "Parameters of those that may be gathered ahead: the most that is chosen")
      ->check(not_negative());
  parser
      .add_option("--bucket-size", options.bucket_size,
                  "Bytes that are gathered and reduced at once")
      ->check(positive());
  parser.add_option("--svg", options.svg, "File for a picture, which it replaces")
      ->type_name("FILE");
  options.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  std::vector<std::string> names;
  for (const int stage : options.stages) names.push_back(std::to_string(stage));
  check_distinct("--stages", names);
  options.json.check();
  check_file("--svg", options.svg);
  return std::nullopt;
}

paging::Speeds speeds_of(const Options& options) {
  const paging::Speeds speeds{.compute = speed("--flops", options.compute, Quantity::flops),
                              .link = speed("--link", options.link),
                              .pcie = speed("--pcie", options.pcie),
                              .disk = speed("--disk", options.disk),
                              .update = speed("--update", options.update),
                              .link_work = options.link_work};
  const auto need = [](bool needed, double speed, const char* option, const char* why) {
    if (needed && speed == 0)
      throw ConfigError(fmt::format("{} needs {} too: give the speed.", why, option));
  };
  const bool optimizer = options.offload_optimizer != "none";
  const bool parameters = options.offload_param != "none";
  need(optimizer && options.own_memory(), speeds.pcie, "--pcie", "--offload-optimizer");
  need(parameters && options.own_memory(), speeds.pcie, "--pcie", "--offload-param");
  need(options.offload_optimizer == "nvme", speeds.disk, "--disk", "--offload-optimizer nvme");
  need(options.offload_param == "nvme", speeds.disk, "--disk", "--offload-param nvme");
  return speeds;
}

OffloadDevice device_of(const std::string& offload) {
  return offload == "nvme"  ? OffloadDevice::nvme
         : offload == "cpu" ? OffloadDevice::cpu
                            : OffloadDevice::none;
}

/// The configuration of the ranks that are simulated.
Config config_at(const Options& options, int stage) {
  Config config;
  config.stage = stage;
  config.bf16 = options.dtype == "bf16";
  config.gradient_accumulation_steps = options.accumulate;
  config.unit_bytes = options.bucket_size;
  config.offload_optimizer.device = device_of(options.offload_optimizer);
  if (stage == 3) config.offload_param.device = device_of(options.offload_param);
  return config;
}

/// A step, and the model that has made it.
struct Recording {
  paging::StepSchedule schedule;
  ModelShape model;
  int64_t elements = 0;
  PlannedLookUp look_up{};  ///< that of the tokens
  double flops() const {
    double sum = 0;
    for (const double each : schedule.flops) sum += each;
    return sum;
  }
};

Recording record(const Options& options) {
  auto sizes = model_for_sequences(options.model, options.seq);
  sizes->set_dropout(0);
  const auto model = sizes->build();
  model->recompute({.every = options.recompute});
  auto config = config_at(options, 3);
  config.offload_optimizer = {};
  config.offload_param = {.device = OffloadDevice::cpu};
  Engine engine(model->module(), Sgd{.lr = 0}, config);
  const auto step = [&] {
    for (int64_t i = 0; i < options.accumulate; ++i) {
      const auto text =
          at::randint(sizes->vocab_size(), {1, options.seq + 1}, at::TensorOptions(at::kLong));
      engine.backward(model->loss(text.narrow(1, 0, options.seq).contiguous(),
                                  text.narrow(1, 1, options.seq).contiguous()));
      engine.step();
    }
  };
  step();  // after which the order of reductions is known
  engine.record_schedule();
  step();
  ensure(engine.schedule() != nullptr, "the second step was recorded");
  Recording recording{.schedule = *engine.schedule(),
                      .model = {.parameters = {}, .own_memory = options.own_memory()},
                      .elements = engine.parameter_count()};
  const auto parameters = engine.parameter_infos();
  const auto table = std::ranges::find(parameters, model->embedding(), &TensorInfo::name);
  ensure(table != parameters.end(), "tokens are looked up in a parameter");
  recording.look_up = {.parameter = table - parameters.begin(),
                       .use = model->tied_names().empty() ? LookUpUse::alone : LookUpUse::tied,
                       .rows = options.micro_batch * options.seq,
                       .columns = table->shape.back()};
  // AdamW treats every element alike, whatever the shape.
  for (const auto& parameter : engine.layout().parameters()) {
    recording.model.parameters.push_back(
        {.name = parameter.name, .sizes = {parameter.numel}, .strides = {1}});
  }
  for (auto& flops : recording.schedule.flops) flops *= static_cast<double>(options.micro_batch);
  return recording;
}

/// Begins the reduction of the unit in the last pass when the output projection has its logits. The
/// part `own` of these needs nothing that is gathered.
void in_tiles(paging::StepSchedule& schedule, int64_t unit, double own) {
  const auto recorded = schedule;
  size_t projection = 0;
  for (size_t p = 0; p < recorded.trace.operators(); ++p) {
    if (recorded.backward[p] == 0 && std::ranges::count(recorded.trace.units(p), unit) > 0)
      projection = p;
  }
  const double flops = recorded.flops[projection];
  schedule.trace.clear();
  for (size_t p = 0; p < recorded.trace.operators(); ++p) {
    schedule.trace.record(recorded.trace.units(p));
    if (p == projection) schedule.trace.record(recorded.trace.units(p));
  }
  const auto at = static_cast<ptrdiff_t>(projection);
  schedule.flops[projection] = 2 * flops / 3;
  const double early = projection > 0 ? own * flops / 3 : 0;
  if (projection > 0) schedule.flops[projection - 1] += early;
  schedule.flops.insert(schedule.flops.begin() + at, flops / 3 - early);
  schedule.backward.insert(schedule.backward.begin() + at, 0);
  auto& reductions = schedule.reductions;
  const auto last = std::ranges::find(reductions.rbegin(), reductions.rend(), unit,
                                      &paging::StepSchedule::Reduction::unit);
  ensure(last != reductions.rend(), "the unit is reduced");
  reductions.erase(std::next(last).base());
  for (auto& each : reductions) each.after += each.after >= projection ? 1 : 0;
  const auto behind =
      std::ranges::find_if(reductions, [&](const auto& each) { return each.after > projection; });
  reductions.insert(behind, {unit, projection});
}

/// The step at a stage, without prefetch.
paging::StepSchedule at_stage(const Options& options, const Recording& recording, int stage) {
  const auto config = config_at(options, stage);
  const partition::RankGrid grid{.hosts = options.hosts, .ranks_a_host = options.ranks_a_host};
  const auto layout = lay_out(recording.model, config, grid);
  const auto units = plan_units(layout, recording.model, config, {.grid = grid});
  auto step = planned_step(layout, units, recording.model, config, {.grid = grid});
  plan_look_up(step, recording.look_up);
  step.in_place =  // ranks of one host read units where they lie
      !options.own_memory() && options.hosts == 1 && options.offload_param == "none";
  auto schedule = recording.schedule;
  for (const auto& rows : step.rows) {
    if (rows.replaces == 0) paging::leave_out_first_use(schedule, rows.unit);
  }
  for (const auto& look_ups : step.look_ups) {
    const double own = step.sharded.parameters ? 1.0 / options.ranks() : 0;
    if (look_ups.replaces == 0) in_tiles(schedule, look_ups.unit, own);
  }
  schedule.units = unit_costs(step);
  const int64_t element_bytes = config.parameter_bytes();
  schedule.gathers = step.sharded.parameters && !step.in_place;
  schedule.reduces_in = step.sharded.gradients                      ? paging::ReducesIn::every_pass
                        : options.own_memory() || options.hosts > 1 ? paging::ReducesIn::last_pass
                                                                    : paging::ReducesIn::step;
  schedule.budget_bytes = options.live_parameters * element_bytes;
  schedule.prefetch_bytes = 0;
  schedule.read_ahead_bytes =
      config.offload_param.buffer_count * options.bucket_size / grid.ranks();
  return schedule;
}

/// A row of the table.
struct Row {
  int stage = 0;
  int64_t prefetch_bytes = 0;
  std::string ahead{};
  paging::SimulatedStep step;
  bool gathers = false;  ///< units, and does not read them where they lie
  Json json() const;
};

double ms(double seconds) { return seconds * 1e3; }

std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

Json Row::json() const {
  Json exposed = Json::object();
  Json moved = Json::object();
  for (size_t i = 0; i < paging::kResources; ++i) {
    const auto resource = static_cast<Resource>(i);
    if (resource != Resource::compute)
      exposed[std::string(paging::name(resource))] = ms(step.exposed[i]);
    moved[std::string(paging::name(resource))] = step.bytes[i];
  }
  return {{"stage", stage},
          {"prefetch_bytes", prefetch_bytes},
          {"step_ms", ms(step.seconds)},
          {"compute_ms", ms(step.busy[static_cast<size_t>(Resource::compute)])},
          {"exposed_ms", exposed},
          {"bytes", moved},
          {"gathered_bytes", step.live_bytes}};
}

std::vector<Row> simulate_all(const Options& options, const Recording& recording,
                              const paging::Speeds& speeds) {
  std::vector<Row> rows;
  for (const int stage : options.stages) {
    auto schedule = at_stage(options, recording, stage);
    rows.push_back({.stage = stage,
                    .ahead = stage == 3 ? "none" : "-",
                    .step = paging::simulate(schedule, speeds),
                    .gathers = schedule.gathers});
    if (stage < 3) continue;
    schedule.prefetch_bytes = options.prefetch_parameters * (options.dtype == "bf16" ? 2 : 4);
    schedule.prefetch_bytes =
        options.ahead ? *options.ahead : paging::choose_prefetch(schedule, speeds).prefetch_bytes;
    rows.push_back({.stage = stage,
                    .prefetch_bytes = schedule.prefetch_bytes,
                    .ahead = bytes(schedule.prefetch_bytes) + (options.ahead ? "" : ", chosen"),
                    .step = paging::simulate(schedule, speeds),
                    .gathers = schedule.gathers});
  }
  return rows;
}

void print(const std::vector<Row>& rows) {
  constexpr std::pair<Resource, const char*> kColumns[] = {{Resource::link, "link"},
                                                           {Resource::up, "up"},
                                                           {Resource::down, "down"},
                                                           {Resource::disk, "disk"},
                                                           {Resource::host, "host"}};
  fmt::print("\n{:<8} {:<18} {:>10} {:>10}  {:>8}", "stage", "ahead", "step ms", "compute",
             "exposed:");
  for (const auto& [resource, title] : kColumns) fmt::print(" {:>8}", title);
  fmt::print("  {:>10}\n", "gathered");
  for (const auto& row : rows) {
    fmt::print("{:<8} {:<18} {:>10.2f} {:>10.2f}  {:>8.2f}", row.stage, row.ahead,
               ms(row.step.seconds), ms(row.step.busy[static_cast<size_t>(Resource::compute)]),
               ms(row.step.exposed_seconds()));
    for (const auto& [resource, title] : kColumns)
      fmt::print(" {:>8.2f}", ms(row.step.exposed[static_cast<size_t>(resource)]));
    fmt::print("  {:>10}\n", row.gathers ? bytes(row.step.live_bytes) : "-");
  }
}

std::string situation(const Options& options, const Recording& recording,
                      const paging::StepSchedule& schedule) {
  const auto ranks =
      options.hosts == 1
          ? fmt::format("{} rank{}", options.ranks_a_host, options.ranks_a_host == 1 ? "" : "s")
          : fmt::format("{} ranks on {} hosts", options.ranks(), options.hosts);
  return fmt::format(
      "{} in {}, {:.1f} M parameters in {} units; {}; {} x {} tokens, {:.3g} TFLOP a rank",
      options.model, options.dtype, static_cast<double>(recording.elements) * 1e-6,
      schedule.units.size(), ranks, options.micro_batch * options.accumulate, options.seq,
      recording.flops() * 1e-12);
}

std::string speeds_in_words(const Options& options) {
  auto words = fmt::format("{}, compute {}", options.device, options.compute);
  for (const auto& [name, value] :
       {std::pair<const char*, const std::string&>{"link", options.link},
        {"PCIe", options.pcie},
        {"disk", options.disk},
        {"updates", options.update}}) {
    if (!value.empty()) words += fmt::format(", {} {}", name, value);
  }
  for (const auto& [name, value] :
       {std::pair<const char*, const std::string&>{"optimizer", options.offload_optimizer},
        {"parameters", options.offload_param}}) {
    if (value != "none") words += fmt::format("; {} at {}", name, value);
  }
  return words;
}

void write_picture(const Options& options, const std::string& title, const std::string& caption,
                   const std::vector<Row>& rows) {
  if (options.svg.empty()) return;
  std::vector<TimelineBand> bands;
  for (const auto& row : rows) {
    auto band = fmt::format("stage {}", row.stage);
    if (row.stage == 3)
      band += row.prefetch_bytes == 0
                  ? ", gathered on demand"
                  : fmt::format(", gathered up to {} ahead", bytes(row.prefetch_bytes));
    bands.push_back({fmt::format("{}: {:.1f} ms, {:.1f} of them exposed", band,
                                 ms(row.step.seconds), ms(row.step.exposed_seconds())),
                     row.step});
  }
  const auto picture = timeline_picture(title, caption, bands);
  write_file(options.svg, picture, fail<Error>);
}

}  // namespace

int timeline(const Arguments& arguments) {
  Options options;
  if (const auto status = read_command_line(arguments, options)) return *status;
  const auto speeds = speeds_of(options);
  install_host_allocator();
  const auto start = machine();
  const auto recording = record(options);
  const auto rows = simulate_all(options, recording, speeds);
  const auto stage = at_stage(options, recording, options.stages.front());
  const auto what = situation(options, recording, stage);
  const auto at = speeds_in_words(options);
  fmt::print("{}\nsimulated at: {}\n", what, at);
  print(rows);
  const auto& last = rows.back();
  if (last.gathers && !options.ahead) {
    fmt::print("\nstage3_prefetch_bucket_size {} ({}), stage3_max_live_parameters {} or more\n",
               last.prefetch_bytes / (options.dtype == "bf16" ? 2 : 4), bytes(last.prefetch_bytes),
               last.step.live_bytes / (options.dtype == "bf16" ? 2 : 4));
  }
  write_picture(options, "A step of training, simulated", what + "; " + at, rows);
  Json results = Json::array();
  for (const auto& row : rows) results.push_back(row.json());
  options.json.write("timeline", start,
                     {{"model", options.model},
                      {"dtype", options.dtype},
                      {"micro_batch", options.micro_batch},
                      {"seq", options.seq},
                      {"accumulate", options.accumulate},
                      {"hosts", options.hosts},
                      {"ranks_per_host", options.ranks_a_host},
                      {"offload_optimizer", options.offload_optimizer},
                      {"offload_param", options.offload_param},
                      {"device", options.device},
                      {"speeds",
                       {{"compute", speeds.compute},
                        {"link", speeds.link},
                        {"pcie", speeds.pcie},
                        {"disk", speeds.disk},
                        {"update", speeds.update},
                        {"link_work", speeds.link_work}}},
                      {"units", stage.units.size()},
                      {"parameters", recording.elements},
                      {"flops", recording.flops()}},
                     results);
  return 0;
}

}  // namespace zero::app::benchmarks
