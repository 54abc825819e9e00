// Every mistake that is made by hand is reported in every run, and nothing without it.
#include "tests/device/mistakes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace zero::simulated {
namespace {

class Mistakes : public testing::TestWithParam<Mistake> {};

TEST_P(Mistakes, AreReportedInEveryRun) {
  const Mistake& mistake = GetParam();
  for (const Options& options : schedules(4)) {
    SCOPED_TRACE(describe(options));
    configure(options);
    mistake.run(false);
    EXPECT_EQ(reports(), "") << "without the mistake";
    configure(options);
    mistake.run(true);
    EXPECT_THAT(reports(), testing::HasSubstr(mistake.says)) << "with the mistake";
  }
}

std::string name_of(const testing::TestParamInfo<Mistake>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Events, Mistakes, testing::ValuesIn(mistakes_with_events()), name_of);
INSTANTIATE_TEST_SUITE_P(Memory, Mistakes, testing::ValuesIn(mistakes_with_memory()), name_of);
INSTANTIATE_TEST_SUITE_P(Host, Mistakes, testing::ValuesIn(mistakes_with_the_host()), name_of);
INSTANTIATE_TEST_SUITE_P(Step, Mistakes, testing::ValuesIn(mistakes_in_a_step()), name_of);
INSTANTIATE_TEST_SUITE_P(Collectives, Mistakes, testing::ValuesIn(mistakes_with_collectives()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Peers, Mistakes, testing::ValuesIn(mistakes_with_peers()), name_of);

}  // namespace
}  // namespace zero::simulated
