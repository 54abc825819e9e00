// Reads the options of the subcommands, and reports their errors.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/zero/subcommands.h"
#include "zero/config/settings.h"

namespace zero {
class LanguageModelConfig;
}  // namespace zero

namespace zero::app {

/// Parses the options of `PROGRAM NAME`. Its help shows each number with its default.
class OptionParser : public CLI::App {
 public:
  OptionParser(std::string name, std::string description, const std::string& program = "zero");
  /// Leaves an option out of --help; --help-all has it.
  void show_in_help_all(CLI::Option* option);
  /// Reads `arguments`. Returns an exit status where there is nothing left to do (--help). Throws
  /// ConfigError for arguments that cannot be used, with the nearest option that exists, and for an
  /// option that is given twice.
  std::optional<int> read(const Arguments& arguments);

 private:
  std::vector<CLI::Option*> rare_;
};

/// Checks of numbers. Their errors name the number, and say what it should be.
CLI::Validator positive();
CLI::Validator not_negative();
/// Returns a check for a number between two, which NaN is not (CLI::Range takes it).
CLI::Validator between(double least, double most);

/// Adds --lora-quantize-base for an adapter that has been trained.
void add_base_format(OptionParser& parser, BaseFormat& format);

/// Returns the number that a text like "16GB/s", "400Gbit" (of bytes), "50T" (of FLOPs) or "300G"
/// (a count, where B means G too) says, with k, M, G, T or P for powers of 1000; 0 for an empty
/// text. Throws ConfigError naming `option`.
enum class Quantity : uint8_t { flops, bytes, count };
double quantity(const char* option, const std::string& text, Quantity what);

/// Returns the same of a speed. Throws ConfigError for a number without a unit that means less than
/// plan::kLeastSpeed a second: one of Gbit/s or of TFLOP/s, mostly, that lacks its unit.
double speed(const char* option, const std::string& text, Quantity what = Quantity::bytes);

/// Returns the sizes of the model of that name or in that config.json. Throws ConfigError as
/// language_model_config, and for sequences of --seq that are longer than the model takes.
std::unique_ptr<LanguageModelConfig> model_for_sequences(const std::string& model, int64_t seq);

}  // namespace zero::app
