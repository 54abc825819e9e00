#include "zero/planner/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>

#include "zero/base/error.h"
#include "zero/engine/costs.h"
#include "zero/engine/plan.h"

namespace zero::plan {
namespace {

// A device's context, its libraries, and what its allocator's fragments cost.
constexpr double kContext = 1e9;
constexpr double kFragments = 0.03;

double usable(const Device& device) {
  return device.cpu ? device.memory : device.memory * (1 - kFragments) - kContext;
}

std::string bytes(double count) { return format_bytes(count); }

/// A way to place states.
struct Way {
  int stage = 0;
  OffloadDevice optimizer = OffloadDevice::none;
  OffloadDevice parameters = OffloadDevice::none;
  bool eight_bit = false;
  enum class Across : uint8_t { all, kept, blocks, quantised } across = Across::all;
};

std::vector<Way> ways(const Question& question) {
  using enum OffloadDevice;
  const auto& cluster = question.cluster;
  const bool several = cluster.hosts > 1 && cluster.per_host > 1;
  const bool disk = cluster.nvme > 0;
  std::vector<Way> all;
  const int most = cluster.ranks() > 1 ? 3 : 0;
  for (int stage = 0; stage <= most; ++stage) {
    for (const auto place : {none, cpu, nvme}) {
      if (place == nvme && !disk) continue;
      if (place == cpu && cluster.device.cpu) continue;
      for (const bool eight_bit : {false, true}) {
        // On a GPU only the host updates states in 8 bits: engine/on_device.cpp.
        if (eight_bit && ((place == none) != cluster.device.cpu ||
                          !std::holds_alternative<AdamW>(question.optimizer)))
          continue;
        all.push_back({.stage = stage, .optimizer = place, .eight_bit = eight_bit});
      }
    }
  }
  // Parameters below the device need stage 3, which one rank can have too.
  if (!cluster.device.cpu) all.push_back({.stage = 3, .optimizer = cpu, .parameters = cpu});
  if (disk) all.push_back({.stage = 3, .optimizer = nvme, .parameters = nvme});
  if (several) {
    for (const auto across : {Way::Across::kept, Way::Across::blocks, Way::Across::quantised}) {
      // GPUs send no quantised messages yet: engine/on_device.cpp.
      if (across == Way::Across::quantised && !cluster.device.cpu) continue;
      all.push_back({.stage = 3, .across = across});
    }
  }
  return all;
}

Config config_of(const Question& question, const Way& way, int64_t accumulation) {
  const auto& cluster = question.cluster;
  Config config;
  config.stage = way.stage;
  config.bf16 = question.bf16 && cluster.device.bf16;
  config.fp16 = question.bf16 && !cluster.device.bf16;
  config.gradient_accumulation_steps = accumulation;
  config.optimizer = question.optimizer;
  config.offload_optimizer.device = way.optimizer;
  config.offload_param.device = way.parameters;
  if (way.eight_bit) config.optimizer_states = optim::StateFormat::eight_bit;
  if (way.across == Way::Across::kept || way.across == Way::Across::quantised)
    config.hpz_partition_size = cluster.per_host;
  if (way.across == Way::Across::blocks) config.mics_shard_size = cluster.per_host;
  if (way.across == Way::Across::quantised)
    config.quantised.weights = config.quantised.gradients = true;
  return config;
}

partition::RankGrid grid_of(const Config& config, const Cluster& cluster) {
  return {.hosts = cluster.hosts,
          .ranks_a_host = cluster.per_host,
          .shards = config.mics_shard_size > 0 ? config.mics_shard_size : cluster.ranks()};
}

// Returns whether it is plain data parallelism.
bool plain(const Candidate& c) {
  return c.config.stage == 0 && c.config.offload_optimizer.device == OffloadDevice::none &&
         c.config.offload_param.device == OffloadDevice::none &&
         c.config.optimizer_states == optim::StateFormat::fp32;
}

/// Traces, each made once.
class Traces {
 public:
  explicit Traces(const Question& question) : question_(question) {}
  const Trace& of(const Config& config, int64_t micro_batch, int64_t recompute) {
    const auto options = trace_options(config, question_.cluster.device.cpu);
    auto& trace = all_[{micro_batch, recompute, options.gradients_apart}];
    if (!trace) trace = std::make_unique<Trace>(question_.trace(micro_batch, recompute, options));
    return *trace;
  }

