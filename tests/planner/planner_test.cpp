// Plans: whether ZeRO is needed, in cases whose answer is known, and what a plan promises.
#include "zero/planner/planner.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <memory>
#include <string>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/config/settings.h"
#include "zero/models/architectures.h"
#include "zero/planner/as_ranks.h"
#include "zero/planner/here.h"
#include "zero/planner/operator_speed.h"

namespace zero::plan {
namespace {

std::string gpt2(int64_t layers, int64_t width, int64_t context = 1024) {
  return R"({"model_type": "gpt2", "n_layer": )" + std::to_string(layers) + R"(, "n_head": )" +
         std::to_string(width / 64) + R"(, "n_embd": )" + std::to_string(width) +
         R"(, "n_positions": )" + std::to_string(context) +
         R"(, "vocab_size": 50257, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0})";
}

struct Asked {
  std::unique_ptr<LanguageModelConfig> model;
  Question question;
};

Asked ask(const std::string& json, const Cluster& cluster, int64_t batch, int64_t sequence = 1024) {
  Asked asked{.model = language_model_config_from_json(json, "test"), .question = {}};
  asked.question = {.trace = tracer(*asked.model, sequence),
                    .global_batch = batch,
                    .sequence = sequence,
                    .cluster = cluster,
                    .most_micro_batch = 4};
  return asked;
}

// Only biases and norms are trained, or an adapter as small: the others are frozen.
Tracer mostly_frozen(const LanguageModelConfig& model, int64_t sequence) {
  return [&model, sequence](int64_t batch, int64_t recompute, const TraceOptions& options) {
    auto trace = plan::trace(model, batch, sequence, recompute, options);
    for (auto& parameter : trace.model.parameters) parameter.trainable = parameter.sizes.size() < 2;
    std::erase_if(trace.events, [&](const TraceEvent& event) {
      return (event.kind == TraceEvent::Kind::arrival || event.kind == TraceEvent::Kind::place) &&
             !trace.model.parameters[static_cast<size_t>(event.value)].trainable;
    });
    return trace;
  };
}

void expect(const char* name, const std::string& begins, const Answer& answer) {
  printf("%-22s %s\n", name, answer.zero_or_not.c_str());
  EXPECT_TRUE(answer.zero_or_not.starts_with(begins)) << name << ": " << answer.zero_or_not;
}

TEST(Planner, KnowsWhetherZeroIsNeeded) {
  const auto h100 = [](int64_t hosts, int64_t per_host) {
    return cluster_of(device_named("H100"), hosts, per_host);
  };
  const auto small = gpt2(12, 768);
  const auto xl = gpt2(48, 1600);
  const auto seven = gpt2(16, 6144);  // few layers: traces are short
  expect("small model", "ZeRO is not needed", plan(ask(small, h100(1, 8), 32).question));
  expect("one device", "ZeRO is not needed", plan(ask(small, h100(1, 1), 4).question));
  expect("one device, large", "One device has nobody", plan(ask(seven, h100(1, 1), 4).question));
  expect("large model", "ZeRO is needed", plan(ask(seven, h100(1, 8), 32).question));
  auto slow = ask(small, h100(4, 1), 32);
  slow.question.cluster.between.bandwidth = 1.25e8;  // 1 Gbit/s
  const auto over_slow_link = plan(slow.question);
  expect("slow link", "ZeRO is not needed", over_slow_link);
  EXPECT_NE(over_slow_link.binds.find("reductions"), std::string::npos) << over_slow_link.binds;
  auto adapter = ask(seven, h100(1, 8), 32);
  adapter.question.trace = mostly_frozen(*adapter.model, 1024);
  expect("LoRA", "ZeRO is not needed", plan(adapter.question));
  auto long_sequence = ask(gpt2(24, 2048, 65536), h100(1, 8), 8, 65536);
  long_sequence.question.recomputes = false;
  const auto of_long_sequence = plan(long_sequence.question);
  expect("long sequence", "Nothing fits", of_long_sequence);
  EXPECT_NE(of_long_sequence.zero_or_not.find("activations"), std::string::npos);
  auto little_host = ask(gpt2(12, 12288), h100(1, 1), 4);
  little_host.question.cluster.host_memory = 64e9;
  const auto no_host = plan(little_host.question);
  expect("too little host memory", "Nothing fits", no_host);
  EXPECT_NE(no_host.zero_or_not.find("of memory"), std::string::npos);
  EXPECT_TRUE(std::ranges::any_of(no_host.candidates, [](const Candidate& c) {
    return c.device_lacks == 0 && c.host_lacks > 0;
  }));
  // Half of the layers pruned from a model that needs ZeRO.
  const auto v100 = cluster_of(device_named("V100"), 1, 8);
  expect("before pruning", "ZeRO is needed", plan(ask(gpt2(32, 2560), v100, 16).question));
  expect("after pruning", "ZeRO is not needed", plan(ask(gpt2(8, 2560), v100, 16).question));
  auto tuned = ask(xl, cluster_of(device_named("RTX 4090"), 1, 1), 4);
  tuned.question.trace = mostly_frozen(*tuned.model, 1024);
  expect("frequent tuning", "ZeRO is not needed", plan(tuned.question));
  const auto quick = plan(ask(small, h100(8, 8), 64).question);
  expect("low latency", "ZeRO is not needed", quick);
  EXPECT_LT(quick.best().mfu, 0.5);  // a sequence a device is too little work beside its messages
}

TEST(Planner, APlanFitsAndItsConfigurationIsRead) {
  auto asked = ask(gpt2(48, 1600), cluster_of(device_named("V100"), 2, 8), 64);
  asked.question.cluster.nvme = 6e9;
  asked.question.optimizer = Lion{.weight_decay = 0.1};
  const auto answer = plan(asked.question);
  const auto& best = answer.best();
  EXPECT_TRUE(best.fits());
  EXPECT_GT(best.tokens_per_second, 0);
  EXPECT_GT(best.mfu, 0);
  EXPECT_LT(best.mfu, 1);
  const auto& t = best.time;
  EXPECT_NEAR(t.compute + t.gather + t.reduce + t.offload + t.update + t.disk, t.seconds,
              1e-6 * t.seconds);
  for (const auto& candidate : answer.candidates) {
    const auto& c = candidate.time;
    EXPECT_NEAR(c.compute + c.gather + c.reduce + c.offload + c.update + c.disk, c.seconds,
                1e-6 * c.seconds);
    const auto settings = Settings::parse(ds_config(candidate), static_cast<int>(candidate.ranks));
    auto expected = candidate.config;
    for (auto* place : {&expected.offload_optimizer.nvme_path, &expected.offload_param.nvme_path})
      *place = {};
    auto read = settings.engine;
    for (auto* place : {&read.offload_optimizer.nvme_path, &read.offload_param.nvme_path})
      *place = {};
    EXPECT_EQ(read.dump(), expected.dump()) << candidate.words();
    EXPECT_EQ(settings.program.micro_batch_size, candidate.micro_batch);
  }
}

// Updates beside other work hide behind it: the host's while the devices compute, the disk's while
// a CPU does. What they share with it they take from it.
TEST(Planner, HidesUpdatesBesideOtherWork) {
  struct Case {
    const char* device;
    double nvme;
  };
  for (const auto& [device, nvme] : {Case{"H100", 0}, Case{"EPYC 9654", 1e9}}) {
    auto asked = ask(gpt2(3, 512, 256), cluster_of(device_named(device), 1, 2), 8, 256);
    asked.question.cluster.nvme = nvme;
    Config config;
    config.stage = 2;
    config.bf16 = true;
    config.offload_optimizer.device = nvme > 0 ? OffloadDevice::nvme : OffloadDevice::cpu;
    const auto of = [&](Updates updates) {
      config.update_in_backward = updates == Updates::in_backward;
      config.offload_optimizer.delayed_update_after = updates == Updates::delayed ? 40 : 0;
      return evaluate(asked.question, config, 4);
    };
    const auto usual = of(Updates::in_step);
    const auto in_backward = of(Updates::in_backward);
    const auto delayed = of(Updates::delayed);
    printf("%-10s in the step %.1f ms, in backward %.1f, delayed %.1f\n", device,
           1e3 * usual.time.seconds, 1e3 * in_backward.time.seconds, 1e3 * delayed.time.seconds);
    // Few of its units are ready before backward ends: the largest is the embedding.
    EXPECT_LT(in_backward.time.seconds, usual.time.seconds);
    EXPECT_LT(delayed.time.seconds, 0.98 * in_backward.time.seconds);
    EXPECT_GT(delayed.time.seconds, usual.time.compute);
    // Sums of updates in backward are no gradients that stay, and new parameters lie apart.
    EXPECT_EQ(in_backward.memory.of(Category::gradients), 0);
    const auto parts = [&](const Candidate& c) {
      return c.memory.of(Category::offload_buffers) + c.memory.of(Category::host_buffers);
    };
    // Half of the new parameters and half of the gradients, in two bytes each.
    const int64_t parameters = asked.model->parameter_count();
    EXPECT_GE(parts(in_backward), parameters);
    EXPECT_GE(parts(delayed), parts(in_backward) + parameters);
    for (const auto& each : {in_backward, delayed}) {
      const auto settings = Settings::parse(ds_config(each), 2);
      EXPECT_EQ(settings.engine.update_in_backward, each.config.update_in_backward);
      EXPECT_EQ(settings.engine.offload_optimizer.delayed_update_after,
                each.config.offload_optimizer.delayed_update_after);
    }
  }
}

// The expected largest of n normal numbers is known; a step of many ranks waits for the slowest.
TEST(Planner, WaitsForTheSlowestRank) {
  EXPECT_EQ(slowest_rank({}, 4096), 1);
  EXPECT_NEAR(slowest_rank({.jitter = 0.05}, 1), 1, 1e-5);
  EXPECT_NEAR(slowest_rank({.jitter = 0.01}, 2), 1.00564, 1e-4);
  EXPECT_NEAR(slowest_rank({.jitter = 0.01}, 1000), 1.0324, 1e-3);
  EXPECT_NEAR(slowest_rank({.stragglers = 0.001, .slower = 2}, 1000), 2 - std::pow(0.999, 1000),
              1e-9);
  EXPECT_NEAR(slowest_rank({.jitter = 0.01, .stragglers = 1, .slower = 3}, 1), 3, 1e-4);
  auto asked = ask(gpt2(2, 512), cluster_of(device_named("H100"), 1, 8), 8);
  const auto steady = scale(asked.question, 8, 1024);
  asked.question.cluster.speeds_differ = {.jitter = 0.03, .stragglers = 1e-4};
  const auto uneven = scale(asked.question, 8, 1024);
  double before = 1;
  for (size_t i = 0; i < steady.size(); ++i) {
    const double slower = uneven[i].best.time.seconds / steady[i].best.time.seconds;
    EXPECT_GT(slower, before);
    EXPECT_LE(slower, slowest_rank(asked.question.cluster.speeds_differ, steady[i].ranks) + 1e-9);
    before = slower - 0.02;  // the fastest configuration may be another one
  }
}

// The ranks of a host share its link, also where each sends in a collective of its own: the sums
// over MiCS's replicas.
TEST(Planner, SharesTheLinkOfAHost) {
  auto cluster = cluster_of(device_named("H100"), 2, 8);
  cluster.between = {.bandwidth = 125e6, .efficiency = 1};
  const auto asked = ask(gpt2(2, 512), cluster, 16, 128);
  const auto answer = plan(asked.question);
  // A host sends half of the gradients, and half of their sums or of the parameters, in bf16.
  const double least = static_cast<double>(answer.trained) * 2 / cluster.between.bandwidth;
  for (const auto& each : answer.candidates)
    EXPECT_GT(each.time.seconds, 0.9 * least) << each.words();
}

// Thousands of ranks cost as much as one.
TEST(Planner, ScalesToThousandsOfRanks) {
  const auto asked = ask(gpt2(24, 2048), cluster_of(device_named("H100"), 1, 8), 32);
  const auto begin = std::chrono::steady_clock::now();
  const auto points = scale(asked.question, 1024, 4096);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  ASSERT_EQ(points.size(), 3U);
  EXPECT_EQ(points.back().ranks, 4096);
  for (const auto& point : points) {
    EXPECT_TRUE(point.fits);
    EXPECT_GT(point.efficiency, 0.3);
    EXPECT_LT(point.efficiency, 1.01);
  }
  printf("three clusters in %.2f s\n", seconds.count());
}

// On this machine the operators are run, and those that cannot be run keep their computed times.
TEST(Planner, MeasuresTheOperatorsOfAModelHere) {
  const auto here = measured_here(2);
  EXPECT_TRUE(here.measured);
  EXPECT_FALSE(cluster_from_json(to_json(here), "again").measured);
  const auto model = language_model_config_from_json(gpt2(2, 64, 32), "test");
  auto traced = trace(*model, 2, 32, 0, {.host = true});
  const auto computed = [&] {
    double sum = 0;
    for (const auto& op : traced.operators) sum += operator_seconds(op, here.device, at::kFloat);
    return sum;
  };
  const double before = computed();
  OperatorSpeed speed(2);
  speed.measure(traced, here.device, at::kFloat);
  int64_t measured = 0;
  auto twice_as_fast = here.device;
  twice_as_fast.flops_fp32 *= 2;
  twice_as_fast.bandwidth *= 2;
  for (const auto& op : traced.operators) {
    if (op.seconds == 0) {
      printf("not measured: %s\n", traced.names[static_cast<size_t>(op.name)].c_str());
      continue;
    }
    ++measured;
    EXPECT_DOUBLE_EQ(operator_seconds(op, here.device, at::kFloat), op.seconds);
    EXPECT_NEAR(operator_seconds(op, twice_as_fast, at::kFloat),
                op.modelled > 0 ? op.seconds / 2 : op.seconds, 1e-9 * op.seconds);
  }
  // One gives a tensor other memory (aten::set_).
  EXPECT_GE(measured, static_cast<int64_t>(traced.operators.size()) - 1);
  printf("%zu operators: %.3f ms computed, %.3f ms measured\n", traced.operators.size(),
         1e3 * before, 1e3 * computed());
  // Equal layers have equal calls, which are run once.
  EXPECT_LT(traced.calls->all().size(), traced.operators.size() / 2);
  // A described CPU is not this machine.
  EXPECT_EQ(trace(*model, 2, 32).calls, nullptr);
}

// A speed that is missing is an error, and not a link without cost.
TEST(Planner, NamesTheSpeedThatIsMissing) {
  const auto says = [](const std::string& keys) {
    return message_of<ConfigError>([&] {
      check(cluster_from_json(R"({"flops": 1e14, "memory": 8e10, "bandwidth": 1e12, )" + keys + "}",
                              "machines.json"));
    });
  };
  EXPECT_NE(says(R"("per_host": 2, "pcie": 1e10)").find("'link' is missing"), std::string::npos);
  EXPECT_NE(says(R"("per_host": 1, "hosts": 2, "pcie": 1e10)").find("'network' is missing"),
            std::string::npos);
  EXPECT_NE(says(R"("per_host": 1)").find("'pcie' is missing"), std::string::npos);
  EXPECT_EQ(says(R"("per_host": 1, "cpu": true)"), "nothing was thrown");
  const auto cpu = cluster_from_json(
      R"({"flops": 1e12, "memory": 3e10, "bandwidth": 1e11, "cpu": true, "per_host": 2, "link": 1e10})",
      "machines.json");
  EXPECT_EQ(cpu.host_memory, 6e10);
  EXPECT_NE(message_of<ConfigError>([&] { scaled(cpu, 2, 4); }).find("--network"),
            std::string::npos);
  const auto h100 = cluster_of(device_named("H100"), 1, 8);
  const auto uneven = message_of<ConfigError>([&] { scaled(h100, 12, 13); });
  EXPECT_NE(uneven.find("12 ranks do not fill hosts of 8 devices"), std::string::npos) << uneven;
}

TEST(Planner, BoundsTheBatchAndTheMicroBatches) {
  constexpr auto kHuge = std::numeric_limits<int64_t>::max();
  auto asked = ask(gpt2(2, 128), cluster_of(device_named("H100"), 1, 1), kHuge);
  asked.question.most_micro_batch = kHuge;
  EXPECT_NE(message_of<ConfigError>([&] { plan(asked.question); }).find("The global batch is"),
            std::string::npos);
  asked.question.global_batch = 4;
  EXPECT_NE(message_of<ConfigError>([&] { plan(asked.question); }).find("The largest micro-batch"),
            std::string::npos);
}

// A configuration that the table shows to fit is not said to be impossible, and hosts need not be
// powers of two.
TEST(Planner, CountsTheFewestDevicesWithTheDisk) {
  auto asked = ask(gpt2(12, 8192), cluster_of(device_named("H100"), 1, 1), 4);
  asked.question.cluster.host_memory = 64e9;
  asked.question.cluster.nvme = 6e9;
  const auto answer = plan(asked.question);
  ASSERT_TRUE(answer.best().fits());
  EXPECT_NE(answer.fewest_devices.find("are 1: "), std::string::npos) << answer.fewest_devices;
  auto six = ask(gpt2(75, 4096), cluster_of(device_named("H100"), 1, 6), 6, 512);
  six.question.cluster.host_memory = 10e9;
  const auto fewest = plan(six.question).fewest_devices;
  EXPECT_NE(fewest.find("are 3: stage"), std::string::npos) << fewest;
}

// A device does not update the states of LAMB.
TEST(Planner, PlacesStatesWhereAnEngineTakesThem) {
  auto asked = ask(gpt2(2, 128), cluster_of(device_named("H100"), 1, 2), 4);
  asked.question.optimizer = Lamb{};
  for (const auto& candidate : plan(asked.question).candidates)
    EXPECT_NE(candidate.config.offload_optimizer.device, OffloadDevice::none) << candidate.words();
}

TEST(Planner, SaysThatThreadsCannotBeStarted) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  pthread_attr_t usual;
  pthread_attr_t large;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_getattr_default_np(&large), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&large, size_t{256} << 20), 0);
  ASSERT_EQ(pthread_setattr_default_np(&large), 0);
  auto little = before;
  little.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{1} << 30);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &little), 0);
  const auto message =
      message_of<ConfigError>([] { seconds_as_ranks(64, [] { return Work([] {}); }); });
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  ASSERT_EQ(pthread_setattr_default_np(&usual), 0);
  EXPECT_NE(message.find("64 ranks cannot be measured"), std::string::npos) << message;
}

