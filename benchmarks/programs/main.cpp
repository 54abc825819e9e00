// `zero_bench SUBJECT`: benchmarks for developers of libzero. Users have `zero bench`.
#include <fmt/format.h>

#include "benchmarks/programs/subjects.h"
#include "zero/base/error.h"

namespace zero::app {
namespace {

int run(Arguments arguments) {
  const std::string name = arguments.empty() ? "--help" : arguments.front();
  if (name == "--help" || name == "-h") {
    fmt::print(
        "usage: zero_bench SUBJECT [OPTIONS]\n\n"
        "  optimizer    bandwidth of the optimizers beside that of plain loops\n"
        "  pager        nanoseconds that stage 3 adds to an operator that uses a parameter\n"
        "  tokenizer    megabytes of text that a tokenizer encodes in a second\n\n"
        "`zero_bench SUBJECT --help` lists the options.\n");
    return arguments.empty() ? kUsage : 0;
  }
  arguments.erase(arguments.begin());
  if (name == "optimizer") return benchmarks::optimizer(arguments);
  if (name == "pager") return benchmarks::pager(arguments);
  if (name == "tokenizer") return benchmarks::tokenizer(arguments);
  throw ConfigError(fmt::format(
      "'{}' is not a subject of zero_bench. It has: optimizer, pager, tokenizer.", name));
}

}  // namespace
}  // namespace zero::app

int main(int argc, char** argv) {
  try {
    return zero::app::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    return zero::app::report(error);
  }
}
