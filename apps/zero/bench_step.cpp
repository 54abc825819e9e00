// `zero bench step`: what a training step costs beyond the computing.
//
// Note [Independent trainers]
// The tax of ZeRO is measured against as many trainers as there are ranks, which run at the same
// time on the same cores and do not communicate: each is one of the ranks' processes with an engine
// over a group of one. So both sides share the caches and the memory's bandwidth alike. A round
// runs the independent trainers and every stage once, the next begins one later in the list, and
// the tax is taken within a round, so that a drift of the machine's speed cancels.
//
// Part of a tax is not ZeRO's: whoever meets once a step waits for the slowest rank, and then all
// ranks want the memory's bandwidth for their updates at the same moment, where independent
// trainers drift apart and one computes while the other updates. `--lockstep` runs the independent
// trainers once more with a barrier after each step, which shows that part alone.
//
// Note [Time on a device]
// The host runs ahead of a device, so when a call returns says little. A device is waited for
// before the first of the timed steps and after the last, and a step's time is the mean of the
// run's. No step waits for another beside what the engine waits for itself, as in training.
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/zero/bench.h"
#include "apps/zero/offload_bound.h"
#include "apps/zero/ranks.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/device/deterministic.h"
#include "zero/device/memory.h"
#include "zero/device/stream.h"
#include "zero/engine/engine.h"
#include "zero/engine/flops_profiler.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/language/language_model.h"
#include "zero/models/layers/feed_forward.h"
#include "zero/models/layers/product_speed.h"
#include "zero/train/accounts.h"
#include "zero/train/device.h"
#include "zero/train/trainer.h"

