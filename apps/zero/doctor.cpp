// `zero doctor` looks for what would make training fail on this machine, and says what to change.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "apps/zero/doctor_checks.h"
#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"

namespace zero::app {
namespace {

using namespace checkup;

constexpr const char* kDoctorDescription =
    "Looks for what would make training fail on this machine, and says what to change.\n\n"
    "  zero doctor -n 4 --nvme-path /mnt/nvme\n\n"
    "It changes nothing, removes what it writes, and measures nothing (`zero bench` does). Run it "
    "as the training will run: in the same\n"
    "container, by the same launcher's shell, with the same variables. The status is 1 where there "
    "is a problem, else 0;\n"
    "docs/zero-doctor.md explains each line.";

const char* word(Mark mark) {
  switch (mark) {
    case Mark::ok:
      return "ok";
    case Mark::advice:
      return "advice";
    case Mark::problem:
      return "problem";
  }
  return "";
}

Report examine(const Plan& plan, const std::vector<std::string>& paths) {
  const std::filesystem::path root("/");
  const auto& variable = comm::environment_variable;
  Report report;
  check_cores(report, root, variable, plan.ranks);
  check_memory(report, root, plan.ranks);
  check_limits(report, root, plan, threads_of(root, variable, plan.ranks));
  check_sharing(report, plan.ranks);
  check_uring(report, plan.ranks);
  for (const auto& path : paths) check_disk(report, root, path);
  check_links(report, root, variable, plan.hosts);
  return report;
}

void print_table(const Report& report) {
  size_t width = 0;
  for (const auto& finding : report.findings()) width = std::max(width, finding.name.size());
  std::string section;
  for (const auto& finding : report.findings()) {
    if (finding.section != section) {
      fmt::print("{}{}\n", section.empty() ? "" : "\n", finding.section);
      section = finding.section;
    }
    fmt::print("  {:<8} {:<{}}  {}\n", word(finding.mark), finding.name, width, finding.value);
    for (const auto& sentence : {finding.change, finding.cost}) {
      if (!sentence.empty()) fmt::print("  {:<8} {:<{}}    {}\n", "", "", width, sentence);
    }
  }
  const auto problems = report.count(Mark::problem), pieces = report.count(Mark::advice);
  fmt::print("\n{} problem{}, {} piece{} of advice\n", problems, problems == 1 ? "" : "s", pieces,
             pieces == 1 ? "" : "s");
}

void print_json(const Report& report, const Plan& plan) {
  nlohmann::ordered_json json{{"version", ZERO_VERSION},
                              {"ranks", plan.ranks},
                              {"hosts", plan.hosts},
                              {"findings", nlohmann::ordered_json::array()},
                              {"problems", report.count(Mark::problem)},
                              {"advice", report.count(Mark::advice)}};
  for (const auto& finding : report.findings()) {
    nlohmann::ordered_json line{{"section", finding.section},
                                {"name", finding.name},
                                {"mark", word(finding.mark)},
                                {"value", finding.value}};
    if (finding.mark != Mark::ok) {
      line["change"] = finding.change;
      line["cost"] = finding.cost;
    }
    json["findings"].push_back(std::move(line));
  }
  fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace

int doctor(const Arguments& arguments) {
  OptionParser parser("doctor", kDoctorDescription);
  Plan plan;
  std::vector<std::string> paths;
  bool json = false;
  parser.add_option("-n,--nproc", plan.ranks, "Ranks that are to train on this host")
      ->check(positive())
      ->type_name("N");
  parser.add_option("--nnodes", plan.hosts, "Hosts of the job")->check(positive())->type_name("H");
  parser
      .add_option("--nvme-path", paths,
                  "Folder for offloaded states, whose disk is tried; may be given again")
      ->type_name("DIR");
  parser.add_flag("--json", json, "Print JSON instead of the table");
  if (const auto status = parser.read(arguments)) return *status;

  const auto report = examine(plan, paths);
  if (json) {
    print_json(report, plan);
  } else {
    print_table(report);
  }
  return report.count(Mark::problem) == 0 ? 0 : kFailed;
}

}  // namespace zero::app