 private:
  const Question& question_;
  std::map<std::tuple<int64_t, int64_t, bool>, std::unique_ptr<Trace>> all_;
};

void judge(Candidate& candidate, const Cluster& cluster) {
  const auto& memory = candidate.memory;
  const auto ranks = static_cast<double>(cluster.per_host);
  const auto device = static_cast<double>(memory.device);
  const auto host = static_cast<double>(memory.host);
  const auto lack = [](double need, double has) { return std::max(0.0, need - has); };
  if (cluster.device.cpu) {
    candidate.host_lacks = lack((device + host) * ranks, cluster.host_memory);
  } else {
    candidate.device_lacks = lack(device, usable(cluster.device));
    candidate.host_lacks = lack(host * ranks, cluster.host_memory);
  }
  candidate.disk_lacks =
      lack(static_cast<double>(memory.disk) * ranks, cluster.nvme > 0 ? cluster.nvme_bytes : 0);
}

void measure(Candidate& candidate, const Question& question, const Trace& trace, double flops) {
  const auto& cluster = question.cluster;
  candidate.time = simulate(trace, candidate.config, cluster, /*split=*/false);
  const auto tokens = static_cast<double>(question.global_batch * question.sequence);
  candidate.tokens_per_second = tokens / candidate.time.seconds;
  const double peak = question.bf16 ? cluster.device.flops : cluster.device.flops_fp32;
  // `flops` are those of a sequence, forward and backward.
  candidate.mfu = flops * static_cast<double>(question.global_batch) /
                  (candidate.time.seconds * peak * static_cast<double>(cluster.ranks()));
}

std::vector<int64_t> micro_batches(const Question& question) {
  const int64_t ranks = question.cluster.ranks();
  if (question.global_batch % ranks != 0 || question.global_batch < ranks) {
    throw ConfigError(fmt::format(
        "The global batch of {} sequences cannot be divided over {} ranks. Give a multiple of {}.",
        question.global_batch, ranks, ranks));
  }
  const int64_t of_rank = question.global_batch / ranks;
  std::vector<int64_t> all;
  for (int64_t micro = 1; micro <= std::min(of_rank, question.most_micro_batch); micro *= 2) {
    if (of_rank % micro == 0) all.push_back(micro);
  }
  return all;
}

/// All candidates of a question with their memory; times follow.
struct Table {
  Table(const Question& question, Traces& traces) : question(question), traces(traces) {}

  void fill() {
    const auto sizes = micro_batches(question);
    const int64_t of_rank = question.global_batch / question.cluster.ranks();
    for (const auto& way : ways(question)) {
      for (const int64_t recompute : {0, 1}) {
        if (recompute > 0 && !question.recomputes) continue;
        for (const int64_t micro : sizes) {
          auto candidate = make(way, micro, of_rank / micro, recompute);
          const bool fits = candidate.fits();
          all.push_back(std::move(candidate));
          if (!fits) break;  // a larger micro-batch does not fit either
        }
      }
    }
  }

  Candidate make(const Way& way, int64_t micro, int64_t accumulation, int64_t recompute) {
    Candidate candidate{.config = config_of(question, way, accumulation),
                        .ranks = question.cluster.ranks(),
                        .micro_batch = micro,
                        .recompute = recompute};
    const auto& trace = traces.of(candidate.config, micro, recompute);
    candidate.memory =
        predict_memory(trace, candidate.config, grid_of(candidate.config, question.cluster));
    judge(candidate, question.cluster);
    return candidate;
  }