TEST(Planner, RefusesWhatMakesNoSense) {
  EXPECT_NE(message_of<ConfigError>([] { device_named("H1000"); }).find("H100"), std::string::npos);
  EXPECT_NE(message_of<ConfigError>([] {
              const auto asked = ask(gpt2(2, 128), cluster_of(device_named("H100"), 1, 8), 12);
              plan(asked.question);
            }).find("multiple of 8"),
            std::string::npos);
  for (const auto& [json, says] :
       {std::pair{R"({"device": "H100", "network": 0})", "'network' is 0"},
        {R"({"device": "H100", "network": 10})", "'network' is 10, which is 10 bytes a second"},
        {R"({"device": "H100", "flops": 989})", "Write all of them, as 1e14"},
        {R"({"device": "H100", "wires": 3})", "'wires' is unknown"},
        {R"({"device": "H100", "network_processors": 1.5})",
         "it is a part, at least 0 and at most 1"},
        {R"({"device": "H100", "products": 1e-300})", "at least 1e-06 and at most 1"},
        {R"({"device": "H100", "link_latency": 1e30})", "more than 10 are hardly meant"},
        {R"({"device": "X\u001b[31m"})", "without control characters"},
        {R"({"device": "H100", "straggler_slower": 1e300})", "is hardly meant"},
        {R"({"hosts": 2})", "give 'device'"},
        {R"([])", "must be an object"}}) {
    const auto message =
        message_of<ConfigError>([&, text = json] { cluster_from_json(text, "machines.json"); });
    EXPECT_NE(message.find(says), std::string::npos) << message;
  }
  auto small = cluster_of(device_named("H100"), 1);
  small.device.memory = 5e8;
  EXPECT_NE(message_of<ConfigError>([&] { check(small); }).find("'memory' is 500000000"),
            std::string::npos);
  const auto described = cluster_from_json(to_json(cluster_of(device_named("A100"), 3)), "again");
  EXPECT_EQ(described.device.name, "A100");
  EXPECT_EQ(described.hosts, 3);
}

}  // namespace
}  // namespace zero::plan
