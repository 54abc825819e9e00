// `zero bench`: every subject runs, counts what its formulas say, and tells what it cannot use.
// Speed is not tested.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "tests/apps/bench_fixture.h"

namespace zero::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Bench : public BenchFixture {
 protected:
  Bench() : BenchFixture({ZERO_PROGRAM, "bench"}) {}

  std::string tiny_model() {
    std::string file = folder_ / "tiny.json";
    write_file(file,
               R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
                   "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})");
    return file;
  }
};

TEST_F(Bench, ListsItsSubjects) {
  const auto help = bench({"--help"});
  EXPECT_EQ(help.status, 0);
  for (const char* subject : {"collectives", "links", "nvme", "step", "timeline"}) {
    EXPECT_THAT(help.out, HasSubstr(subject));
    const auto about = bench({subject, "--help"});
    EXPECT_EQ(about.status, 0);
    EXPECT_THAT(about.out, AllOf(HasSubstr("--json"), HasSubstr("zero bench ")));
  }
  EXPECT_EQ(run({ZERO_PROGRAM, "help", "bench"}).out, help.out);
  EXPECT_EQ(bench({}).status, 2);
}

TEST_F(Bench, LinksTimesEveryPairOfHostsOverOneRailAndAll) {
  const auto json = measure({"links", "--nproc", "6", "--hosts", "3", "--sizes", "1KiB,64KiB",
                             "--volume", "64KiB", "--repetitions", "1"},
                            {"3 x 2 ranks", "gloo over 127.0.0.1 (tcp)", "hosts 0 and 1, 1 rail",
                             "hosts 1 and 2, 2 rails at once", "64.0 KiB"});
  std::set<std::tuple<int, int, int, int>> seen;
  for (const auto& row : json["results"]) {
    seen.emplace(row["hosts"][0], row["hosts"][1], row["rails"], row["size_bytes"]);
    for (const char* key : {"microseconds", "one_way_gb_per_s", "both_ways_gb_per_s"}) {
      expect_summary(row[key]);
      EXPECT_GT(row[key]["min"].get<double>(), 0);
    }
  }
  EXPECT_EQ(seen.size(), 3u * 2u * 2u);
  EXPECT_EQ(json["options"]["ranks_a_host"], 2);
}

TEST_F(Bench, LinksSaysWhichHostsThereCannotBe) {
  EXPECT_THAT(error({"links", "--nproc", "1"}), HasSubstr("a link has two ends"));
  EXPECT_THAT(error({"links", "--nproc", "3", "--hosts", "2"}),
              HasSubstr("--hosts is 2, which does not divide the 3 ranks"));
  EXPECT_THAT(error({"links", "--nproc", "2", "--hosts", "1"}),
              HasSubstr("All 2 ranks are on one host"));
}

TEST_F(Bench, NvmeTimesEverySettingAndWritesTheSection) {
  const std::string disk = (folder_ / "disk").string();
  std::filesystem::create_directory(disk);
  for (const bool threads : {false, true}) {
    std::vector<std::string> arguments{"nvme", "--path",   disk,         "--size",
                                       "4MiB", "--blocks", "64KiB,1MiB", "--depths",
                                       "2,8",  "--rounds", "2",          "--tune"};
    if (threads) arguments.emplace_back("--threads");
    const auto json = measure(arguments, {"64.0 KiB", "write GB/s", "\"aio\"", "\"block_size\""});
    ASSERT_EQ(json["results"].size(), 4u);
    for (const auto& setting : json["results"]) {
      expect_summary(setting["write_gb_per_s"]);
      expect_summary(setting["read_gb_per_s"]);
      EXPECT_GT(setting["read_gb_per_s"]["min"], 0);
      // Threads do it anyway where io_uring is refused, as in many containers.
      EXPECT_TRUE(!threads || setting["way"].get<std::string>().starts_with("threads"));
    }
    EXPECT_TRUE(std::filesystem::is_empty(disk));
  }
  const std::string second = (folder_ / "second").string();
  std::filesystem::create_directory(second);
  const auto striped = measure({"nvme", "--path", disk + "," + second, "--size", "4MiB", "--blocks",
                                "64KiB", "--depths", "2", "--rounds", "1", "--no-checksums"},
                               {"checksums", "not used below", "disk      " + second});
  EXPECT_EQ(striped["options"]["paths"].size(), 2u);
  EXPECT_FALSE(striped["options"]["checksums"].get<bool>());
  EXPECT_TRUE(std::filesystem::is_empty(disk) && std::filesystem::is_empty(second));
  EXPECT_THAT(error({"nvme", "--path", "/nowhere"}, 1), HasSubstr("/nowhere"));
  EXPECT_THAT(error({"nvme", "--path", disk, "--blocks", "1000"}), HasSubstr("1000"));
}