namespace zero::app::benchmarks {
namespace {

constexpr const char* kDescription =
    "Times the training step of a GPT-2 at each stage, beside as many independent trainers as "
    "there are ranks, which run at\n"
    "the same time and do not communicate. The tokens are random: no data is needed.\n\n"
    "  zero bench step --model gpt2 --nproc 2 --micro-batch 1 --rounds 5\n\n"
    "Between hosts, started there by a launcher (docs/clusters.md), stage 3 can be run in ways "
    "that send less (--sharding).\n"
    "A round runs all of them in turn. Of each run the first --warmup steps are left out.\n"
    "  tok/s   of all ranks together, by the median step of each; the median of the rounds\n"
    "  tax     independent trainers' tok/s / the stage's, less 1: what the stage costs (below 0: "
    "gains); the median of the\n"
    "          rounds' taxes, and the least and the most\n"
    "  wait    share of the time in which a rank waits for other ranks: communication that does "
    "not "
    "overlap with computation\n"
    "  link MB what leaves each host in a step, in 10^6 bytes; on several hosts\n"
    "  CPU s   processor time of all ranks for one step\n"
    "  loss    of the last step, the mean over ranks: equal at all stages, or the work was not the "
    "same\n"
    "  maps    mappings that LibTorch's allocator asked of the system in the timed steps, of the "
    "rank with the most\n"
    "With --device, or with --mfu:\n"
    "  MFU      the matrix products of forward and backward, 6 FLOPs a multiply-accumulate of "
    "forward, over what the device\n"
    "           could have multiplied in the step's time, measured before\n"
    "  exposed  a step's ms less the independent trainers' in the round: communication that does "
    "not overlap with computation,\n"
    "           less what a rank saves because it updates only its share\n"
    "  device   the most that LibTorch's allocator of the device had given out, activations "
    "included\n"
    "A step's time is the mean of a run's on a device, since the host runs ahead of it.\n"
    "With --offload-optimizer or --offload-param, of a rank:\n"
    "  to the host, to the device, updates  what a step moves there, in 10^9 bytes, and the ms "
    "that "
    "this takes at the\n"
    "           speeds measured before, on the slowest rank, while all ranks do the same\n"
    "  bound    the longest of those and of the products, which is the least that a step can take, "
    "and a step beside it\n"
    "Memory is the peak of a rank by category, of the rank with the most; in parentheses what the "
    "formula of ZeRO says. The\n"
    "sum is the peak of all categories but activations, which another allocator counts, plus the "
    "peak of those.";

/// How stage 3 may run, with the ranks of a host.
constexpr std::pair<std::string_view, void (*)(Config&, int)> kSharding[] = {
    {"hybrid", [](Config& config, int local) { config.mics_shard_size = local; }},
    {"kept", [](Config& config, int local) { config.hpz_partition_size = local; }},
    {"quantised",
     [](Config& config, int local) {
       config.hpz_partition_size = local;
       config.quantised.weights = true;
       config.quantised.gradients = true;
     }},
};

constexpr std::pair<std::string_view, OffloadDevice> kPlaces[] = {
    {"none", OffloadDevice::none}, {"cpu", OffloadDevice::cpu}, {"nvme", OffloadDevice::nvme}};
constexpr std::pair<std::string_view, optim::StateFormat> kFormats[] = {
    {"fp32", optim::StateFormat::fp32},
    {"bf16", optim::StateFormat::bf16},
    {"8bit", optim::StateFormat::eight_bit}};

constexpr std::pair<std::string_view, TrainingDevice> kDevices[] = {
    {"cpu", TrainingDevice::cpu}, {"cuda", TrainingDevice::cuda}, {"any", TrainingDevice::any}};

constexpr std::pair<std::string_view, EpilogueUse> kEpilogues[] = {
    {"auto", EpilogueUse::where_faster},
    {"always", EpilogueUse::always},
    {"never", EpilogueUse::never}};

/// Returns the entry of one of the tables above; the name has been checked.
template <class Pairs>
auto named(const Pairs& pairs, std::string_view name) {
  return std::ranges::find(pairs, name, [](const auto& pair) { return pair.first; })->second;
}

struct Options {
  std::string model = "gpt2";
  std::string dtype = "fp32";
  int64_t micro_batch = 1;
  int64_t seq = 256;
  std::optional<int> nproc;
  int threads = 1;
  int64_t steps = 4;
  int64_t warmup = 2;
  int rounds = 5;
  std::vector<int> stages{0, 1, 2, 3};
  std::vector<std::string> sharding;  // of kSharding
  bool lockstep = false;
  bool deterministic = false;
  std::string epilogues = "auto";
  std::string device = "cpu";
  bool through_host = false;
  bool mfu = false;
  int64_t live_parameters = Config{}.max_live_parameters;
  int64_t bucket_size = Config{}.unit_bytes;
  std::string offload_optimizer = "none", offload_param = "none", nvme_path, states = "fp32";
  bool offload_gradients = false, delayed = false, in_backward = false, split = false;
  bool bf16_weights = false;
  bool offloads() const { return offload_optimizer != "none" || offload_param != "none"; }
  JsonFile json;
};

std::optional<int> read_command_line(const Arguments& arguments, Options& options) {
  OptionParser parser("bench step", kDescription);
  parser.add_option("--model", options.model,
                    "gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-nano, or a Hugging Face "
                    "config.json");
  parser.add_option("--dtype", options.dtype, "fp32, or bf16 or fp16 with fp32 master weights")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  parser.add_option("--micro-batch", options.micro_batch, "Sequences that a rank passes at a time")
      ->check(positive());
  parser.add_option("--seq", options.seq, "Tokens of a sequence")->check(positive());
  parser.add_option("-n,--nproc", options.nproc, "Ranks to start on this host [2]")->type_name("N");
  parser.add_option("--threads", options.threads, "Threads of each rank")->check(positive());
  parser.add_option("--steps", options.steps, "Timed steps of each run")->check(positive());
  parser.add_option("--warmup", options.warmup, "Steps before them")->check(positive());
  parser.add_option("--rounds", options.rounds, "Runs of each")->check(positive());
  parser.add_option("--stages", options.stages, "ZeRO stages")
      ->delimiter(',')
      ->check(CLI::Range(0, 3))
      ->default_str("0,1,2,3")
      ->type_name("STAGE,...");
  std::vector<std::string> ways;
  for (const auto& [name, set] : kSharding) ways.emplace_back(name);
  parser
      .add_option("--sharding", options.sharding,
                  "Ways in which stage 3 runs too, with R the ranks of a host: hybrid "
                  "(mics_shard_size R), kept (zero_hpz_partition_size R), quantised (kept, if R > "
                  "1, with quantised weights and gradients)")
      ->delimiter(',')
      ->check(CLI::IsMember(ways))
      ->type_name("WAY,...");
  parser.add_flag(
      "--lockstep", options.lockstep,
      "Also independent trainers that meet after each step and exchange nothing, and each "
      "stage's tax beside them, which is what ZeRO itself costs");
  parser.add_flag("--deterministic", options.deterministic,
                  "Use operators that give the same bits each time, on every device");
  std::vector<std::string> uses;
  for (const auto& [name, use] : kEpilogues) uses.emplace_back(name);
  parser
      .add_option("--epilogues", options.epilogues,
                  "Whether a device's products take in GELU and a bias's gradient, in bf16 and "
                  "fp16: where it should be faster (auto), always or never")
      ->check(CLI::IsMember(uses));
  parser
      .add_option("--bucket-size", options.bucket_size,
                  "Bytes that are gathered and reduced at once")
      ->check(positive());
  parser
      .add_option("--live-parameters", options.live_parameters,
                  "Stage 3: parameters that may be gathered at once")
      ->check(not_negative());
  const auto place = [&](const char* name, std::string& value, const char* what) {
    parser.add_option(name, value, what)->check(CLI::IsMember({"none", "cpu", "nvme"}));
  };
  place("--offload-optimizer", options.offload_optimizer,
        "Where the optimizer's states are: on the device, in the host's memory, or on a disk");
  place("--offload-param", options.offload_param,
        "Stage 3: where the parameters are between their uses. Independent trainers then run at "
        "stage 3 too, each alone");
  parser.add_option("--nvme-path", options.nvme_path, "Folder on a local disk, for nvme")
      ->type_name("DIR");
  parser.add_flag("--offload-gradients", options.offload_gradients,
                  "With --offload-optimizer nvme, from stage 2 on: gradients are on the disk too");
  parser.add_flag("--delayed-update", options.delayed,
                  "Updates run beside the next step (delayed_update_after 1)");
  parser.add_flag("--update-in-backward", options.in_backward,
                  "From stage 2 on, or on one rank at any stage: units are updated as their "
                  "gradients are reduced. Nothing is clipped then");
  parser.add_option("--optimizer-states", options.states, "Format of the optimizer's states")
      ->check(CLI::IsMember({"fp32", "bf16", "8bit"}));
  parser.add_flag("--split-master-weights", options.split,
                  "With bf16: a master weight's upper half is the parameter");
  parser.add_flag("--bf16-weights", options.bf16_weights,
                  "With bf16: no fp32 master weights, but stochastic rounding "
                  "(bf16_master_weights_and_grads)");
  std::vector<std::string> devices;
  for (const auto& [name, device] : kDevices) devices.emplace_back(name);
  parser
      .add_option("--device", options.device,
                  "cpu, cuda (each rank of a host takes the device of its number there), or any: "
                  "cuda where it can be used")
      ->check(CLI::IsMember(devices));
  parser.add_flag("--through-host", options.through_host,
                  "On a device: the hosts' memory carries the tensors, in place of NCCL");
  parser.add_flag("--mfu", options.mfu,
                  "Measure matrix products too, and print the table of MFU; a device's always is");
  options.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  std::vector<std::string> names;
  for (const int stage : options.stages) names.push_back(std::to_string(stage));
  check_distinct("--stages", names);
  check_distinct("--sharding", options.sharding);
  options.json.check();
  if ((options.split || options.bf16_weights) && options.dtype != "bf16") {
    throw ConfigError(fmt::format("{} needs --dtype bf16, and the dtype is {}.",
                                  options.split ? "--split-master-weights" : "--bf16-weights",
                                  options.dtype));
  }
  return std::nullopt;
}

/// The model's sizes. Throws ConfigError where it cannot take the sequences.
Gpt2Config model_of(const Options& options) {
  return Gpt2Config::from_json(model_for_sequences(options.model, options.seq)->to_json(),
                               options.model);
}

/// The independent trainers, those that meet after each step, or a stage.
struct Trainers {
  std::optional<int> stage{};
  bool lockstep = false;
  std::string sharding{};  // of kSharding
  std::string name() const {
    if (!sharding.empty()) return sharding;
    if (stage) return fmt::format("stage {}", *stage);
    return lockstep ? "lockstep" : "independent";
  }
};

/// The figures that one rank measured in one run.
struct Measurement {
  double step_seconds = 0;  ///< the median; on a device the mean
  double wait_share = 0;
  double cpu_seconds = 0;     ///< of a step
  double loss = 0;            ///< of the last step
  double link_megabytes = 0;  ///< that this rank sends to other hosts in a step
  int64_t system_requests = 0;
  int64_t parameters = 0;
  double mfu = 0;           ///< where products were measured
  double step_flops = 0;    ///< of the model's matrix products, forward and backward
  int64_t device_peak = 0;  ///< of the device's allocator
  OffloadWork offload;      ///< where states are off the device
  train::RankMemory memory;
};

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Batch {
  at::Tensor tokens, targets;  // (B, T)
};

std::vector<Batch> random_batches(const Options& options, int64_t vocabulary, int rank,
                                  c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank) + 1);
  std::vector<Batch> batches;
  for (int64_t i = 0; i < options.warmup + options.steps; ++i) {
    const auto text = at::randint(vocabulary, {options.micro_batch, options.seq + 1}, generator,
                                  at::TensorOptions(at::kLong));
    batches.push_back({text.narrow(1, 0, options.seq).contiguous().to(device),
                       text.narrow(1, 1, options.seq).contiguous().to(device)});
  }
  return batches;
}

