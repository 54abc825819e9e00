// `zero bench`: finds the subject.
#include "apps/zero/bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "zero/base/error.h"

namespace zero::app {
namespace {

constexpr Subcommand kSubjects[] = {
    {"collectives", "bandwidth of the collectives beside that of plain copies",
     benchmarks::collectives},
    {"links", "latency and bandwidth between hosts", benchmarks::links},
    {"nvme", "bandwidth of a disk as offloaded states use it", benchmarks::nvme},
    {"step", "each stage's training step beside independent trainers", benchmarks::step},
    {"timeline",
     "a step simulated at given speeds: what is not hidden, and how far to gather ahead",
     benchmarks::timeline},
};

void print_help() {
  fmt::print(
      "Measures libzero on this machine, each figure beside what the machine can do.\n\n"
      "usage: zero bench SUBJECT [OPTIONS]\n\nsubjects:\n");
  for (const auto& subject : kSubjects) fmt::print("  {:<12} {}\n", subject.name, subject.summary);
  fmt::print(
      "\nEach prints a table, and with --json FILE writes its figures there. Measure on a machine "
      "that does nothing else.\n`zero bench SUBJECT --help` tells of its options and of what its "
      "columns mean.\n");
}

}  // namespace

int bench(const Arguments& arguments) {
  if (arguments.empty()) {
    print_help();
    return kUsage;
  }
  const auto& name = arguments.front();
  if (name == "--help" || name == "-h" || name == "help") {
    print_help();
    return 0;
  }
  std::vector<std::string> names;
  for (const auto& subject : kSubjects) {
    if (subject.name == name) return subject.run({arguments.begin() + 1, arguments.end()});
    names.emplace_back(subject.name);
  }
  throw ConfigError(fmt::format("'{}' is not a subject of `zero bench`.{} It has: {}.", name,
                                did_you_mean(name, names), fmt::join(names, ", ")));
}

}  // namespace zero::app