  // Times are computed for those that fit: of each way the two largest micro-batches, with and
  // without recomputation. Smaller ones repeat the same messages more often.
  void measure_all() {
    std::map<std::pair<std::string, int64_t>, std::vector<Candidate*>> of_way;
    for (auto& candidate : all) {
      if (!candidate.fits()) continue;
      auto alike = candidate;
      alike.config.gradient_accumulation_steps = 1;
      of_way[{alike.config.dump(), candidate.recompute}].push_back(&candidate);
    }
    for (auto& [way, list] : of_way) {
      const size_t first = list.size() > 2 ? list.size() - 2 : 0;
      for (size_t i = first; i < list.size(); ++i) time(*list[i]);
    }
    std::erase_if(all, [](const Candidate& c) { return c.fits() && c.time.seconds == 0; });
  }

  void time(Candidate& candidate) {
    const auto& trace = traces.of(candidate.config, candidate.micro_batch, candidate.recompute);
    const auto& plain = traces.of(candidate.config, candidate.micro_batch, 0);
    measure(candidate, question, trace, plain.flops() / static_cast<double>(candidate.micro_batch));
  }

  void sort() {
    const auto lacks = [](const Candidate& c) {
      return c.device_lacks + c.host_lacks + c.disk_lacks;
    };
    std::ranges::stable_sort(all, [&](const Candidate& a, const Candidate& b) {
      if (a.fits() != b.fits()) return a.fits();
      return a.fits() ? a.tokens_per_second > b.tokens_per_second : lacks(a) < lacks(b);
    });
    if (all.empty() || !all.front().fits()) return;
    // Fewer bits change results, which a tenth of the time is worth.
    const double most = all.front().tokens_per_second;
    const auto rounds = [](const Candidate& c) {
      return c.config.optimizer_states != optim::StateFormat::fp32 || c.config.quantised.any();
    };
    const auto exact =
        std::ranges::find_if(all, [&](const Candidate& c) { return c.fits() && !rounds(c); });
    const double of_exact = exact == all.end() ? 0 : exact->tokens_per_second;
    const double fast = 0.98 * (of_exact > 0.9 * most ? of_exact : most);
    const auto key = [&](const Candidate& c) {
      return std::tuple(!c.fits() ||
                            c.tokens_per_second<fast, rounds(c), c.config.stage, c.recompute,
                                                c.config.hpz_partition_size> 1 ||
                            c.config.mics_shard_size > 0,
                        c.memory.device);
    };
    const auto best = std::ranges::min_element(all, {}, key);
    std::rotate(all.begin(), best, best + 1);
  }

  void split_times(size_t most) {
    for (size_t i = 0; i < all.size() && all[i].fits(); ++i) {
      const auto& c = all[i];
      if (i >= most && !plain(c)) continue;
      all[i].time =
          simulate(traces.of(c.config, c.micro_batch, c.recompute), c.config, question.cluster);
    }
  }

  void answer(size_t split) {
    fill();
    measure_all();
    sort();
    split_times(split);
  }

