// Tests `zero_bench`: its subjects run, count what their formulas say, and refuse what they cannot
// use. Speed is not tested.
#include <map>

#include "tests/apps/bench_fixture.h"

namespace zero::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class DeveloperBench : public BenchFixture {
 protected:
  DeveloperBench() : BenchFixture({ZERO_BENCH}) {}
};

TEST_F(DeveloperBench, OptimizerCountsItsBytes) {
  const auto json =
      measure({"optimizer", "--elements", "5000", "--rounds", "3", "--threads", "1,2"},
              {"triad", "AdamW, fp32", "AdamW, bf16", "SGD with momentum"});
  // Weights and moments are read and written, the gradient is read, 16-bit weights are written.
  const std::map<std::string, double> bytes{
      {"triad", 3 * 4},
      {"triad, stores past the caches", 3 * 4},
      {"AdamW, fp32", 3 * 8 + 4},
      {"AdamW, bf16", 3 * 8 + 2 + 2},
      {"AdamW, bf16, split", 2 * 8 + 2 * 4 + 2},
      {"SGD with momentum, fp32", 2 * 8 + 4},
      {"Adagrad, fp32", 2 * 8 + 4},
      {"Lion, fp32", 2 * 8 + 4},
      {"AdamW, bf16, moments in 8 bits", 8 + 2 + 2 + 2 * 2 * 17.0 / 16},
      {"SGD with momentum, bf16", 2 * 8 + 2 + 2},
      {"Adagrad, bf16", 2 * 8 + 2 + 2},
      {"Lion, bf16", 2 * 8 + 2 + 2},
      {"LAMB, fp32, two sweeps", 2 * 8 + 4 + 4 + 3 * 4 + 4},
      {"Muon without its products, fp32", 8 + 8 + 12},
      {"Adafactor, fp32, factored", 12 + 16 + 12}};
  std::map<std::string, int> seen;
  for (const auto& r : json["results"]) {
    const auto name = r["loop"].get<std::string>();
    ++seen[name];
    EXPECT_EQ(r["elements"], 5000);
    EXPECT_GE(r["gb_per_s"]["best"], r["gb_per_s"]["median"]);
    EXPECT_GT(r["share_of_triad"]["best"], 0);
    const bool element_wise = name.starts_with("AdamW, fp32") || name == "AdamW, bf16" ||
                              name.starts_with("SGD") || name.starts_with("Adagrad") ||
                              name.starts_with("Lion");
    if (element_wise) {
      EXPECT_THAT(r["beside"].get<std::string>(), testing::StartsWith("streaming loop"));
      EXPECT_GT(r["share_of_streaming"]["median"], 0);
    }
    if (const auto found = bytes.find(name); found != bytes.end()) {
      EXPECT_EQ(r["bytes_per_element"], found->second) << name;
    }
  }
  EXPECT_EQ(seen.size(), 23u);
  for (const auto& [name, count] : seen) EXPECT_EQ(count, 2) << name;
}

TEST_F(DeveloperBench, OptimizerUpdatesWholeModelsThatFit) {
  const auto json =
      measure({"optimizer", "--parameters", "5e3,7000", "--rounds", "2", "--threads", "1,2"},
              {"ZeRO-Offload", "5000", "7000"});
  EXPECT_EQ(json["options"]["parameters"], (std::vector<int64_t>{5000, 7000}));
  ASSERT_EQ(json["results"].size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const auto& r = json["results"][i];
    const int64_t parameters = i < 2 ? 5000 : 7000;
    EXPECT_EQ(r["parameters"], parameters);
    EXPECT_EQ(r["threads"], i % 2 + 1);
    EXPECT_EQ(r["held_bytes"], 16 * parameters);
    EXPECT_TRUE(r["published_seconds"].is_null()) << "the paper has no such model";
    expect_summary(r["seconds"]);
    // 24 bytes of states, 2 of the gradient and 2 of the parameter.
    const double bytes = 28.0 * static_cast<double>(parameters);
    EXPECT_DOUBLE_EQ(r["gb_per_s"], bytes * 1e-9 / r["seconds"]["median"].get<double>());
    EXPECT_GT(r["streaming_loop_gb_per_s"], 0);
  }
  // More than any machine has.
  EXPECT_THAT(error({"optimizer", "--parameters", "1000,1e15"}, 1),
              AllOf(HasSubstr("--parameters has 1000000000000000"), HasSubstr("14.2 PiB"),
                    HasSubstr("billion parameters fit")));
}

TEST_F(DeveloperBench, PagerHitsAndMissesWhatItSays) {
  const auto json =
      measure({"pager", "--parameters", "5", "--repetitions", "2", "--min-time", "0.001"},
              {"operator, hit", "touch, miss"});
  std::map<std::string, Json> cases;
  for (const auto& r : json["results"]) {
    cases[r["case"].get<std::string>()] = r;
    expect_summary(r["nanoseconds"]);
    EXPECT_GT(r["nanoseconds"]["min"], 0);
  }
  ASSERT_EQ(cases.size(), 8u);
  for (const char* plain : {"operator, plain", "view, plain"}) {
    EXPECT_EQ(cases[plain]["touches"], 0);
  }
  EXPECT_EQ(cases["view, absent"]["touches"], 0) << "a view needs no bytes";
  for (const char* hit : {"operator, hit", "touch, hit", "touch, hit, evaluation"}) {
    EXPECT_GE(cases[hit]["touches"], 1000) << hit;
    EXPECT_EQ(cases[hit]["gathers"], 0) << hit;
  }
  for (const char* miss : {"operator, miss", "touch, miss"}) {
    EXPECT_GE(cases[miss]["touches"], 1000);
    EXPECT_EQ(cases[miss]["gathers"], cases[miss]["touches"]) << miss;
  }
}

TEST_F(DeveloperBench, RefusesWhatItCannotUse) {
  EXPECT_THAT(error({"optimizer", "--threads", "0"}), HasSubstr("--threads"));
  EXPECT_THAT(error({"optimizer", "--elements", "-3"}), HasSubstr("--elements"));
  EXPECT_THAT(error({"optimizer", "--parameters", "0"}), HasSubstr("--parameters"));
  EXPECT_THAT(error({"optimizer", "--parameters", "1e30"}),
              HasSubstr("--parameters has 1e+30; a model has from 1 to 1e15"));
  EXPECT_THAT(error({"pager", "--min-time", "0"}), HasSubstr("--min-time"));
  EXPECT_THAT(error({"pagr"}), HasSubstr("'pagr' is not a subject"));
  for (const char* subject : {"optimizer", "pager"}) {
    EXPECT_THAT(error({subject, "--json", folder_.path()}),
                AllOf(HasSubstr("--json"), HasSubstr("is a folder")));
    EXPECT_THAT(bench({subject, "--help"}).out, HasSubstr("--json"));
  }
}

}  // namespace
}  // namespace zero::test
