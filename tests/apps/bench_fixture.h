// The fixture of the tests of `zero bench` and of `zero_bench`.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_program.h"

namespace zero::test {

using Json = nlohmann::json;

class BenchFixture : public ::testing::Test {
 protected:
  explicit BenchFixture(std::vector<std::string> program) : program_(std::move(program)) {}

  Outcome bench(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), program_.begin(), program_.end());
    return run(arguments);
  }

  /// Runs a subject, which must succeed. Its table must have each of `rows`.
  Json measure(std::vector<std::string> arguments, const std::vector<std::string>& rows) {
    const std::string file = folder_ / "figures.json";
    arguments.insert(arguments.end(), {"--json", file});
    const auto outcome = bench(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const auto& row : rows) EXPECT_THAT(outcome.out, ::testing::HasSubstr(row));
    auto json = Json::parse(read_file(file), nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << read_file(file);
    EXPECT_EQ(json["benchmark"], arguments.front());
    EXPECT_GT(json["machine"]["cores"], 0);
    EXPECT_FALSE(json["version"]["zero"].get<std::string>().empty());
    return json;
  }

  std::string error(const std::vector<std::string>& arguments, int status = 2) {
    const auto outcome = bench(arguments);
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(outcome.err.find("zero: error: "), 0u) << outcome.err;
    return outcome.err;
  }

  std::vector<std::string> program_;
  TemporaryFolder folder_;
};

inline void expect_summary(const Json& summary) {
  EXPECT_LE(summary["min"].get<double>(), summary["median"].get<double>());
  EXPECT_LE(summary["median"].get<double>(), summary["max"].get<double>());
}

}  // namespace zero::test