TEST_F(Bench, CollectivesTouchTheBytesOfTheirFormulas) {
  const int64_t size = 64 << 10;
  for (const int64_t n : {2, 3}) {
    const int64_t s = size / (64 * n) * (64 * n);  // whole cache lines for each rank
    const auto json = measure({"collectives", "--nproc", std::to_string(n), "--sizes", "64KiB",
                               "--repetitions", "2", "--dtype", "fp32,bf16"},
                              {"all_gather", "reduce_scatter", "fp32, arena", "bf16, private",
                               std::to_string(n) + " on one host"});
    EXPECT_EQ(json["options"]["ranks"], n);
    EXPECT_EQ(json["options"]["hosts"], 1);
    const std::map<std::string, int64_t> touched{{"all_gather", 2 * n * s},
                                                 {"reduce_scatter", (n + 1) * s},
                                                 {"all_reduce", 2 * n * s},
                                                 {"broadcast", 2 * (n - 1) * s},
                                                 {"all_to_all", 2 * n * s}};
    const std::map<std::string, int64_t> sent{{"all_gather", (n - 1) * s},
                                              {"reduce_scatter", (n - 1) * s},
                                              {"all_reduce", n * (2 * (n - 1) * s / n)},
                                              {"broadcast", s},
                                              {"all_to_all", (n - 1) * s}};
    std::map<std::string, int> seen;
    for (const auto& r : json["results"]) {
      const auto name = r["operation"].get<std::string>();
      EXPECT_EQ(r["size_bytes"], s);
      EXPECT_GT(r["microseconds"]["min"], 0);
      EXPECT_GT(r["gb_per_s"], 0);
      expect_summary(r["microseconds"]);
      expect_summary(r["times_copy"]);
      ++seen[name];
      if (name == "copy" || name == "read") {
        const int64_t passes = name == "copy" ? 2 : 1;
        EXPECT_EQ(r["touched_bytes"], passes * s * r["processes"].get<int64_t>());
        EXPECT_EQ(r["memory"], "private");
        continue;
      }
      EXPECT_EQ(r["touched_bytes"], touched.at(name)) << name;
      EXPECT_EQ(r["sent_bytes"], sent.at(name)) << name << ", by the traffic ledger";
      EXPECT_EQ(r["link_bytes"], 0);
      // Bytes that are read from peers must be copied; more where they pass through staging
      // buffers.
      EXPECT_GE(r["copied_bytes"], name == "broadcast" ? (n - 1) * s : (n - 1) * s / n) << name;
    }
    // Two dtypes, two kinds of memory; copies by all ranks and by all but one.
    const std::map<std::string, int> expected{
        {"copy", 8},           {"read", 4},      {"all_gather", 4}, {"all_reduce", 4},
        {"reduce_scatter", 4}, {"broadcast", 4}, {"all_to_all", 4}};
    EXPECT_EQ(seen, expected);
  }
}

TEST_F(Bench, CollectivesTakeTheMemoryAndSizesGiven) {
  const auto json =
      measure({"collectives", "--sizes", "1KiB,8192", "--repetitions", "1", "--memory", "private"},
              {"private memory"});
  std::set<int64_t> sizes;
  for (const auto& r : json["results"]) {
    EXPECT_EQ(r["memory"], "private");
    sizes.insert(r["size_bytes"].get<int64_t>());
  }
  EXPECT_EQ(sizes, (std::set<int64_t>{1024, 8192}));
}

TEST_F(Bench, CollectivesTimesThoseThatAreAskedFor) {
  const auto json = measure({"collectives", "--collectives", "broadcast,all_gather", "--sizes",
                             "1KiB", "--repetitions", "1", "--memory", "arena"},
                            {"all_gather", "broadcast"});
  std::multiset<std::string> operations;
  for (const auto& r : json["results"]) operations.insert(r["operation"].get<std::string>());
  EXPECT_EQ(operations,
            (std::multiset<std::string>{"copy", "copy", "read", "all_gather", "broadcast"}));
}

