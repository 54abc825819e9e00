// Rails over the MPIs that libzero was built with, between processes that their mpirun starts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/run_program.h"

namespace zero::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class MpiRail : public ::testing::TestWithParam<std::string> {
 protected:
  static test::Outcome on_hosts(int hosts, const std::string& mode,
                                const std::string& plugin = GetParam()) {
    std::vector<std::string> command{"mpirun." + GetParam()};
    if (GetParam() == "openmpi") {
      command.insert(command.end(), {"--allow-run-as-root", "--oversubscribe"});
    }
    command.insert(command.end(), {"-n", std::to_string(hosts), MPI_RAIL_WORKER, plugin, mode});
    return test::run(command);
  }
};

TEST_P(MpiRail, CarriesMessagesOfEverySizeBothWaysOnEveryChannel) {
  const auto outcome = on_hosts(2, "exchange");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("host 0 of 2: "), HasSubstr("host 1 of 2: ")));
}

TEST_P(MpiRail, JoinsThreeHosts) {
  const auto outcome = on_hosts(3, "exchange", "mpi");  // the launcher says which one it is
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("host 2 of 3: "));
}

TEST_P(MpiRail, HasSeveralRailsInAProcessAndSeveralBesideEachOther) {
  const auto outcome = on_hosts(4, "pairs");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST_P(MpiRail, AbortWakesItsWaits) {
  // MPI is then not finalised, which mpirun may count as a failure; the processes' words count.
  const auto outcome = on_hosts(2, "abort");
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("host 0 of 2: "), HasSubstr("host 1 of 2: ")))
      << outcome.err;
}

TEST_P(MpiRail, SaysWhereTheProcessesAreNotThoseOfTheHosts) {
  const auto outcome = on_hosts(1, "mismatch");
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("libzero_rail_" + GetParam() + ".so"),
                                 HasSubstr("MPI has 1 processes")));
}

INSTANTIATE_TEST_SUITE_P(Each, MpiRail, ::testing::Values(MPI_RAIL_PLUGINS),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace zero::comm