Config engine_config(const Options& options, const Trainers& trainers, int local_size) {
  Config config;
  const auto param = named(kPlaces, options.offload_param);
  config.stage = trainers.stage.value_or(param == OffloadDevice::none ? 0 : 3);
  config.offload_optimizer.device = named(kPlaces, options.offload_optimizer);
  config.offload_param.device = config.stage == 3 ? param : OffloadDevice::none;
  config.offload_optimizer.nvme_path = config.offload_param.nvme_path = options.nvme_path;
  config.offload_optimizer.gradients = options.offload_gradients && config.stage >= 2;
  if (options.delayed) config.offload_optimizer.delayed_update_after = 1;
  config.optimizer_states = named(kFormats, options.states);
  config.split_master_weights = options.split;
  config.bf16_master_weights_and_grads = options.bf16_weights;
  config.update_in_backward = options.in_backward;
  if (options.in_backward) config.gradient_clipping = 0;
  config.bf16 = options.dtype == "bf16";
  config.fp16 = options.dtype == "fp16";
  config.seed_by_rank = true;
  config.unit_bytes = options.bucket_size;
  config.max_live_parameters = options.live_parameters;
  for (const auto& [name, set] : kSharding)
    if (name == trainers.sharding) set(config, local_size);
  config.validate();
  return config;
}