TEST_F(Bench, StepsDoTheSameWorkInTheMemoryOfTheFormula) {
  const auto json = measure({"step", "--model", tiny_model(), "--seq", "16", "--micro-batch", "2",
                             "--steps", "2", "--rounds", "2"},
                            {"independent", "stage 3", "gathered_units", "round 2"});
  EXPECT_EQ(json["options"]["ranks"], 2);
  const auto parameters = json["options"]["parameters"].get<int64_t>();
  ASSERT_EQ(json["results"].size(), 5u);
  EXPECT_EQ(json["results"][0]["run"], "independent");
  EXPECT_TRUE(json["results"][0]["tax"].is_null());
  for (size_t i = 1; i < 5; ++i) {
    const auto& r = json["results"][i];
    const int stage = r["stage"].get<int>();
    EXPECT_EQ(stage, static_cast<int>(i) - 1);
    EXPECT_EQ(r["rounds"].size(), 2u);
    EXPECT_GT(r["tokens_per_s"]["min"], 0);
    EXPECT_GT(r["cpu_seconds_per_step"]["min"], 0);
    EXPECT_GE(r["wait_share"]["min"], 0);
    EXPECT_LE(r["wait_share"]["max"], 1);
    expect_summary(r["tax"]);
    EXPECT_EQ(r["loss"], json["results"][1]["loss"]) << "stage " << stage;

    const auto& memory = r["memory"];
    const int64_t whole = parameters * 4, half = parameters * 2, padding = memory["padding"];
    const auto expect_state = [&](const char* name, int64_t bytes) {
      EXPECT_EQ(memory[name]["peak"], memory[name]["formula"]) << name << ", stage " << stage;
      EXPECT_GE(memory[name]["peak"], bytes);
      EXPECT_LE(memory[name]["peak"], bytes + padding);
    };
    expect_state("parameters", stage >= 3 ? half : whole);
    expect_state("gradients", stage >= 2 ? half : whole);
    expect_state("optimizer", 2 * (stage >= 1 ? half : whole));
    // Stage 3 may read full units where they lie, or gather some or all.
    EXPECT_LE(memory["gathered_units"]["peak"], stage == 3 ? whole + padding * 2 : 0);
    EXPECT_GE(memory["total_peak"], memory["activations"]["peak"]);
  }
}

TEST_F(Bench, StepTakesTheStagesGiven) {
  const auto json =
      measure({"step", "--model", tiny_model(), "--seq", "8", "--steps", "1", "--warmup", "1",
               "--rounds", "1", "--stages", "3,1", "--dtype", "bf16", "--nproc", "1"},
              {"stage 3", "stage 1"});
  ASSERT_EQ(json["results"].size(), 3u);
  EXPECT_EQ(json["results"][1]["stage"], 3);
  EXPECT_EQ(json["results"][2]["stage"], 1);
  // A group of one does what an independent trainer does.
  EXPECT_EQ(json["results"][1]["loss"], json["results"][0]["loss"]);
}

TEST_F(Bench, StepMeasuresTheWaysOfStageThree) {
  const auto json =
      measure({"step", "--model", tiny_model(), "--seq", "8", "--steps", "1", "--rounds", "1",
               "--stages", "3", "--sharding", "hybrid,kept,quantised"},
              {"2 on one host", "hybrid", "kept", "quantised"});
  ASSERT_EQ(json["results"].size(), 5u);
  EXPECT_EQ(json["options"]["hosts"], 1);
  for (size_t i = 1; i < 5; ++i) {
    EXPECT_EQ(json["results"][i]["stage"], 3);
    EXPECT_EQ(json["results"][i]["loss"], json["results"][1]["loss"]) << "on one host all are one";
    EXPECT_EQ(json["results"][i]["link_megabytes_of_all_hosts"], 0);
  }
  EXPECT_EQ(json["results"][3]["sharding"], "kept");
  EXPECT_THAT(bench({"step", "--sharding", "hibrid"}).err, HasSubstr("hibrid"));
}

