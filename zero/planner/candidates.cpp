#include "zero/planner/candidates.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/engine/costs.h"
#include "zero/engine/plan_units.h"
#include "zero/optim/operators.h"

namespace zero::plan {
namespace {

// Updates before the first delayed one: ZeRO-Offload's paper.
constexpr int64_t kDelayAfter = 40;

Config config_of(const Question& question, const Way& way, int64_t accumulation) {
  const auto& cluster = question.cluster;
  Config config;
  config.stage = way.stage;
  config.bf16 = question.bf16 && cluster.device.bf16;
  config.fp16 = question.bf16 && !cluster.device.bf16;
  config.autocast.enabled = question.autocast.has_value();
  if (question.autocast && (question.autocast == at::kHalf || !cluster.device.bf16))
    config.autocast.dtype = AutocastDtype::fp16;
  config.gradient_accumulation_steps = accumulation;
  config.optimizer = question.optimizer;
  config.offload_optimizer.device = way.optimizer;
  config.offload_param.device = way.parameters;
  if (way.eight_bit) config.optimizer_states = optim::StateFormat::eight_bit;
  if (way.across == Way::Across::kept || way.across == Way::Across::quantised)
    config.hpz_partition_size = cluster.per_host;
  if (way.across == Way::Across::shard_groups) config.mics_shard_size = cluster.per_host;
  if (way.across == Way::Across::quantised)
    config.quantised.weights = config.quantised.gradients = true;
  config.update_in_backward = way.updates == Updates::in_backward;
  if (way.updates == Updates::delayed) config.offload_optimizer.delayed_update_after = kDelayAfter;
  return config;
}

// Returns whether an engine takes a way's updates: check_update_in_backward in config/settings.cpp,
// engine/on_device.cpp.
bool allows(const Question& question, const Way& way, Updates updates) {
  if (updates == Updates::in_step) return true;
  const auto& device = question.cluster.device;
  if (!device.cpu && way.optimizer == OffloadDevice::none) return false;
  if (updates == Updates::delayed) return true;
  const bool scales_loss =
      question.autocast == at::kHalf || ((question.bf16 || question.autocast) && !device.bf16);
  return way.stage >= 2 && (!scales_loss || way.optimizer == OffloadDevice::nvme);
}

void judge(Candidate& candidate, const Cluster& cluster) {
  const auto& memory = candidate.memory;
  const auto ranks = static_cast<double>(cluster.per_host);
  const auto device = static_cast<double>(memory.device);
  const auto host = static_cast<double>(memory.host);
  const auto lack = [](double need, double has) { return std::max(0.0, need - has); };
  if (cluster.device.cpu) {
    candidate.host_lacks = lack((device + host) * ranks, cluster.host_memory);
  } else {
    candidate.device_lacks = lack(device, usable(cluster));
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
  const bool narrow = question.bf16 || question.autocast;
  const double peak = narrow ? cluster.device.flops : cluster.device.flops_fp32;
  // `flops` are those of a sequence, forward and backward.
  candidate.mfu = flops * static_cast<double>(question.global_batch) /
                  (candidate.time.seconds * peak * static_cast<double>(cluster.ranks()));
}

std::vector<int64_t> micro_batches(const Question& question) {
  const int64_t ranks = question.cluster.ranks();
  // Bytes of a step are counted in 64 bits.
  constexpr int64_t kMostBatch = int64_t{1} << 40, kMostMicroBatch = int64_t{1} << 20;
  const auto bound = [](const char* what, int64_t value, int64_t most) {
    if (value < 1 || value > most)
      throw ConfigError(
          fmt::format("The {} is {} sequences; it must be 1 to {}.", what, value, most));
  };
  bound("global batch", question.global_batch, kMostBatch);
  bound("largest micro-batch to try", question.most_micro_batch, kMostMicroBatch);
  if (question.global_batch % ranks != 0 || question.global_batch < ranks) {
    throw ConfigError(fmt::format(
        "The global batch of {} sequences cannot be divided over {} ranks. Give a multiple of {}.",
        question.global_batch, ranks, ranks));
  }
  const int64_t of_rank = question.global_batch / ranks;
  // One of each octave: the power of two if it divides the batch, else the largest that does.
  std::vector<int64_t> all;
  const int64_t most = std::min(of_rank, question.most_micro_batch);
  for (int64_t low = question.least_micro_batch; low <= most; low *= 2) {
    int64_t micro = of_rank % low == 0 ? low : std::min(2 * low - 1, most);
    while (micro > low && of_rank % micro != 0) --micro;
    if (of_rank % micro == 0) all.push_back(micro);
  }
  if (all.empty()) {
    throw ConfigError(fmt::format(
        "A rank has {} sequences of a step, which no micro-batch of {} or more divides. Give a "
        "global batch that is a multiple of {}.",
        of_rank, question.least_micro_batch, question.least_micro_batch * ranks));
  }
  return all;
}

}  // namespace

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
        if (eight_bit && ((cluster.device.cpu && place != none) ||
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
    for (const auto across :
         {Way::Across::kept, Way::Across::shard_groups, Way::Across::quantised}) {
      // GPUs send no quantised messages yet: engine/on_device.cpp.
      if (across == Way::Across::quantised && !cluster.device.cpu) continue;
      all.push_back({.stage = 3, .across = across});
    }
  }
  // Only the host updates the states of some optimizers: engine/on_device.cpp.
  if (!cluster.device.cpu && !optim::updates_on_devices(question.optimizer))
    std::erase_if(all, [](const Way& way) { return way.optimizer == none; });
  for (size_t i = 0, count = all.size(); i < count; ++i) {
    for (const auto updates : question.updates) {
      if (updates == Updates::in_step || !allows(question, all[i], updates)) continue;
      all.push_back(all[i]);
      all.back().updates = updates;
    }
  }
  return all;
}

bool plain(const Candidate& c) {
  return c.config.stage == 0 && c.config.offload_optimizer.device == OffloadDevice::none &&
         c.config.offload_param.device == OffloadDevice::none &&
         c.config.offload_optimizer.delayed_update_after == 0 &&
         c.config.optimizer_states == optim::StateFormat::fp32;
}

const Trace& Traces::timed(const Config& config, int64_t micro_batch, int64_t recompute) {
  auto& trace = made(config, micro_batch, recompute);
  if (question_.cluster.measured && timed_.insert(&trace).second)
    speed_.measure(trace, question_.cluster.device, config.parameter_dtype());
  return trace;
}

Trace& Traces::made(const Config& config, int64_t micro_batch, int64_t recompute) {
  const auto options = trace_options(config, question_.cluster.device.cpu);
  const auto one = [&](bool casts_dropped) -> Trace& {
    auto& trace = all_[{micro_batch, recompute, options.gradients_apart, casts_dropped}];
    if (!trace) {
      auto with = options;
      with.casts_dropped = casts_dropped;
      trace = std::make_unique<Trace>(question_.trace(micro_batch, recompute, with));
    }
    return *trace;
  };
  // Without casts of parameters there is nothing to drop.
  auto& kept = one(false);
  return options.casts_dropped && kept.casts_parameters ? one(true) : kept;
}

void Table::fill() {
  const auto sizes = micro_batches(question);
  const int64_t of_rank = question.global_batch / question.cluster.ranks();
  for (const auto& way : ways(question)) {
    for (const int64_t recompute : {0, 1}) {
      if (recompute > 0 && !question.recomputes) continue;
      bool fits = true;
      for (const int64_t micro : sizes) {
        const int64_t passes = of_rank / micro;
        // A larger micro-batch does not fit either, except in a step of one, which adds up no
        // gradients in fp32.
        if (!fits && passes > 1) continue;
        // Updates in backward need all gradients of a unit at once.
        if (way.updates == Updates::in_backward && passes > 1) continue;
        auto candidate = make(way, micro, passes, recompute);
        fits = candidate.fits();
        all.push_back(std::move(candidate));
      }
    }
  }
}

Candidate Table::make(const Way& way, int64_t micro, int64_t accumulation, int64_t recompute) {
  return make(config_of(question, way, accumulation), micro, recompute);
}

Candidate Table::make(const Config& config, int64_t micro, int64_t recompute) {
  Candidate candidate{.config = config,
                      .ranks = question.cluster.ranks(),
                      .micro_batch = micro,
                      .recompute = recompute};
  const auto& trace = traces.of(candidate.config, micro, recompute);
  const auto& cluster = question.cluster;
  candidate.memory = predict_memory(trace, candidate.config,
                                    grid_of(candidate.config, cluster.hosts, cluster.per_host));
  judge(candidate, question.cluster);
  return candidate;
}

// Times are computed for those that fit: of each way the two largest micro-batches, with and
// without recomputation. Smaller ones repeat the same messages more often.
void Table::measure_all() {
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

void Table::time(Candidate& candidate) {
  const auto& trace = traces.timed(candidate.config, candidate.micro_batch, candidate.recompute);
  const auto& plain = traces.of(candidate.config, candidate.micro_batch, 0);
  measure(candidate, question, trace, plain.flops() / static_cast<double>(candidate.micro_batch));
}

void Table::sort() {
  const auto lacks = [](const Candidate& c) {
    return c.device_lacks + c.host_lacks + c.disk_lacks;
  };
  std::ranges::stable_sort(all, [&](const Candidate& a, const Candidate& b) {
    if (a.fits() != b.fits()) return a.fits();
    return a.fits() ? a.tokens_per_second > b.tokens_per_second : lacks(a) < lacks(b);
  });
  if (all.empty() || !all.front().fits()) return;
  // Fewer bits and older weights change results, which a tenth of the time is worth.
  const double most = all.front().tokens_per_second;
  const auto rounds = [](const Candidate& c) {
    return c.config.optimizer_states != optim::StateFormat::fp32 || c.config.quantised.any() ||
           c.config.offload_optimizer.delayed_update_after > 0;
  };
  const auto exact =
      std::ranges::find_if(all, [&](const Candidate& c) { return c.fits() && !rounds(c); });
  const double of_exact = exact == all.end() ? 0 : exact->tokens_per_second;
  // States in 8 bits are for those who need them.
  std::erase_if(all, [&](const Candidate& c) {
    return c.config.optimizer_states != optim::StateFormat::fp32 && c.fits() &&
           c.tokens_per_second < 1.1 * of_exact;
  });
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

void Table::split_times(size_t most) {
  for (size_t i = 0; i < all.size() && all[i].fits(); ++i) {
    if (i < most || plain(all[i])) find_parts(all[i]);
  }
}

void Table::find_parts(Candidate& c) {
  c.time = simulate(traces.timed(c.config, c.micro_batch, c.recompute), c.config, question.cluster);
}

void Table::time_in_parts(Candidate& candidate) {
  if (!candidate.fits()) return;
  time(candidate);
  find_parts(candidate);
}

void Table::answer(size_t split) {
  fill();
  measure_all();
  sort();
  split_times(split);
}

}  // namespace zero::plan