/// One run of one rank, whose device multiplies `products` FLOP/s; 0: not measured. Collective.
Measurement measure(const Options& options, const Gpt2Config& sizes, const Trainers& trainers,
                    const std::shared_ptr<comm::Group>& ranks, double products) {
  using Clock = std::chrono::steady_clock;
  HostAllocator::instance().trim();
  const auto group = trainers.stage ? ranks : comm::single();
  const auto device = ranks->device();
  const bool runs_ahead = is_asynchronous(device);
  const auto batches = random_batches(options, sizes.vocab_size, ranks->rank(), device);
  at::manual_seed(1);  // every rank and every run draws the same weights
  Gpt2 model(sizes);
  if (runs_ahead && !trainers.stage) model->to(device);  // others go where their group is
  if (runs_ahead) reset_peak_memory(device);
  Engine engine(model, train::kDefaultOptimizer,
                engine_config(options, trainers, group->local_size()), group);

  Measurement result;
  std::vector<double> seconds;
  at::Tensor last_loss;
  const auto step = [&](const Batch& batch) {
    const auto loss = model->loss(batch.tokens, batch.targets);
    engine.backward(loss);
    last_loss = loss.detach();
    engine.step();
    if (trainers.lockstep) ranks->barrier("the next step");
  };
  ranks->barrier("the first step");
  const auto timed = batches.begin() + options.warmup;
  for (auto batch = batches.begin(); batch != timed; ++batch) {
    std::optional<FlopsProfiler> profiler;
    if (products > 0 && batch == batches.begin()) profiler.emplace(model);
    step(*batch);
    if (!profiler) continue;
    profiler->stop();
    result.step_flops = 6 * static_cast<double>(profiler->profile().total.macs);
  }
  wait_for_device(device);

  const double waited = ranks->wait_ms();
  const auto sent = group->traffic().total().link_bytes;
  const auto exchanged = engine.host_traffic();
  const double computed = cpu_seconds();
  const auto requests = HostAllocator::instance().usage().system_requests;
  const auto begin = Clock::now();
  auto last = begin;
  for (auto batch = timed; batch != batches.end(); ++batch) {
    step(*batch);
    const auto now = Clock::now();
    seconds.push_back(std::chrono::duration<double>(now - last).count());
    last = now;
  }
  wait_for_device(device);
  if (runs_ahead) last = Clock::now();
  const double elapsed = std::chrono::duration<double>(last - begin).count();
  result.cpu_seconds = (cpu_seconds() - computed) / static_cast<double>(options.steps);
  result.wait_share = (ranks->wait_ms() - waited) * 1e-3 / elapsed;
  result.link_megabytes = static_cast<double>(group->traffic().total().link_bytes - sent) * 1e-6 /
                          static_cast<double>(options.steps);
  const auto steps = static_cast<double>(options.steps);
  result.offload = {
      .flops = result.step_flops,
      .down = static_cast<double>(engine.host_traffic().down - exchanged.down) / steps,
      .up = static_cast<double>(engine.host_traffic().up - exchanged.up) / steps,
      .update = static_cast<double>(engine.host_update_bytes())};
  result.system_requests = HostAllocator::instance().usage().system_requests - requests;
  result.step_seconds =
      runs_ahead ? elapsed / static_cast<double>(options.steps) : summarize(seconds).median;
  result.loss = last_loss.item<float>();
  if (products > 0) result.mfu = result.step_flops / (result.step_seconds * products);
  result.device_peak = device_memory(device).tensors.peak;
  result.parameters = engine.parameter_count();
  result.memory = train::collect_memory(engine)[static_cast<size_t>(group->rank())];
  ranks->barrier("the last step");  // nobody starts the next run before all have ended this one
  return result;
}

