// The program `zero`: finds the subcommand and turns exceptions into messages and exit statuses.
#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "apps/zero/subcommands.h"
#include "zero/base/error.h"

namespace zero::app {
namespace {

constexpr Subcommand kSubcommands[] = {
    {"train", "train or fine-tune a model on several ranks, with its states sharded", train},
    {"data", "turn text into token files", data},
    {"generate", "continue a text with a model from a folder", generate},
    {"ckpt", "show, check, convert and compare checkpoints, and remove old ones", ckpt},
    {"eval", "loss, perplexity and accuracy of a model on data", eval},
    {"merge", "add a LoRA adapter to the weights of its model", merge},
    {"bench", "measure collectives, links, disks and training steps", bench},
    {"plan", "say before a run what fits on which machines, and how fast it is", plan_run},
    {"tune", "find the fastest configuration on this machine by short runs", tune},
    {"report", "show a run, or two beside each other, as a page of HTML", report_runs},
    {"config", "check a configuration file and show what is in force", config},
    {"doctor", "check this machine for training, and say what to change", doctor},
    {"launch", "run any program as the ranks of a job on this host", launch},
};

void print_help() {
  fmt::print(
      "libzero trains LibTorch models with the ZeRO family of optimizations.\n\n"
      "usage: zero SUBCOMMAND [OPTIONS]\n\nsubcommands:\n");
  for (const auto& subcommand : kSubcommands) {
    fmt::print("  {:<10} {}\n", subcommand.name, subcommand.summary);
  }
  fmt::print("\n`zero help SUBCOMMAND` tells of its options; `zero --version` of the version.\n");
}

const Subcommand& find(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& subcommand : kSubcommands) {
    if (subcommand.name == name) return subcommand;
    names.emplace_back(subcommand.name);
  }
  throw ConfigError(fmt::format("'{}' is not a subcommand.{} See `zero --help`.", name,
                                did_you_mean(name, names)));
}

// Keeps back c10d's warnings of connections that end with another rank, which have stack traces:
// this program's errors say what has happened. Whoever sets TORCH_CPP_LOG_LEVEL sees them.
void silence_warnings() {
  constexpr int kError = 2;  // c10's level
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = kError;
}

int run(Arguments arguments) {
  if (arguments.empty()) {
    print_help();
    return kUsage;
  }
  std::string name = arguments.front();
  arguments.erase(arguments.begin());
  if (name == "--version") {
    fmt::print("zero {} (LibTorch {})\n", ZERO_VERSION, TORCH_VERSION);
    return 0;
  }
  if (name == "--help" || name == "-h" || name == "help") {
    if (arguments.empty()) {
      print_help();
      return 0;
    }
    name = arguments.front();
    arguments = {"--help"};
  }
  return find(name).run(arguments);
}

}  // namespace

}  // namespace zero::app

int main(int argc, char** argv) {
  // A file that may not grow is an error like a full disk. Not SIG_IGN, which the programs that
  // this one launches would inherit.
  std::signal(SIGXFSZ, [](int) {});
  zero::app::silence_warnings();
  try {
    return zero::app::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    return zero::app::report(error);
  }
}
