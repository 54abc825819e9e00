// `zero merge`: a model with an adapter becomes one without.
#include <fmt/format.h>

#include <filesystem>
#include <string>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/train/loaded_model.h"
#include "zero/train/weights.h"

namespace zero::app {
namespace {

constexpr const char* kMergeDescription =
    "Adds the products of a peft adapter (LoRA) to the weights of the model beneath it, and writes "
    "a "
    "Hugging Face folder of that model.\n\n"
    "  zero merge --from Llama-3.2-1B --adapter my_run --out merged\n\n"
    "Weights keep their dtype: each is W + scale (B A) in fp32, rounded once. With "
    "--lora-quantize-base W is what an adapter of that option was trained on: the weights of "
    "linear layers after they were quantised.";

/// Returns the precision in which an engine keeps weights of these files as they are. Throws
/// ConfigError where files have several dtypes, of which none would be right for all.
Config precision_of(const WeightFiles& files) {
  std::string first;
  auto dtype = c10::ScalarType::Float;
  for (const auto& name : files.names()) {
    const auto& info = files.info(name);
    if (!c10::isFloatingType(info.dtype)) continue;  // numbers of positions are no weights
    if (first.empty()) {
      first = name;
      dtype = info.dtype;
    }
    if (info.dtype == dtype) continue;
    throw ConfigError(fmt::format(
        "{} holds '{}' in {}, and '{}' in {}: one dtype must be that of all "
        "weights.",
        files.path().string(), first, c10::toString(dtype), name, c10::toString(info.dtype)));
  }
  Config config;
  config.bf16 = dtype == c10::ScalarType::BFloat16;
  config.fp16 = dtype == c10::ScalarType::Half;
  return config;
}

}  // namespace

int merge(const Arguments& arguments) {
  OptionParser parser("merge", kMergeDescription);
  std::string from;
  std::string out;
  train::Options options;
  parser.add_option("--from", from, "Folder of the model (config.json and its weights)")
      ->required()
      ->type_name("DIR");
  parser.add_option("--adapter", options.lora.adapter, "Folder of the adapter")
      ->required()
      ->type_name("DIR");
  parser.add_option("--out", out, "Folder for the merged model; it must be empty or absent")
      ->required()
      ->type_name("DIR");
  add_base_format(parser, options.lora.quantize_base);
  if (const auto status = parser.read(arguments)) return *status;

  const std::filesystem::path target(out);
  std::error_code error;
  if (std::filesystem::exists(target, error) && !std::filesystem::is_empty(target, error)) {
    throw ConfigError(fmt::format("The folder {} is not empty. Give another --out.", out));
  }
  const auto config = precision_of(WeightFiles(from));
  options.from = from;
  train::LoadedModel loaded(options, config);
  fmt::print("{}\n", loaded.report());
  std::filesystem::create_directories(target, error);
  if (error) throw ConfigError(fmt::format("Cannot make the folder {}: {}.", out, error.message()));
  train::write_weights(loaded.engine(), loaded.model(), loaded.lora(), target, {.from = from});
  fmt::print("{} layers merged; the model is in {}\n", loaded.lora()->layers.size(), out);
  return 0;
}

}  // namespace zero::app