/// One run as its ranks saw it: means over them, where nothing else is said.
struct Run {
  Run(const Options& options, std::vector<Measurement> all) : ranks(std::move(all)) {
    const auto count = static_cast<double>(ranks.size());
    const auto tokens = static_cast<double>(options.micro_batch * options.seq);
    for (const auto& rank : ranks) {
      tokens_per_s += tokens / rank.step_seconds;
      step_ms += rank.step_seconds * 1e3 / count;
      wait_share += rank.wait_share / count;
      cpu_seconds += rank.cpu_seconds;
      link_megabytes += rank.link_megabytes;
      loss += rank.loss / count;
      mfu += rank.mfu / count;
      step_flops += rank.step_flops / count;
      device_peak = std::max(device_peak, rank.device_peak);
      system_requests = std::max(system_requests, rank.system_requests);
    }
  }
  std::vector<Measurement> ranks;
  double tokens_per_s = 0;  ///< of all ranks, as are the processor's seconds and the link's bytes
  double step_ms = 0, wait_share = 0, cpu_seconds = 0, link_megabytes = 0;
  double loss = 0, mfu = 0, step_flops = 0;
  int64_t device_peak = 0, system_requests = 0;  ///< of the rank with the most
};

/// The runs of the independent trainers or of a stage, by round.
struct Series {
  Trainers trainers;
  std::vector<Run> runs{};

  std::vector<double> each(double Run::*value) const {
    std::vector<double> values;
    for (const auto& run : runs) values.push_back(run.*value);
    return values;
  }
  Summary summary(double Run::*value) const { return summarize(each(value)); }
};

/// Returns what `stage` costs beside `reference`, by round.
Summary tax(const Series& reference, const Series& stage) {
  auto taxes = reference.each(&Run::tokens_per_s);
  const auto rates = stage.each(&Run::tokens_per_s);
  for (size_t i = 0; i < taxes.size(); ++i) taxes[i] = taxes[i] / rates[i] - 1;
  return summarize(taxes);
}

/// Returns the time of a step of `stage` beyond that of `reference`, by round.
Summary exposed_ms(const Series& reference, const Series& stage) {
  auto beyond = stage.each(&Run::step_ms);
  const auto reference_ms = reference.each(&Run::step_ms);
  for (size_t i = 0; i < beyond.size(); ++i) beyond[i] -= reference_ms[i];
  return summarize(beyond);
}

/// The series that ran: independent trainers first, and those in lockstep, if any, after them.
using AllSeries = std::vector<Series>;

/// The independent trainers, to whom everything else is compared.
const Series* independent_of(const AllSeries& all, const Series& series) {
  return series.trainers.stage || series.trainers.lockstep ? &all.front() : nullptr;
}

/// The trainers in lockstep, to whom a stage is compared; null if they did not run.
const Series* lockstep_of(const AllSeries& all, const Series& series) {
  return series.trainers.stage && all[1].trainers.lockstep ? &all[1] : nullptr;
}

constexpr Category kOrder[] = {Category::parameters,       Category::gradients,
                               Category::optimizer,        Category::gathered_units,
                               Category::gradient_buckets, Category::communication,
                               Category::activations};

std::optional<int64_t> formula(const train::RankMemory& memory, Category category) {
  return memory.formula[static_cast<size_t>(category)];
}

int64_t peak(const train::RankMemory& memory, Category category) {
  return memory.usage[static_cast<size_t>(category)].peak;
}

int64_t peak(const train::RankMemory& memory) {
  return memory.total.peak + peak(memory, Category::activations);
}

/// Returns the measurement with the highest peak over all runs and ranks.
const train::RankMemory& largest(const Series& series) {
  const auto* largest = &series.runs.front().ranks.front().memory;
  for (const auto& run : series.runs) {
    for (const auto& rank : run.ranks) {
      if (peak(rank.memory) > peak(*largest)) largest = &rank.memory;
    }
  }
  return *largest;
}