// On a machine with a GPU that is one's; elsewhere a line says that it is the CPU.
TEST_F(Bench, StepCountsTheModelsProductsAndSetsThemBesideTheMeasured) {
  const auto json =
      measure({"step", "--model", tiny_model(), "--seq", "16", "--micro-batch", "2", "--steps", "2",
               "--rounds", "2", "--stages", "0,3", "--nproc", "1", "--mfu", "--device", "any"},
              {"TFLOP/s at best, measured on", "MFU", "exposed ms"});
  const double speed = json["options"]["products_flop_per_s"];
  EXPECT_GT(speed, 0);
  ASSERT_EQ(json["results"].size(), 3u);
  // docs/flops.md: layers, and the logits.
  constexpr double kB = 2, kT = 16, kC = 32, kV = 256;
  constexpr double kMacs = 2 * (12 * kB * kT * kC * kC + 2 * kB * kT * kT * kC) + kB * kT * kC * kV;
  for (const auto& r : json["results"]) {
    EXPECT_EQ(r["flops_per_step"], 6 * kMacs);
    expect_summary(r["mfu"]);
    const double slowest = r["step_ms"]["max"];
    EXPECT_DOUBLE_EQ(r["mfu"]["min"], 6 * kMacs / (slowest * 1e-3 * speed));
  }
  EXPECT_TRUE(json["results"][0]["exposed_ms"].is_null());
  expect_summary(json["results"][2]["exposed_ms"]);
  const auto plain = measure({"step", "--model", tiny_model(), "--seq", "8", "--steps", "1",
                              "--warmup", "1", "--rounds", "1", "--stages", "1", "--nproc", "1"},
                             {"stage 1"});
  EXPECT_EQ(plain["options"]["device"], "cpu");
  EXPECT_TRUE(plain["options"]["products_flop_per_s"].is_null());
  EXPECT_TRUE(plain["results"][0]["mfu"].is_null());
  EXPECT_THAT(bench({"step", "--device", "tpu"}).err, HasSubstr("tpu"));
}

TEST_F(Bench, StepMeasuresTrainersThatOnlyMeet) {
  const auto json = measure({"step", "--model", tiny_model(), "--seq", "8", "--steps", "2",
                             "--rounds", "1", "--stages", "2", "--lockstep"},
                            {"lockstep", "stage 2", "beside lockstep"});
  ASSERT_EQ(json["results"].size(), 3u);
  const auto& independent = json["results"][0];
  const auto& lockstep = json["results"][1];
  EXPECT_EQ(lockstep["run"], "lockstep");
  expect_summary(lockstep["tax"]);
  EXPECT_EQ(lockstep["loss"], independent["loss"]) << "they exchange nothing";
  EXPECT_EQ(independent["wait_share"]["max"], 0);
  EXPECT_GT(lockstep["wait_share"]["min"], 0);
  EXPECT_TRUE(independent["tax"].is_null());
  EXPECT_TRUE(lockstep["tax_beside_lockstep"].is_null());

  const auto& stage = json["results"][2];
  const auto speed = [](const auto& r) {
    return r["rounds"][0]["tokens_per_s"].template get<double>();
  };
  expect_summary(stage["tax_beside_lockstep"]);
  EXPECT_DOUBLE_EQ(stage["tax_beside_lockstep"]["median"], speed(lockstep) / speed(stage) - 1);
  EXPECT_DOUBLE_EQ(stage["tax"]["median"], speed(independent) / speed(stage) - 1);
}

