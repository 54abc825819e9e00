// The subcommands of the program: one file each.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero::app {

/// Exit statuses: 0, kFailed for an error while at work, kUsage for a wrong option or
/// configuration.
inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;

using Arguments = std::vector<std::string>;  ///< without the program's and the subcommand's name

struct Subcommand {
  std::string_view name;
  std::string_view summary;
  int (*run)(const Arguments& arguments);
};
std::span<const Subcommand> subcommands();

int train(const Arguments& arguments);
int launch(const Arguments& arguments);
int data(const Arguments& arguments);

}  // namespace zero::app