  const Question& question;
  Traces& traces;
  std::vector<Candidate> all;
};

// --- Sentences ---

const Candidate* fastest(const std::vector<Candidate>& all, auto&& suits) {
  const Candidate* best = nullptr;
  for (const auto& candidate : all) {
    if (!candidate.fits() || !suits(candidate)) continue;
    if (best == nullptr || candidate.tokens_per_second > best->tokens_per_second) best = &candidate;
  }
  return best;
}

struct Part {
  double seconds;
  const char* name;
  const char* why;
};

std::array<Part, 6> parts(const StepTime& time) {
  return {{{time.compute, "compute", "the devices' products"},
           {time.gather, "gathers", "operators wait for parameters on the links"},
           {time.reduce, "reductions", "gradients wait for the links"},
           {time.offload, "copies between device and host", "PCIe is slower than the step"},
           {time.update, "the update", "the optimizer's states are read and written"},
           {time.disk, "the disk", "states wait for the disk"}}};
}

// Returns why `fast` is faster than `slow`: the part of the step that differs most.
std::string_view advantage(const StepTime& fast, const StepTime& slow) {
  constexpr std::array<std::string_view, 6> kWhy{
      "since it computes more at a time",      "since it gathers less",
      "since it sends less for the gradients", "since less is copied to and from the host",
      "since ranks share the update",          "since the disk has less to do"};
  const auto of_fast = parts(fast);
  const auto of_slow = parts(slow);
  size_t most = 0;
  for (size_t i = 1; i < kWhy.size(); ++i) {
    if (of_slow[i].seconds - of_fast[i].seconds > of_slow[most].seconds - of_fast[most].seconds)
      most = i;
  }
  return kWhy[most];
}

// Nothing fits: says why the nearest candidate does not.
std::string nothing_fits(const Answer& answer, const Question& question) {
  const auto& cluster = question.cluster;
  const auto& nearest = answer.candidates.front();
  auto sentence =
      fmt::format("Nothing fits on {} device{}", cluster.ranks(), cluster.ranks() == 1 ? "" : "s");
  const auto activations = static_cast<double>(nearest.memory.of(Category::activations));
  if (activations > 0.8 * usable(cluster.device)) {
    return sentence +
           fmt::format(
               ": activations alone take {} of each, which ZeRO does not share. Recompute "
               "layers, or use shorter sequences or a device with more memory.",
               bytes(activations));
  }
  const auto host = std::ranges::find_if(answer.candidates, [](const Candidate& c) {
    return c.device_lacks == 0 && c.host_lacks > 0;
  });
  if (host != answer.candidates.end())
    sentence += fmt::format("; with states on the host each host lacks {} of memory",
                            bytes(host->host_lacks));
  return sentence + fmt::format(". The nearest is {}.", nearest.words());
}

std::string zero_or_not(const Answer& answer, const Question& question) {
  const auto& cluster = question.cluster;
  const auto* alone = fastest(answer.candidates, [](const Candidate& c) { return plain(c); });
  const bool any = !answer.candidates.empty() && answer.candidates.front().fits();
  constexpr double kStates = 16;  // bytes a parameter, in fp32 as in bf16
  const double states = kStates * static_cast<double>(answer.trained);
  if (!any) return nothing_fits(answer, question);
  const auto& best = answer.candidates.front();
  if (cluster.ranks() == 1) {
    if (alone != nullptr)
      return fmt::format(
          "ZeRO is not needed: one device has nobody to share with, and the model fits on it ({} "
          "of "
          "{}).",
          bytes(static_cast<double>(alone->memory.device)), bytes(cluster.device.memory));
    return fmt::format(
        "One device has nobody to share with, so ZeRO's stages do nothing here; the states of {} "
        "go "
        "to {}.",
        bytes(states),
        best.config.offload_optimizer.device == OffloadDevice::nvme ||
                best.config.offload_param.device == OffloadDevice::nvme
            ? "the disk (ZeRO-Infinity)"
        : best.config.offload_optimizer.device == OffloadDevice::cpu
            ? "the host's memory (ZeRO-Offload)"
            : "fewer bits (8-bit states)");
  }
  const double frozen = 1 - static_cast<double>(answer.trained) /
                                static_cast<double>(std::max<int64_t>(1, answer.parameters));
  if (alone != nullptr) {
    const double gain = best.tokens_per_second / alone->tokens_per_second;
    return fmt::format(
        "ZeRO is not needed: plain data parallelism (stage 0) fits ({} of {} on each device{}), "
        "{}.",
        bytes(static_cast<double>(alone->memory.device)), bytes(cluster.device.memory),
        frozen > 0.5 ? fmt::format("; {:.1f} % of the parameters are frozen and have no states",
                                   100 * frozen)
                     : std::string(),
        gain < 1.02 ? std::string("and is as fast as any stage")
                    : fmt::format("though {} would be {:.2f} times as fast, {}", best.words(), gain,
                                  advantage(best.time, alone->time)));
  }
  if (frozen > 0.5) {
    return fmt::format(
        "ZeRO-3 is needed for the parameters alone: {:.0f} % of them are frozen and have no "
        "states, "
        "so stages 1 and 2 save little.",
        100 * frozen);
  }
  const auto& plain_one = std::ranges::find_if(
      answer.candidates, [](const Candidate& c) { return plain(c) && c.recompute > 0; });
  const bool activations = plain_one != answer.candidates.end() &&
                           static_cast<double>(plain_one->memory.of(Category::activations)) >
                               0.5 * static_cast<double>(plain_one->memory.device);
  return fmt::format(
      "ZeRO is needed: plain data parallelism lacks {} on each device{}.",
      plain_one != answer.candidates.end()
          ? bytes(plain_one->device_lacks +
                  plain_one->host_lacks / static_cast<double>(cluster.per_host))
          : std::string("memory"),
      activations ? ", most of it for activations, which ZeRO does not share: shorter sequences "
                    "would help more"
                  : "");
}

std::string binds(const Candidate& best) {
  const auto all = parts(best.time);
  const auto& most = *std::ranges::max_element(all, {}, &Part::seconds);
  return fmt::format("The step of {:.3g} s is bound by {} ({:.0f} % of it: {}).", best.time.seconds,
                     most.name, 100 * most.seconds / best.time.seconds, most.why);
}

std::string helps(const Table& table, const Candidate& best) {
  struct Change {
    const char* name;
    void (*apply)(Cluster&);
  };
  constexpr std::array kChanges{
      Change{"devices that compute twice as fast",
             [](Cluster& c) {
               c.device.flops *= 2;
               c.device.flops_fp32 *= 2;
             }},
      Change{"memory of the devices twice as fast", [](Cluster& c) { c.device.bandwidth *= 2; }},
      Change{"links inside a host twice as fast", [](Cluster& c) { c.inside.bandwidth *= 2; }},
      Change{"a network twice as fast", [](Cluster& c) { c.between.bandwidth *= 2; }},
      Change{"PCIe twice as fast", [](Cluster& c) { c.device.pcie *= 2; }},
      Change{"updates on the host twice as fast", [](Cluster& c) { c.host_update *= 2; }},
      Change{"disks twice as fast", [](Cluster& c) { c.nvme *= 2; }}};
  const auto& trace = table.traces.of(best.config, best.micro_batch, best.recompute);
  const Change* most = nullptr;
  double gain = 1;
  for (const auto& change : kChanges) {
    auto cluster = table.question.cluster;
    change.apply(cluster);
    const double faster = best.time.seconds / simulate(trace, best.config, cluster, false).seconds;
    if (faster <= gain) continue;
    gain = faster;
    most = &change;
  }
  auto sentence = most == nullptr ? std::string("No single part of the machine binds it.")
                                  : fmt::format(
                                        "On the machine, {} would help most: {:.2f} times "
                                        "as many tokens a second.",
                                        most->name, gain);
  const auto* other =
      fastest(table.all, [&](const Candidate& c) { return c.config.stage != best.config.stage; });
  if (other != nullptr) {
    sentence += fmt::format(" Of other configurations, {} comes next, with {:.2f} of its speed.",
                            other->words(), other->tokens_per_second / best.tokens_per_second);
  }
  return sentence;
}

// The bytes of a parameter at stage 3 with everything of a kind on one tier.
std::string largest_model(const Question& question) {
  const auto& c = question.cluster;
  const auto n = static_cast<double>(c.ranks());
  const partition::StateBytes of =
      question.bf16 ? partition::StateBytes{} : partition::StateBytes{4, 4, 8};
  const double all = static_cast<double>(of.parameter + of.gradient + of.optimizer);
  const double device =
      (c.device.cpu ? c.host_memory / static_cast<double>(c.per_host) : usable(c.device));
  const auto billions = [](double parameters) {
    return parameters < 1e12 ? fmt::format("{:.3g} B", parameters / 1e9)
                             : fmt::format("{:.3g} T", parameters / 1e12);
  };
  auto sentence = fmt::format("By states alone the cluster holds {} parameters at stage 0",
                              billions(device / all));
  if (c.ranks() > 1) sentence += fmt::format(" and {} at stage 3", billions(device / all * n));
  if (!c.device.cpu)
    sentence += fmt::format(", {} with states in the hosts' memory",
                            billions(c.host_memory * static_cast<double>(c.hosts) / all));
  if (c.nvme > 0)
    sentence += fmt::format(", {} with states on disk",
                            billions(c.nvme_bytes * static_cast<double>(c.hosts) / all));
  return sentence + "; activations come on top.";
}

std::string fewest_devices(const Question& question, Traces& traces) {
  constexpr int64_t kMost = 1 << 16;
  auto asked = question;
  const auto try_on = [&](int64_t hosts, int64_t per_host) -> std::optional<Candidate> {
    asked.cluster.hosts = hosts;
    asked.cluster.per_host = per_host;
    asked.global_batch = asked.cluster.ranks();
    Table table(asked, traces);
    for (const auto place : {OffloadDevice::none, OffloadDevice::cpu}) {
      if (place == OffloadDevice::cpu && question.cluster.device.cpu) continue;
      auto candidate =
          table.make({.stage = asked.cluster.ranks() > 1 || place != OffloadDevice::none ? 3 : 0,
                      .optimizer = place,
                      .parameters = place},
                     1, 1, question.recomputes ? 1 : 0);
      if (candidate.fits()) return candidate;
    }
    return std::nullopt;
  };
  const int64_t usual = question.cluster.per_host;
  for (int64_t devices = 1; devices <= kMost; devices *= 2) {
    const int64_t per_host = std::min(devices, usual);
    if (devices % per_host != 0) continue;
    if (const auto found = try_on(devices / per_host, per_host)) {
      return fmt::format("The fewest devices that hold this model are {}{}: {}.", devices,
                         devices > per_host ? fmt::format(" on {} hosts", devices / per_host) : "",
                         found->words());
    }
  }
  return fmt::format(
      "No number of devices up to {} holds this model: what one rank needs for a micro-batch of "
      "one "
      "sequence is larger than a device.",
      kMost);
}

}  // namespace

Tracer tracer(const LanguageModelConfig& model, int64_t sequence) {
  return [&model, sequence](int64_t batch, int64_t recompute, const TraceOptions& options) {
    return trace(model, batch, sequence, recompute, options);
  };
}

std::string Candidate::words() const {
  std::string all = fmt::format("stage {}", config.stage);
  const auto place = [](OffloadDevice device) {
    return device == OffloadDevice::cpu ? "host" : "disk";
  };
  const auto optimizer = config.offload_optimizer.device;
  const auto parameters = config.offload_param.device;
  if (parameters != OffloadDevice::none) {
    all += fmt::format(", all states on the {}", place(parameters));
  } else if (optimizer != OffloadDevice::none) {
    all += fmt::format(", optimizer on the {}", place(optimizer));
  }
  if (config.optimizer_states == optim::StateFormat::eight_bit) all += ", 8-bit states";
  if (config.quantised.any()) {
    all += ", ZeRO++";
  } else if (config.hpz_partition_size > 1) {
    all += ", hpZ";
  }
  if (config.mics_shard_size > 0) all += fmt::format(", MiCS {}", config.mics_shard_size);
  if (recompute > 0) all += ", recomputed";
  return all +
         fmt::format(", micro-batch {} x {}", micro_batch, config.gradient_accumulation_steps);
}

const Candidate& Answer::best() const {
  if (candidates.empty()) throw Error("The plan has no candidates: there was nothing to try.");
  return candidates.front();
}

Answer plan(const Question& question) {
  constexpr size_t kSplit = 24;
  Traces traces(question);
  Table table(question, traces);
  table.answer(kSplit);
  Answer answer;
  const auto& trace = table.traces.of(table.all.front().config, 1, 0);
  answer.bounds = trace.bounds;
  answer.parameters = trace.parameters();
  for (const auto& parameter : trace.model.parameters)
    answer.trained += parameter.trainable ? parameter.numel() : 0;
  answer.candidates = table.all;
  answer.zero_or_not = zero_or_not(answer, question);
  if (answer.best().fits()) {
    answer.binds = binds(answer.best());
    answer.helps = helps(table, answer.best());
  } else {
    const auto& nearest = answer.best();
    answer.binds = fmt::format(
        "The nearest configuration lacks {} on each device, {} of host memory and {} of disk.",
        bytes(nearest.device_lacks), bytes(nearest.host_lacks), bytes(nearest.disk_lacks));
  }
  answer.largest_model = largest_model(question);
  answer.fewest_devices = fewest_devices(question, traces);
  return answer;
}

std::vector<ScalePoint> scale(const Question& question, int64_t first, int64_t last) {
  const int64_t usual = question.cluster.per_host;
  const int64_t of_rank = std::max<int64_t>(1, question.global_batch / question.cluster.ranks());
  std::vector<ScalePoint> points;
  Traces traces(question);
  for (int64_t ranks = first; ranks <= last; ranks *= 2) {
    auto asked = question;
    asked.cluster.per_host = std::min(ranks, usual);
    asked.cluster.hosts = ranks / asked.cluster.per_host;
    asked.global_batch = of_rank * asked.cluster.ranks();
    Table table(asked, traces);
    table.answer(1);
    ScalePoint point{.ranks = asked.cluster.ranks(), .best = table.all.front()};
    point.fits = point.best.fits();
    const auto reference = std::ranges::find_if(points, &ScalePoint::fits);
    const double mine = point.best.tokens_per_second / static_cast<double>(point.ranks);
    point.efficiency =
        !point.fits ? 0
        : reference == points.end()
            ? 1
            : mine / (reference->best.tokens_per_second / static_cast<double>(reference->ranks));
    points.push_back(std::move(point));
  }
  return points;
}

std::string ds_config(const Candidate& candidate, const std::string& nvme_path) {
  using Json = nlohmann::ordered_json;
  const auto& config = candidate.config;
  const auto place = [&](OffloadDevice device) {
    Json section = {{"device", device == OffloadDevice::cpu ? "cpu" : "nvme"}};
    if (device == OffloadDevice::nvme) section["nvme_path"] = nvme_path;
    return section;
  };
  Json zero = {{"stage", config.stage}};
  if (config.offload_optimizer.device != OffloadDevice::none)
    zero["offload_optimizer"] = place(config.offload_optimizer.device);
  if (config.offload_param.device != OffloadDevice::none)
    zero["offload_param"] = place(config.offload_param.device);
  if (config.hpz_partition_size > 1) zero["zero_hpz_partition_size"] = config.hpz_partition_size;
  if (config.mics_shard_size > 0) zero["mics_shard_size"] = config.mics_shard_size;
  if (config.quantised.weights) zero["zero_quantized_weights"] = true;
  if (config.quantised.gradients) zero["zero_quantized_gradients"] = true;
  Json file = {{"train_batch_size",
                candidate.micro_batch * config.gradient_accumulation_steps * candidate.ranks},
               {"train_micro_batch_size_per_gpu", candidate.micro_batch},
               {"gradient_accumulation_steps", config.gradient_accumulation_steps},
               {"zero_optimization", zero}};
  if (config.bf16) file["bf16"] = {{"enabled", true}};
  if (config.fp16) file["fp16"] = {{"enabled", true}};
  if (config.optimizer_states == optim::StateFormat::eight_bit)
    file["data_types"] = {{"optimizer_state_dtype", "8bit"}};
  if (candidate.recompute > 0) file["activation_checkpointing"] = {{"every", candidate.recompute}};
  return file.dump(2) + "\n";
}

}  // namespace zero::plan
