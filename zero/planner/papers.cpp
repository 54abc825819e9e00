#include "zero/planner/papers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <utility>

#include "zero/models/architectures.h"
#include "zero/partition/formulas.h"
#include "zero/planner/planner.h"

namespace zero::plan {
namespace {

constexpr double kBillion = 1e9;

// --- A transformer's step ---

struct Transformer {
  double layers = 0;
  double hidden = 0;
  double vocabulary = 50257;
  double inner = 0;  ///< 0: four times `hidden`
  double kv = 1;     ///< heads of keys, of those of queries
  bool gated = false;
  double heads = 0;  ///< 0: of 64 elements
  bool tied = true;

  double width() const { return inner > 0 ? inner : 4 * hidden; }
  /// The products of a layer: rows and columns of its four weights.
  std::array<std::pair<double, double>, 4> products() const {
    return {{{hidden, std::floor(hidden * (1 + 2 * kv))},
             {hidden, hidden},
             {hidden, (gated ? 2 : 1) * width()},
             {width(), hidden}}};
  }
  double layer() const {
    double sum = 0;
    for (const auto& [rows, columns] : products()) sum += rows * columns;
    return sum;
  }
  double parameters() const { return layers * layer() + vocabulary * hidden * (tied ? 1 : 2); }
};

/// A cluster as a table's stack of software used it.
struct Stack {
  double peak, memory, link;  ///< of a device: FLOPs, bytes of its memory and of its links a second
  double network;             ///< of a host
  double per_host;
  double pcie, pcie_alone, disk, adam;  ///< adam: parameters a second of a host's update
  double e, c;                          ///< Note [Published tables]
  double network_part = 0.7;
  bool fused = false;  ///< attention without the scores in memory
  double link_part = 0.8;
  double latency = 20e-6;
  // Sources: those of hardware.cpp.
  static Stack v100(double e, double c) {
    return {125e12,
            900 * kBillion,
            150 * kBillion,
            100 * kBillion,
            16,
            4 * kBillion,
            12 * kBillion,
            28 * kBillion,
            10e9 / 2.57,
            e,
            c};
  }
  static Stack h100(double e, double c) {
    return {989.4e12,
            3350 * kBillion,
            450 * kBillion,
            400 * kBillion,
            8,
            50 * kBillion,
            55 * kBillion,
            28 * kBillion,
            10e9 / 2.57,
            e,
            c,
            0.8,
            true};
  }
};

enum class Place : uint8_t { device, host, disk };

struct Run {
  Transformer model;
  Stack stack;
  double gpus = 1;
  double batch = 1;  ///< sequences of a replica and micro-batch
  double sequence = 1024;
  double tensor = 1;    ///< ranks of tensor parallelism
  double pipeline = 1;  ///< of a pipeline
  double accumulation = 1;
  int stage = 2;
  bool recompute = true;
  Place optimizer = Place::device;
  Place parameters = Place::device;
  bool counts_recomputation = true;  ///< in the FLOPs of the published figure
  double network = 0;                ///< of a host, if it is another than the stack's
  bool plus = false;                 ///< ZeRO++
  double hidden_tensor = 0;          ///< the part of tensor parallelism's messages that is hidden
  bool overlaps = true;              ///< gathers and reductions run beside compute
  double selective = 0;              ///< the part of a layer that is recomputed instead
  bool sequence_parallel = false;
  bool levels_add = false;  ///< the levels of a collective come one after the other
  /// A ring that leaves a host uses one card of 100 Gbit/s of eight, as in 2020.
  bool rings = false;
};

constexpr double kCard = 12.5 * kBillion;
constexpr double kRail = 0.65, kRails = 0.4;  // what one card, and each of several, reaches
constexpr double kChunks = 4;                 // of an interleaved pipeline

double product(const Stack& s, double m, double k, double n) {
  return 2 * m * n * k / (s.peak * s.e) + s.c * 2 * (m * k + k * n + m * n) / s.memory;
}

double forward_of_layer(const Run& r) {
  const auto& m = r.model;
  const auto& s = r.stack;
  const double tokens = r.batch * r.sequence;
  const double t = r.tensor;
  const auto g = m.products();
  double time = product(s, tokens, g[0].first, g[0].second / t) +
                product(s, tokens, g[1].first / t, g[1].second) +
                product(s, tokens, g[2].first, g[2].second / t) +
                product(s, tokens, g[3].first / t, g[3].second);
  const double heads = (m.heads > 0 ? m.heads : std::floor(m.hidden / 64)) / t;
  double elements = 0;
  if (s.fused) {
    time += 2 * tokens * r.sequence * m.hidden / t / (s.peak * s.e * 0.6);
    elements =
        10 * m.hidden / (r.sequence_parallel ? t : 1) + 3 * m.width() * (m.gated ? 2 : 1) / t;
  } else {  // scores are written and read: some 8 passes of 2 bytes
    time += 4 * tokens * r.sequence * m.hidden / t / (s.peak * s.e * 0.5) +
            8 * 2 * tokens * heads * r.sequence / (0.8 * s.memory);
    elements = 12 * m.hidden + 18 * m.hidden / t;
  }
  return time + 2 * tokens * elements / (0.8 * s.memory);
}

// Two all-reduces of the hidden states, in one direction.
double tensor_messages(const Run& r) {
  if (r.tensor == 1) return 0;
  const double sent = 2 * 2 * r.batch * r.sequence * r.model.hidden * (r.tensor - 1) / r.tensor;
  const double rate =
      r.tensor <= r.stack.per_host ? r.stack.link * r.stack.link_part : kCard * kRail;
  return 2 * (sent / rate + 2 * r.stack.latency) * (1 - r.hidden_tensor);
}

// An all-gather or a reduce-scatter of `bytes` over `group` ranks.
double collective(const Run& r, double bytes, double group) {
  if (group <= 1) return 0;
  const auto& s = r.stack;
  const double local = std::max(1.0, std::min(group, std::floor(s.per_host / r.tensor)));
  const double hosts = group / local;
  double time = local > 1 ? bytes * (local - 1) / local / (s.link * s.link_part) : 0;
  if (hosts > 1) {
    const double together = std::min(r.tensor, s.per_host);  // slices that leave a host at once
    double share = (r.network > 0 ? r.network : s.network) * s.network_part / together;
    if (r.rings)
      share = std::min(8.0, together) * kCard * (together == 1 ? kRail : kRails) / together;
    const double between = bytes * (hosts - 1) / hosts / share;
    time = r.levels_add ? time + between : std::max(time, between);
  }
  return time + s.latency * (1 + std::log2(group));
}

/// Resources that do their work one after the other.
class Resources {
 public:
  enum Name : uint8_t { compute, net, up, down, disk };
  double run(Name name, double seconds, double after) {
    return free_[name] = std::max(free_[name], after) + seconds;
  }