Json json_of(const train::RankMemory& memory) {
  Json json;
  for (const auto category : kOrder) {
    Json entry{{"peak", peak(memory, category)}};
    if (const auto bytes = formula(memory, category)) entry["formula"] = *bytes;
    json[std::string(name(category))] = entry;
  }
  json["total_peak"] = peak(memory);
  json["padding"] = memory.padding;
  return json;
}

/// The bound of a step, on the rank with the most to do.
OffloadBound bound_of(const Series& series, const OffloadSpeeds& speeds) {
  OffloadWork most;
  for (const auto& rank : series.runs.back().ranks) {
    for (const auto amount :
         {&OffloadWork::flops, &OffloadWork::down, &OffloadWork::up, &OffloadWork::update})
      most.*amount = std::max(most.*amount, rank.offload.*amount);
  }
  return {most, speeds};
}

Json json_of(const Series& series, const AllSeries& all) {
  const auto tax_beside = [&](const Series* reference) {
    return reference == nullptr ? Json() : tax(*reference, series).json();
  };
  const auto* const independent = independent_of(all, series);
  const auto& last = series.runs.back();
  const bool products = last.step_flops > 0;
  Json rounds = Json::array();
  for (const auto& run : series.runs) rounds.push_back({{"tokens_per_s", run.tokens_per_s}});
  return {{"run", series.trainers.name()},
          {"stage", series.trainers.stage ? Json(*series.trainers.stage) : Json()},
          {"sharding", series.trainers.sharding},
          {"tokens_per_s", series.summary(&Run::tokens_per_s).json()},
          {"step_ms", series.summary(&Run::step_ms).json()},
          {"tax", tax_beside(independent_of(all, series))},
          {"tax_beside_lockstep", tax_beside(lockstep_of(all, series))},
          {"wait_share", series.summary(&Run::wait_share).json()},
          {"link_megabytes_of_all_hosts", series.runs.back().link_megabytes},
          {"cpu_seconds_per_step", series.summary(&Run::cpu_seconds).json()},
          {"loss", series.runs.back().loss},
          {"system_requests", series.runs.back().system_requests},
          {"mfu", products ? series.summary(&Run::mfu).json() : Json()},
          {"flops_per_step", products ? Json(last.step_flops) : Json()},
          {"exposed_ms", independent ? exposed_ms(*independent, series).json() : Json()},
          {"device_peak", last.device_peak > 0 ? Json(last.device_peak) : Json()},
          {"memory", json_of(largest(series))},
          {"rounds", rounds}};
}

void print_speed(const AllSeries& all, int hosts) {
  const auto link = [&](std::string_view cell) {
    return hosts > 1 ? fmt::format(" {:>9}", cell) : "";
  };
  fmt::print("\n{:<12} {:>10} {:>10} {:>8}  {:<17} {:>6}{} {:>8} {:>9} {:>5}\n", "", "tok/s",
             "step ms", "tax", "least to most", "wait", link("link MB"), "CPU s", "loss", "maps");
  const auto tax_cells = [](const Series* reference, const Series& series) {
    if (reference == nullptr) return fmt::format("{:>8}  {:<17}", "-", "");
    const auto t = tax(*reference, series);
    return fmt::format("{:>+7.1f}%  {:<17}", 100 * t.median,
                       fmt::format("{:+.1f}% to {:+.1f}%", 100 * t.least, 100 * t.most));
  };
  for (const auto& series : all) {
    fmt::print("{:<12} {:>10.1f} {:>10.1f} {} {:>5.1f}%{} {:>8.2f} {:>9.5f} {:>5}\n",
               series.trainers.name(), series.summary(&Run::tokens_per_s).median,
               series.summary(&Run::step_ms).median, tax_cells(independent_of(all, series), series),
               100 * series.summary(&Run::wait_share).median,
               link(fmt::format("{:.1f}", series.runs.back().link_megabytes / hosts)),
               series.summary(&Run::cpu_seconds).median, series.runs.back().loss,
               series.runs.back().system_requests);
  }
  if (lockstep_of(all, all.back()) == nullptr) return;
  fmt::print("\n{:<12} {:>8}  {:<17}\n", "", "tax", "beside lockstep");
  for (const auto& series : all) {
    if (const auto* lockstep = lockstep_of(all, series))
      fmt::print("{:<12} {}\n", series.trainers.name(), tax_cells(lockstep, series));
  }
}

