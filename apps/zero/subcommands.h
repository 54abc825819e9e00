// The subcommands of the program: one file each.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace zero::app {

/// Exit statuses: 0, kFailed for an error while at work, kUsage for a wrong option or
/// configuration.
inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;
inline constexpr int kInterrupted = 130;  ///< stopped by a signal, with the weights saved

using Arguments = std::vector<std::string>;  ///< without the program's and the subcommand's name

struct Subcommand {
  std::string_view name;
  std::string_view summary;
  int (*run)(const Arguments& arguments);
};
/// Prints "zero: error: MESSAGE" to stderr and returns the exit status that the kind of `error`
/// has.
int report(const std::exception& error);

int train(const Arguments& arguments);
int launch(const Arguments& arguments);
int config(const Arguments& arguments);
int data(const Arguments& arguments);
int generate(const Arguments& arguments);
int eval(const Arguments& arguments);
int ckpt(const Arguments& arguments);
int merge(const Arguments& arguments);
int bench(const Arguments& arguments);
int plan_run(const Arguments& arguments);
int report_runs(const Arguments& arguments);
int tune(const Arguments& arguments);
int doctor(const Arguments& arguments);

}  // namespace zero::app