 private:
  std::array<double, 5> free_{};
};

double step_seconds(const Run& r) {
  using R = Resources;
  const auto& s = r.stack;
  const auto& m = r.model;
  const double ranks = std::floor(r.gpus / (r.tensor * r.pipeline));  // of data parallelism
  const auto layers = static_cast<int>(m.layers / r.pipeline);
  const double forward = forward_of_layer(r);
  const double messages = tensor_messages(r);
  const double parameters = m.layer() / r.tensor;
  const double host_bandwidth = r.gpus == 1 ? s.pcie_alone : s.pcie;
  const double local = std::min(r.gpus, s.per_host);
  const double gather = collective(r, 2 * parameters * (r.plus ? 0.5 : 1), ranks);
  const double reduce =
      collective(r, 2 * parameters * (r.plus ? 0.25 : 1), ranks) * (r.stage == 0 ? 2 : 1);
  auto inside = r;
  inside.gpus = local;
  const double gather_again =
      r.plus ? collective(inside, 2 * parameters, std::min(ranks, s.per_host)) : gather;
  const double tokens = r.batch * r.sequence;
  const double head = product(s, tokens, m.hidden, m.vocabulary / r.tensor) +
                      6 * tokens * m.vocabulary / r.tensor / s.memory;
  const double share = parameters / ranks;
  const double up = r.parameters == Place::device ? 0 : 2 * share / host_bandwidth;
  const double read = r.parameters == Place::disk ? 2 * share * local / s.disk : 0;
  const double down = r.optimizer == Place::device ? 0 : 2 * share / host_bandwidth;

  Resources resources;
  std::vector<double> starts;
  const auto began = [&](size_t back) {
    return starts.size() < back ? 0.0 : starts[starts.size() - back];
  };
  const auto layer = [&](double seconds, double gathered) {  // gathers run two layers ahead
    double after = 0;
    if (r.stage == 3) {
      const double limit = began(2);
      double there = 0;
      if (read > 0) there = resources.run(R::disk, read, starts.size() < 4 ? limit : began(4));
      if (up > 0) there = resources.run(R::up, up, std::max(there, limit));
      after = r.overlaps ? resources.run(R::net, gathered, std::max(limit, there))
                         : resources.run(R::compute, gathered, there);
    }
    const double end = resources.run(R::compute, seconds, after);
    starts.push_back(end - seconds);
    return end;
  };
  double end = 0;
  double reduced = 0;
  for (int k = 0; k < static_cast<int>(r.accumulation); ++k) {
    for (int i = 0; i < layers; ++i) end = layer(forward + messages, gather);
    resources.run(R::compute, head * 3 / r.pipeline, 0);
    const double again = r.recompute ? forward + messages : r.selective * forward;
    for (int i = 0; i < layers; ++i) {
      end = layer(2 * forward + messages + again, gather_again);
      const bool reduces = ranks > 1 && (r.stage >= 2 || k + 1 == static_cast<int>(r.accumulation));
      double done = end;
      if (reduces) reduced = done = resources.run(r.overlaps ? R::net : R::compute, reduce, end);
      if (down > 0 && (reduces || ranks == 1)) reduced = resources.run(R::down, down, done);
    }
  }
  if (r.pipeline > 1) end *= 1 + (r.pipeline - 1) / (kChunks * r.accumulation);
  double time = std::max(end, reduced);
  const double own = m.parameters() / r.tensor / r.pipeline / (r.stage >= 1 ? ranks : 1);
  if (r.optimizer == Place::device) {
    time += 28 * own / (0.85 * s.memory);
  } else {
    const double on_disk = r.optimizer == Place::disk ? own * local * 28 / s.disk : 0;
    time += std::max(own * local / s.adam, on_disk);
    if (r.parameters == Place::device) time += 2 * own / host_bandwidth;
  }
  if ((r.stage == 1 || r.stage == 2) && ranks > 1)
    time += collective(r, 2 * m.parameters() / r.tensor / r.pipeline, ranks);
  return time;
}

// As papers count.
double flops(const Run& r) {
  const auto& m = r.model;
  const double tokens = r.batch * r.sequence * r.accumulation;
  const double linear = 2 * tokens * m.layers * m.layer();
  const double attention =
      4 * tokens * r.sequence * m.hidden * m.layers * (r.stack.fused ? 0.5 : 1);
  const double head = 2 * tokens * m.hidden * m.vocabulary;
  const bool again = r.counts_recomputation && r.recompute;
  return 3 * (linear + attention + head) + (again ? linear + attention : 0);
}
double tflops(const Run& r) { return flops(r) / step_seconds(r) / (r.tensor * r.pipeline) / 1e12; }
double tokens_a_second(const Run& r) {
  return r.batch * r.sequence * r.accumulation / step_seconds(r) / (r.tensor * r.pipeline);
}

// --- Tables ---

constexpr const char* kFitted = "fitted on it";
constexpr const char* kRecalled = "its configuration is not confirmed";

using Rows = std::vector<PublishedRow>;

void add(Rows& rows, const char* table, std::string name, double published, double predicted,
         const char* unit, double tolerance, const char* note = "") {
  const std::string why(note);
  const bool tested = why != kFitted && why != kRecalled;
  rows.push_back({table, std::move(name), published, predicted, unit, tested ? tolerance : 0, why});
}

void add_states(Rows& rows) {
  constexpr double kExact = 0.006;  // three digits are printed, some of them cut off
  struct Row {
    double ranks;
    std::array<std::array<double, 3>, 3> gigabytes;  // by model, of stages 1 to 3
  };
  constexpr std::array<std::pair<const char*, double>, 3> kModels{
      {{"7.5 B", 7.5e9}, {"128 B", 128e9}, {"1 T", 1e12}}};
  constexpr std::array<Row, 6> kRows{
      {{1, {{{120, 120, 120}, {2048, 2048, 2048}, {16000, 16000, 16000}}}},
       {4, {{{52.5, 41.3, 30}, {896, 704, 512}, {7000, 5500, 4000}}}},
       {16, {{{35.6, 21.6, 7.5}, {608, 368, 128}, {4750, 2875, 1000}}}},
       {64, {{{31.4, 16.6, 1.88}, {536, 284, 32}, {4187, 2218, 250}}}},
       {256, {{{30.4, 15.4, 0.47}, {518, 263, 8}, {4046, 2054, 62.5}}}},
       {1024, {{{30.1, 15.1, 0.12}, {513, 257, 2}, {4011, 2013, 15.6}}}}}};
  for (const auto& row : kRows) {
    for (size_t m = 0; m < kModels.size(); ++m) {
      for (int stage = 1; stage <= 3; ++stage) {
        const double bytes = partition::state_memory(partition::sharding_of_stage(stage),
                                                     kModels[m].second, row.ranks)
                                 .total();
        const double published = row.gigabytes[m][static_cast<size_t>(stage) - 1];
        add(rows, "ZeRO Table 1",
            fmt::format("{}, {} ranks, stage {}", kModels[m].first, row.ranks, stage), published,
            bytes / kBillion, "GB", published < 1 ? 0.025 : kExact);
      }
    }
  }
  constexpr std::array<std::array<double, 5>, 3> kLargest{{{7.6, 15.2, 30.4, 60.8, 121.6},
                                                           {14.4, 28.8, 57.6, 115.2, 230.4},
                                                           {128, 256, 500, 1000, 2000}}};
  for (int stage = 1; stage <= 3; ++stage) {
    double parallel = 1;
    for (const double published : kLargest[static_cast<size_t>(stage) - 1]) {
      const double largest =
          partition::largest_model(partition::sharding_of_stage(stage), 32e9, 64, parallel);
      add(rows, "ZeRO Table 2", fmt::format("stage {}, model parallelism {}", stage, parallel),
          published, largest / 1e9, "B", stage == 3 ? 0.025 : 0.01);
      parallel *= 2;
    }
  }
  // Figure 3's states: 60 B in 16 parts, stage 2; and the checkpoints that Pa shares.
  const Transformer sixty{.layers = 75, .hidden = 8192};
  struct Column {
    double gpus, batch, states, checkpoints;
  };
  for (const auto& c : {Column{64, 16, 20.76, 1.26}, Column{128, 48, 14.16, 3.77},
                        Column{256, 48, 10.85, 3.77}, Column{400, 64, 9.66, 5.03}}) {
    const double psi = 12 * sixty.layers * sixty.hidden * sixty.hidden / 16;
    const auto states =
        partition::state_memory(partition::sharding_of_stage(2), psi, c.gpus / 16).total();
    const auto name = fmt::format("60 B on {} GPUs", c.gpus);
    add(rows, "ZeRO Figure 3, states", name, c.states, states / kBillion, "GB", 0.005);
    const double checkpoints = 2 * c.batch * 1024 * sixty.hidden * sixty.layers / 16;
    add(rows, "ZeRO Figure 3, Pa", name, c.checkpoints, checkpoints / kBillion, "GB", 0.005);
  }
}

// The largest models, in steps of 10 B, that GPUs of 32 GB hold with C1 to C5 on 400 ranks in 16
// parts, batch 16. Besides states there are checkpoints of the layers' inputs (shared where Pa is,
// on the host in C5) and one layer's activations.
void add_figure6(Rows& rows) {
  struct Choice {
    const char* name;
    int stage;
    bool shared, host;
    double published, tolerance;
    const char* note;
  };
  for (const auto& c :
       {Choice{"C1", 1, false, false, 40, 0.25, ""},
        Choice{"C2", 1, true, false, 60, 0, "not explained: 32 GB would hold more"},
        Choice{"C3", 2, false, false, 50, 0.25, ""}, Choice{"C4", 2, true, false, 140, 0.25, ""},
        Choice{"C5", 2, true, true, 150, 0.25, ""}}) {
    constexpr double kParts = 16, kBatch = 16, kSequence = 1024, kHidden = 8192, kHeads = 64;
    constexpr double kDevice = 32e9, kStep = 10e9;
    // Korthikanti et al.: activations of one layer with tensor parallelism.
    const double layer = kSequence * kBatch * kHidden *
                         (10 + 24 / kParts + 5 * kHeads * kSequence / (kHidden * kParts));
    const auto held = [&](double parameters) {
      const double layers = parameters / (12 * kHidden * kHidden);
      const double inputs =
          c.host ? 0 : 2 * kBatch * kSequence * kHidden * layers / (c.shared ? kParts : 1);
      return layer + inputs +
             partition::state_memory(partition::sharding_of_stage(c.stage), parameters / kParts,
                                     400 / kParts)
                 .total();
    };
    double largest = 0;
    while (held(largest + kStep) <= kDevice) largest += kStep;
    add(rows, "ZeRO Figure 6", c.name, c.published, largest / 1e9, "B", c.tolerance, c.note);
  }
}

void add_times(Rows& rows) {
  // ZeRO, V100: one pair for the GPU (a), or for the stack (b).
  const auto a = Stack::v100(0.52, 0);
  const auto zero2020 = [](Transformer model, Stack stack, double gpus, double batch,
                           double tensor) {
    return Run{.model = model,
               .stack = stack,
               .gpus = gpus,
               .batch = batch,
               .tensor = tensor,
               .overlaps = false,
               .rings = true};
  };
  struct Scaled {
    double gpus, batch, published, tolerance;
  };
  for (const auto& x : {Scaled{64, 16, 25.7, 0.25}, Scaled{128, 48, 37.6, 0.1},
                        Scaled{256, 48, 39.1, 0.1}, Scaled{400, 64, 36.6, 0.1}}) {
    const auto run = zero2020({.layers = 75, .hidden = 8192, .heads = 32}, a, x.gpus, x.batch, 16);
    add(rows, "ZeRO Figure 3", fmt::format("60 B on {} GPUs", x.gpus), x.published, tflops(run),
        "TF", x.tolerance, "");
  }
  // Configurations are those of the paper's Table 5, and TF of its picture, to 0.3.
  struct Big {
    const char* name;
    double layers, hidden, heads, tensor, batch, published, tolerance;
    const char* note = "";
  };
  for (const auto& x :
       {Big{"1.5 B", 48, 1600, 16, 1, 24, 30.3, 0,
            "not explained: Figure 4 has 40 TF of such a model on 128 GPUs"},
        Big{"8 B", 72, 3072, 24, 4, 64, 36.9, 0.15}, Big{"40 B", 88, 6144, 32, 4, 12, 36.0, 0.12},
        Big{"60 B", 132, 6144, 32, 16, 64, 36.6, 0.12},
        Big{"80 B", 100, 8192, 64, 16, 32, 37.6, 0.12},
        Big{"100 B", 125, 8192, 64, 16, 32, 38.8, 0.12},
        Big{"120 B", 150, 8192, 64, 16, 24, 28.2, 0.25},
        Big{"140 B", 175, 8192, 64, 16, 16, 27.0, 0.25},
        Big{"170 B", 212, 8192, 64, 16, 12, 21.0, 0.25}}) {
    const auto run = zero2020({.layers = x.layers, .hidden = x.hidden, .heads = x.heads}, a, 400,
                              x.batch, x.tensor);
    add(rows, "ZeRO Figure 2", x.name, x.published, tflops(run), "TF", x.tolerance, x.note);
  }
  // Configurations are those of Table 10.
  struct Data {
    const char* name;
    double layers, hidden, heads, batch, published;
    const char* note = "";
  };
  for (const auto& x :
       {Data{"1.5 B", 34, 1920, 16, 24, 40.0}, Data{"2.5 B", 54, 1920, 16, 24, 41.5},
        Data{"4 B", 64, 2304, 24, 16, 43.2}, Data{"6 B", 52, 3072, 24, 12, 46.6},
        Data{"8 B", 72, 3072, 24, 8, 46.6, kFitted}, Data{"10 B", 50, 4096, 32, 6, 40.7},
        Data{"11 B", 54, 4096, 32, 4, 35.3}, Data{"12 B", 58, 4096, 32, 4, 32.5},
        Data{"13 B", 62, 4096, 32, 2, 21.0}}) {
    const auto run = zero2020({.layers = x.layers, .hidden = x.hidden, .heads = x.heads},
                              Stack::v100(0.96, 7.6), 128, x.batch, 1);
    add(rows, "ZeRO Figure 4", x.name, x.published, tflops(run), "TF", 0.15, x.note);
  }
  struct Trillion {
    const char* name;
    double layers, hidden, batch, tensor, published;
    bool disk;
    const char* note;
  };
  for (const auto& x : {Trillion{"0.5 T", 124, 18432, 7, 4, 46.3, false, kRecalled},
                        Trillion{"1 T", 128, 25600, 5, 4, 48.9, false, kFitted},
                        Trillion{"5 T", 174, 49152, 3, 4, 43.9, true, kRecalled},
                        Trillion{"10 T", 200, 65536, 2, 4, 42.7, true, kFitted},
                        Trillion{"20 T", 205, 90112, 1.25, 8, 37.2, true, kRecalled}}) {
    const auto place = x.disk ? Place::disk : Place::device;
    const Run run{.model = {.layers = x.layers, .hidden = x.hidden, .heads = 128},
                  .stack = Stack::v100(0.44, 0),
                  .gpus = 512,
                  .batch = x.batch * x.tensor,
                  .tensor = x.tensor,
                  .stage = 3,
                  .optimizer = place,
                  .parameters = place};
    add(rows, "ZeRO-Infinity, 512 GPUs", x.name, x.published, tflops(run), "TF", 0.07, x.note);
  }
  for (const auto& [gpus, published] :
       {std::pair{64.0, 43.9}, {128.0, 48.8}, {256.0, 46.2}, {512.0, 48.9}}) {
    const Run run{.model = {.layers = 128, .hidden = 25600, .heads = 256},
                  .stack = Stack::v100(0.44, 0),
                  .gpus = gpus,
                  .batch = 20,
                  .tensor = 4,
                  .stage = 3,
                  .optimizer = Place::disk,
                  .parameters = Place::disk};
    add(rows, "ZeRO-Infinity, 1 T", fmt::format("{} GPUs", gpus), published, tflops(run), "TF",
        0.15, kRecalled);
  }
}

// DeepSpeed's post on ZeRO++: layers and widths are not published, so ratios are tested.
void add_plus(Rows& rows) {
  struct Point {
    double cards, thousands;
    std::array<double, 4> plain, plus;
  };
  constexpr std::array<std::pair<const char*, std::pair<double, double>>, 4> kModels{
      {{"18 B", {40, 6144}}, {"49 B", {61, 8192}}, {"91 B", {50, 12288}}, {"138 B", {76, 12288}}}};
  for (const auto& x : {Point{4, 1, {25, 23, 23, 23}, {35, 36, 36, 36}},
                        Point{4, 2, {40, 36, 36, 36}, {53, 51, 51, 50}},
                        Point{1, 1, {14, 11, 11, 11}, {31, 22, 22, 22}},
                        Point{1, 2, {26, 20, 20, 20}, {46, 38, 38, 38}}}) {
    for (size_t i = 0; i < kModels.size(); ++i) {
      auto stack = Stack::v100(0.64, 1);
      stack.network_part = 0.8;
      Run run{.model = {.layers = kModels[i].second.first, .hidden = kModels[i].second.second},
              .stack = stack,
              .gpus = 384,
              .sequence = 1024 * x.thousands,
              .stage = 3,
              .network = x.cards * kCard,
              .overlaps = false,
              .levels_add = true};
      const double plain = tflops(run);
      run.plus = true;
      const double ratio = tflops(run) / plain;
      const auto name =
          fmt::format("{}, {} cards, {}K tokens", kModels[i].first, x.cards, x.thousands);
      // One card at 1K tokens is compute beside a link that the model does not explain.
      const bool far = (x.cards == 1 && x.thousands == 1 && i > 0) ||
                       (i == 0 && x.cards == 4 && x.thousands == 1);
      add(rows, "ZeRO++ : ZeRO-3", name, x.plus[i] / x.plain[i], ratio, "x", far ? 0.3 : 0.1);
      if (x.cards == 1 && i > 0)
        add(rows, "ZeRO-3, one card", name, x.plain[i], plain, "TF", 0.1,
            i == 3 && x.thousands == 1 ? kFitted : "");
    }
  }
}

void add_gpu_era(Rows& rows) {
  struct Megatron {
    const char* name;
    double layers, hidden, heads, tensor, pipeline, gpus, batch, published, tolerance;
    const char* note;
  };
  for (const auto& x : {Megatron{"1.7 B", 24, 2048, 16, 1, 1, 48, 192, 408.8, 0.12, ""},
                        Megatron{"7.1 B", 30, 4096, 32, 2, 1, 96, 192, 465.9, 0.12, kFitted},
                        Megatron{"16 B", 32, 6144, 48, 4, 1, 192, 192, 489.1, 0.12, ""},
                        Megatron{"32 B", 48, 7168, 56, 8, 1, 384, 192, 459.6, 0.2, ""},
                        Megatron{"70 B", 84, 8192, 64, 8, 2, 768, 384, 419.7, 0.12, ""},
                        Megatron{"119 B", 92, 10240, 80, 8, 4, 1536, 768, 420.5, 0.12, ""},
                        Megatron{"177 B", 96, 12288, 96, 8, 6, 2304, 1152, 432.8, 0.12, ""},
                        Megatron{"314 B", 96, 16384, 128, 8, 8, 3072, 1536, 474.4, 0.12, kFitted},
                        Megatron{"462 B", 112, 18432, 144, 8, 16, 6144, 3072, 459.9, 0.12, ""}}) {
    const Run run{
        .model = {.layers = x.layers, .hidden = x.hidden, .vocabulary = 131072, .heads = x.heads},
        .stack = Stack::h100(0.56, 0),
        .gpus = x.gpus,
        .batch = 1,
        .sequence = 4096,
        .tensor = x.tensor,
        .pipeline = x.pipeline,
        .accumulation = std::floor(x.batch / 48),
        .stage = 1,
        .recompute = false,
        .counts_recomputation = false,
        .hidden_tensor = 0.9,
        .sequence_parallel = true};
    add(rows, "Megatron-LM on H100", x.name, x.published, tflops(run), "TF", x.tolerance, x.note);
  }
  auto stack = Stack::h100(0.7, 4.4);
  stack.memory = 2400 * kBillion;
  Run llama{.model = {.layers = 32,
                      .hidden = 4096,
                      .vocabulary = 128256,
                      .inner = 14336,
                      .kv = 0.25,
                      .gated = true,
                      .heads = 32,
                      .tied = false},
            .stack = stack,
            .gpus = 8,
            .batch = 2,
            .sequence = 8192,
            .stage = 3,
            .recompute = false,
            .selective = 0.5};
  const double eight = tokens_a_second(llama);
  llama.gpus = 128;
  add(rows, "torchtitan, Llama 3.1 8B", "128 GPUs : 8", 6514.0 / 6667,
      tokens_a_second(llama) / eight, "x", 0.03);

  struct Qwen {
    const char* name;
    Transformer model;
  };
  const auto qwen = [](double layers, double hidden, double vocabulary, double inner, double kv,
                       double heads, bool tied) {
    return Transformer{layers, hidden, vocabulary, inner, kv, true, heads, tied};
  };
  const std::array<Qwen, 5> models{{{"0.5 B", qwen(24, 896, 151936, 4864, 2.0 / 14, 14, true)},
                                    {"1.5 B", qwen(28, 1536, 151936, 8960, 2.0 / 12, 12, true)},
                                    {"3 B", qwen(36, 2048, 151936, 11008, 2.0 / 16, 16, true)},
                                    {"7 B", qwen(28, 3584, 152064, 18944, 4.0 / 28, 28, false)},
                                    {"14 B", qwen(48, 5120, 152064, 13824, 8.0 / 40, 40, false)}}};
  struct Llmq {
    size_t model;
    double gpus, batch, accumulation, published;
    const char* note;
  };
  for (const auto& x : {Llmq{0, 1, 32, 16, 149000, kFitted}, Llmq{1, 1, 32, 16, 58710, ""},
                        Llmq{2, 1, 16, 32, 30958, ""}, Llmq{3, 1, 4, 128, 13863, kFitted},
                        Llmq{4, 1, 8, 64, 6321, ""}, Llmq{0, 8, 32, 2, 1127000.0 / 8, ""},
                        Llmq{1, 8, 32, 2, 456000.0 / 8, ""}, Llmq{2, 8, 16, 4, 240000.0 / 8, ""},
                        Llmq{3, 8, 8, 8, 112000.0 / 8, ""}, Llmq{4, 8, 16, 4, 48866.0 / 8, ""}}) {
    const bool large = x.model == 4;
    const Run run{.model = models[x.model].model,
                  .stack = Stack::h100(0.76, 0),
                  .gpus = x.gpus,
                  .batch = x.batch,
                  .accumulation = x.accumulation,
                  .stage = large && x.gpus > 1 ? 3 : 1,
                  .recompute = false,
                  .optimizer = large && x.gpus == 1 ? Place::host : Place::device,
                  .selective = large ? 0.6 : 0};
    add(rows, "llmq on H100", fmt::format("{} x {}", models[x.model].name, x.gpus), x.published,
        tokens_a_second(run), "tok/s", 0.07, x.note);
  }
}

// A run of libzero is what `zero plan` plans.
void add_libzero(Rows& rows) {
  const auto model = language_model_config("gpt2-xl");
  Config config;
  config.stage = 3;
  config.bf16 = true;
  config.offload_optimizer.device = config.offload_param.device = OffloadDevice::cpu;
  constexpr int64_t kBatch = 4, kSequence = 1024;
  const Question question{.trace = tracer(*model, kSequence),
                          .global_batch = kBatch,
                          .sequence = kSequence,
                          .cluster = cluster_of(device_named("H100"), 1, 1)};
  add(rows, "libzero on an H100", "GPT-2 XL, all states on the host", 7600,
      evaluate(question, config, kBatch).tokens_per_second, "tok/s", 0.07);
}

}  // namespace

std::vector<PublishedRow> published_rows() {
  Rows rows;
  add_states(rows);
  add_figure6(rows);
  add_times(rows);
  add_plus(rows);
  add_gpu_era(rows);
  add_libzero(rows);
  // The rows of a table follow each other, in the order of the tables' first rows.
  std::map<std::string, size_t, std::less<>> place;
  for (const auto& row : rows) place.emplace(row.table, place.size());
  std::ranges::stable_sort(rows, {}, [&](const PublishedRow& row) { return place.at(row.table); });
  return rows;
}

}  // namespace zero::plan