/// Prints the steps' speeds beside `products`, the FLOP/s that a rank's device reaches in matrix
/// products.
void print_products(const AllSeries& all, double products, c10::Device device) {
  fmt::print(
      "\nmatrix products of a rank: {:.4g} TFLOP/s at best, measured on {}; a step needs "
      "{:.4g} TFLOP\n{:<12} {:>8}  {:>10}  {:<20} {:>10}\n",
      products * 1e-12, device.is_cpu() ? "the CPU" : device.str(),
      all.front().runs.front().step_flops * 1e-12, "", "MFU", "exposed ms", "least to most",
      "device");
  for (const auto& series : all) {
    const auto* const independent = independent_of(all, series);
    std::string exposed = "-", spread;
    if (independent != nullptr) {
      const auto ms = exposed_ms(*independent, series);
      exposed = fmt::format("{:+.2f}", ms.median);
      spread = fmt::format("{:+.2f} to {:+.2f}", ms.least, ms.most);
    }
    const auto peak = series.runs.back().device_peak;
    fmt::print("{:<12} {:>7.1f}%  {:>10}  {:<20} {:>10}\n", series.trainers.name(),
               100 * series.summary(&Run::mfu).median, exposed, spread,
               peak > 0 ? format_bytes(static_cast<double>(peak)) : "-");
  }
}

/// Prints what a step asks of each resource, and which of them binds it.
void print_offload(const AllSeries& all, const OffloadSpeeds& speeds) {
  fmt::print(
      "\noffloading, a rank: {:.4g} TFLOP/s of products, {:.1f} GB/s to the host, {:.1f} GB/s to "
      "the "
      "device, {:.1f} GB/s of updates on the host\n{:<12} {:>10} {:>17} {:>17} {:>17} {:>10} {:>6} "
      " "
      "{}\n",
      speeds.products * 1e-12, speeds.down * 1e-9, speeds.up * 1e-9, speeds.update * 1e-9, "",
      "compute ms", "to the host", "to the device", "updates", "bound ms", "step", "bound by");
  for (const auto& series : all) {
    const auto bound = bound_of(series, speeds);
    std::string cells;
    for (const auto& resource : bound.resources) {
      cells +=
          &resource == bound.resources.data()
              ? fmt::format(" {:>10.1f}", 1e3 * resource.seconds())
              : fmt::format(" {:>17}", fmt::format("{:.3f} GB {:.1f} ms", resource.amount * 1e-9,
                                                   1e3 * resource.seconds()));
    }
    const double least = 1e3 * bound.binds().seconds();
    fmt::print("{:<12}{} {:>10.1f} {:>5.2f}x  {}\n", series.trainers.name(), cells, least,
               series.summary(&Run::step_ms).median / least, bound.binds().name);
  }
}

void print_memory(const AllSeries& all) {
  fmt::print("\npeak memory of a rank, formula beside\n{:<18}", "");
  for (const auto& series : all) fmt::print(" {:>25}", series.trainers.name());
  fmt::print("\n");
  const auto row = [&](std::string_view title, auto cell) {
    fmt::print("{:<18}", title);
    for (const auto& series : all) fmt::print(" {:>25}", cell(largest(series)));
    fmt::print("\n");
  };
  const auto bytes = [](int64_t n) { return format_bytes(static_cast<double>(n)); };
  for (const auto category : kOrder) {
    row(name(category), [&](const train::RankMemory& memory) {
      const auto expected = formula(memory, category);
      return bytes(peak(memory, category)) +
             (expected ? fmt::format(" ({})", bytes(*expected)) : "");
    });
  }
  row("sum", [&](const train::RankMemory& memory) { return bytes(peak(memory)); });
}

TrainingDevice device_of(const Options& options) {
  for (const auto& [name, device] : kDevices)
    if (name == options.device) return device;
  throw ConfigError(fmt::format("--device is '{}'; it may be cpu, cuda or any.", options.device));
}

/// FLOP/s of a rank, while all ranks multiply: of the slowest. Collective.
double measure_products(const Options& options, comm::Group& ranks) {
  ranks.barrier("measuring matrix products");
  const auto dtype = options.dtype == "bf16"   ? at::kBFloat16
                     : options.dtype == "fp16" ? at::kHalf
                                               : at::kFloat;
  double slowest = 0;
  for (const double each :
       comm::gather_records(ranks, best_product_speed(dtype, ranks.device()), "products"))
    slowest = slowest == 0 ? each : std::min(slowest, each);
  return slowest;
}