TEST_F(Bench, TimelineSimulatesEachStage) {
  const std::string picture = folder_ / "step.svg";
  const auto json = measure(
      {"timeline", "--model", tiny_model(), "--seq", "16", "--hosts", "4", "--bucket-size", "4096",
       "--flops", "1GFLOP/s", "--link", "1.6Gbit", "--update", "1G", "--svg", picture},
      {"stage", "exposed", "4 ranks on 4 hosts", "chosen", "stage3_prefetch_bucket_size"});
  EXPECT_EQ(json["options"]["speeds"]["compute"], 1e9);
  EXPECT_EQ(json["options"]["speeds"]["link"], 2e8);
  EXPECT_EQ(json["options"]["speeds"]["pcie"], 0);
  const auto& results = json["results"];
  ASSERT_EQ(results.size(), 4u);  // stage 3 twice
  const auto number = [](const Json& value) { return value.get<double>(); };
  for (const auto& r : results) {
    double exposed = 0;
    for (const auto& [resource, milliseconds] : r["exposed_ms"].items())
      exposed += number(milliseconds);
    EXPECT_NEAR(number(r["compute_ms"]) + exposed, number(r["step_ms"]), 1e-9);
    // The compute is the same at all stages.
    EXPECT_NEAR(number(r["compute_ms"]), number(results[0]["compute_ms"]), 1e-9);
  }
  EXPECT_EQ(results[0]["bytes"]["link"], results[1]["bytes"]["link"]);
  EXPECT_LE(number(results[0]["step_ms"]),
            number(results[1]["step_ms"]));  // no bucket is waited for
  EXPECT_EQ(results[2]["bytes"], results[3]["bytes"]);
  EXPECT_EQ(results[2]["prefetch_bytes"], 0);
  EXPECT_GT(results[3]["prefetch_bytes"], 0);
  EXPECT_LT(number(results[3]["step_ms"]), number(results[2]["step_ms"]));
  const auto svg = read_file(picture);
  EXPECT_TRUE(svg.starts_with("<svg xmlns='http://www.w3.org/2000/svg'"));
  EXPECT_THAT(svg, AllOf(HasSubstr(">stage 1: "), HasSubstr(">stage 3, gathered on demand: "),
                         HasSubstr(">link<"), HasSubstr(">reduce<"), HasSubstr("</svg>")));

  // More sequences and micro-batches compute as many times as much.
  const auto more = measure({"timeline", "--model",         tiny_model(), "--seq",
                             "16",       "--micro-batch",   "3",          "--accumulate",
                             "2",        "--stages",        "3",          "--bucket-size",
                             "4096",     "--flops",         "1G",         "--link",
                             "200M",     "--prefetch",      "8KiB",       "--offload-optimizer",
                             "nvme",     "--offload-param", "cpu",        "--pcie",
                             "1G",       "--disk",          "1G",         "--ranks-per-host",
                             "2",        "--dtype",         "fp32"},
                            {"optimizer at nvme", "parameters at cpu"});
  EXPECT_DOUBLE_EQ(number(more["options"]["flops"]), 6 * number(json["options"]["flops"]));
  ASSERT_EQ(more["results"].size(), 2u);
  EXPECT_EQ(more["results"][1]["prefetch_bytes"], 8192);
  for (const char* resource : {"link", "to the device", "to the host", "disk"})
    EXPECT_GT(more["results"][1]["bytes"][resource], 0) << resource;
}

TEST_F(Bench, TimelineOfCpusUpdatesAsUnitsAreGathered) {
  const auto stage3 = [&](const char* device, const char* hosts, const char* work) {
    const auto json =
        measure({"timeline", "--model",          tiny_model(), "--seq",         "16",   "--hosts",
                 hosts,      "--ranks-per-host", "2",          "--bucket-size", "4096", "--stages",
                 "3",        "--flops",          "1G",         "--link",        "200M", "--update",
                 "1G",       "--device",         device,       "--link-work",   work},
                {device});
    return json["results"][1];
  };
  const auto device = stage3("cuda", "2", "0");
  const auto cpu = stage3("cpu", "2", "0");
  EXPECT_EQ(cpu["bytes"], device["bytes"]);
  EXPECT_LT(cpu["step_ms"].get<double>(), device["step_ms"].get<double>());
  // The processors carry the messages too.
  EXPECT_GT(stage3("cpu", "2", "0.5")["compute_ms"].get<double>(), cpu["compute_ms"].get<double>());
  // Ranks of one host read units where they lie, so that only gradients move.
  EXPECT_LT(stage3("cpu", "1", "0")["bytes"]["link"].get<int64_t>(),
            stage3("cuda", "1", "0")["bytes"]["link"].get<int64_t>());
}

TEST_F(Bench, TimelineSaysWhichSpeedIsMissing) {
  const std::vector<std::string> tiny{"timeline", "--model", tiny_model(), "--seq", "16"};
  const auto with = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), tiny.begin(), tiny.end());
    return error(arguments);
  };
  EXPECT_THAT(with({}), HasSubstr("--flops"));
  EXPECT_THAT(with({"--flops", "fast"}), AllOf(HasSubstr("--flops is 'fast'"), HasSubstr("50T")));
  EXPECT_THAT(with({"--flops", "1T", "--link", "-1G"}), HasSubstr("--link is '-1G'"));
  EXPECT_THAT(with({"--flops", "1T", "--offload-param", "cpu"}), HasSubstr("needs --pcie"));
  EXPECT_THAT(with({"--flops", "1T", "--pcie", "1G", "--offload-optimizer", "nvme"}),
              HasSubstr("needs --disk"));
  for (const char* bytes : {"80Tbit", "50TB", "50GB/s"})
    EXPECT_THAT(with({"--flops", bytes}), HasSubstr(std::string("--flops is '") + bytes));
  EXPECT_THAT(with({"--flops", "1T", "--svg", folder_.path()}), HasSubstr("--svg is "));
  const std::string link = folder_ / "link";
  std::filesystem::create_symlink(folder_.write("precious.txt", "x"), link);
  for (const char* option : {"--svg", "--json"}) {
    EXPECT_THAT(with({"--flops", "1T", option, link}),
                AllOf(HasSubstr(option), HasSubstr("no regular file but a link")));
  }
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_THAT(error({"timeline", "--flops", "1T", "--model", tiny_model(), "--seq", "65"}),
              AllOf(HasSubstr("--seq is 65"), HasSubstr("64")));
}

