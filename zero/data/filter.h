// Runs other programs as filters.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

/// Gives the next piece of the input, or an empty view at its end; the view must live until the
/// next call. Runs on a thread of its own.
using FilterInput = std::function<std::string_view()>;
/// Takes the next piece of the output.
using FilterOutput = std::function<void(std::string_view)>;

/// Runs the program command[0] (a path) with the arguments that follow, writes `input` to it and
/// hands its output to `output` while it runs. Returns when it has ended. DataError, with what it
/// wrote to its standard error, when it cannot be started or fails; exceptions of `input` and
/// `output` end it and pass through.
void run_filter(const std::vector<std::string>& command, const FilterInput& input,
                const FilterOutput& output);

}  // namespace zero