int run(const std::shared_ptr<comm::Group>& host, const Options& options) {
  at::set_num_threads(options.threads);
  const auto ranks =
      train::on_training_device(host, device_of(options), options.through_host,
                                [](std::string_view text) { fmt::print("{}\n", text); });
  const auto sizes = model_of(options);
  const bool reports = ranks->rank() == 0;
  const auto start = machine();
  const DeterministicOperators deterministic(options.deterministic);
  const Epilogues epilogues(named(kEpilogues, options.epilogues));
  if (reports) {
    fmt::print(
        "machine   {}\nmodel     {}, {} parameters, {}; micro-batch {}, sequence {}\n"
        "ranks     {}, each {} thread{}; {} rounds of {} steps after {} to warm up\n"
        "operators {}\n{}\n",
        describe(start), options.model, sizes.parameter_count(), options.dtype, options.micro_batch,
        options.seq, places_of(ranks->topology()), options.threads, options.threads == 1 ? "" : "s",
        options.rounds, options.steps, options.warmup,
        options.deterministic ? "the same bits each time (--deterministic)"
                              : "the fastest; on a GPU some may give other bits each time",
        options.offloads() ? fmt::format("states    the optimizer's at {}, parameters at {}\n",
                                         options.offload_optimizer, options.offload_param)
                           : "");
    std::fflush(stdout);
  }
  const bool with_products = options.mfu || options.offloads() || !ranks->device().is_cpu();
  const double products = with_products ? measure_products(options, *ranks) : 0;
  std::optional<OffloadSpeeds> speeds;
  if (options.offloads()) {
    const auto parameters = options.dtype == "bf16"   ? at::kBFloat16
                            : options.dtype == "fp16" ? at::kHalf
                                                      : at::kFloat;
    speeds = measure_offload(*ranks, train::kDefaultOptimizer, parameters, products);
  }
  AllSeries all{{Trainers{}}};
  if (options.lockstep) all.push_back({Trainers{.lockstep = true}});
  for (const int stage : options.stages) all.push_back({Trainers{.stage = stage}});
  for (const auto& sharding : options.sharding)
    all.push_back({Trainers{.stage = 3, .sharding = sharding}});
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      auto& series = all[(i + static_cast<size_t>(round)) % all.size()];
      const auto mine = measure(options, sizes, series.trainers, ranks, products);
      series.runs.emplace_back(options, comm::gather_records(*ranks, mine, "measurements"));
    }
    if (!reports) continue;
    fmt::print("round {}  ", round + 1);
    for (const auto& series : all) {
      fmt::print(" {} {:.1f}", series.trainers.name(), series.runs.back().tokens_per_s);
    }
    fmt::print(" tok/s\n");
    std::fflush(stdout);
  }
  comm::agree_on_rank_zero(*ranks, "Writing the results", [&] {
    print_speed(all, ranks->topology().hosts);
    if (with_products) print_products(all, products, ranks->device());
    if (speeds) print_offload(all, *speeds);
    print_memory(all);
    Json results = Json::array();
    for (const auto& series : all) {
      results.push_back(json_of(series, all));
      if (speeds) results.back()["offload"] = bound_of(series, *speeds).json();
    }
    options.json.write("step", start,
                       {{"model", options.model},
                        {"parameters", all.front().runs.front().ranks.front().parameters},
                        {"dtype", options.dtype},
                        {"micro_batch", options.micro_batch},
                        {"seq", options.seq},
                        {"ranks", ranks->size()},
                        {"hosts", ranks->topology().hosts},
                        {"threads", options.threads},
                        {"steps", options.steps},
                        {"warmup", options.warmup},
                        {"rounds", options.rounds},
                        {"lockstep", options.lockstep},
                        {"deterministic", options.deterministic},
                        {"epilogues", options.epilogues},
                        {"device", ranks->device().str()},
                        {"products_flop_per_s", with_products ? Json(products) : Json()},
                        {"offload_optimizer", options.offload_optimizer},
                        {"offload_param", options.offload_param},
                        {"offload_gradients", options.offload_gradients},
                        {"delayed_update", options.delayed},
                        {"update_in_backward", options.in_backward},
                        {"optimizer_states", options.states},
                        {"split_master_weights", options.split},
                        {"bf16_weights", options.bf16_weights},
                        {"offload_speeds", speeds ? speeds->json() : Json()},
                        {"bucket_size", options.bucket_size},
                        {"live_parameters", options.live_parameters}},
                       results);
  });
  return 0;
}

}  // namespace

int step(const Arguments& arguments) {
  Options options;
  if (const auto status = read_command_line(arguments, options)) return *status;
  const auto ranks = choose_ranks(options.nproc, 2);
  (void)model_of(options);
  return run_on_ranks(ranks, {"bench", "step"}, arguments,
                      [&](const auto& group) { return run(group, options); });
}

}  // namespace zero::app::benchmarks