TEST_F(Bench, StepSaysWhatBindsOffloadedStates) {
  const auto json = measure(
      {"step", "--model", tiny_model(), "--seq", "16", "--steps", "2", "--rounds", "1", "--stages",
       "2,3", "--dtype", "bf16", "--offload-optimizer", "cpu", "--offload-param", "cpu"},
      {"states    the optimizer's at cpu, parameters at cpu", "bound by", "updates on the host"});
  const auto number = [](const Json& value) { return value.get<double>(); };
  // Two passes of each step gather all parameters, and the update returns none where they are on
  // the host; gradients of 2 or 4 bytes come down.
  for (const auto& r : json["results"]) {
    const auto& offload = r["offload"];
    const auto& resources = offload["resources"];
    const double parameters = number(json["options"]["parameters"]);
    const double ranks = r["run"] == "independent" ? 1 : 2;
    EXPECT_GE(number(resources["to the host"]["amount"]), 2 * parameters / ranks) << r;
    EXPECT_GE(number(resources["to the device"]["amount"]), 2 * parameters / ranks) << r;
    EXPECT_GE(number(resources["updates on the host"]["amount"]), 28 * parameters / ranks) << r;
    double most = 0;
    for (const auto& [name, resource] : resources.items())
      most = std::max(most, number(resource["ms"]));
    EXPECT_DOUBLE_EQ(number(offload["ms"]), most);
    EXPECT_EQ(number(resources[offload["binds"]]["ms"]), most);
  }
  EXPECT_THAT(error({"step", "--model", tiny_model(), "--seq", "8", "--bf16-weights"}),
              HasSubstr("--bf16-weights needs --dtype bf16"));
}

TEST_F(Bench, SaysWhatItCannotUse) {
  EXPECT_THAT(error({"stepp"}), AllOf(HasSubstr("'stepp'"), HasSubstr("Did you mean 'step'?")));
  EXPECT_THAT(error({"step", "--sequence", "4"}), HasSubstr("'--sequence'"));
  EXPECT_THAT(error({"step", "--stages", "4"}), HasSubstr("--stages"));
  EXPECT_THAT(error({"step", "--stages", "1,1"}), HasSubstr("--stages names 1 twice"));
  EXPECT_THAT(error({"step", "--model", "gpt3"}), HasSubstr("gpt3"));
  EXPECT_THAT(error({"step", "--model", tiny_model(), "--seq", "65"}),
              AllOf(HasSubstr("--seq is 65"), HasSubstr("64")));
  EXPECT_THAT(error({"collectives", "--nproc", "1"}), HasSubstr("--nproc is 1"));
  EXPECT_THAT(error({"collectives", "--nproc", "0"}), HasSubstr("--nproc is 0"));
  EXPECT_THAT(error({"collectives", "--sizes", "64"}),
              AllOf(HasSubstr("--sizes has 64 bytes"), HasSubstr("at least 128")));
  EXPECT_THAT(error({"collectives", "--sizes", "64XB"}), HasSubstr("--sizes"));
  EXPECT_THAT(error({"collectives", "--memory", "shared"}), HasSubstr("--memory"));
  EXPECT_THAT(error({"collectives", "--collectives", "gather"}), HasSubstr("--collectives"));
  EXPECT_THAT(error({"collectives", "--collectives", "broadcast,broadcast"}),
              HasSubstr("--collectives"));
  for (const char* subject : {"collectives", "step"}) {
    EXPECT_THAT(error({subject, "--json", folder_.path()}),
                AllOf(HasSubstr("--json"), HasSubstr("is a folder")));
  }
  EXPECT_THAT(error({"step", "--json", "/no/such/folder/figures.json"}),
              AllOf(HasSubstr("--json"), HasSubstr("/no/such/folder")));
}

}  // namespace
}  // namespace zero::test
