// A short run of a tiny model on a small text.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "tests/support/run_program.h"
#include "zero/engine/pretrained.h"
#include "zero/models/architectures.h"
#include "zero/train/options.h"

namespace zero::train {

/// A run of 4 steps in `folder`, which gets the text, 300 lines that begin with `line` and count to
/// nine, and the model's config.json. Neither validates nor generates.
inline Options tiny_run(const test::TemporaryFolder& folder, std::string_view line,
                        const std::string& model) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += std::string(line) + std::to_string(i % 10) + "\n";
  test::write_file(folder / "text.txt", text);
  test::write_file(folder / "tiny.json", model);
  Options options;
  options.model = folder / "tiny.json";
  options.data = {folder / "text.txt"};
  options.out = folder / "run";
  options.seq = 16;
  options.steps = 4;
  options.warmup = 0;
  options.eval_tokens = 0;
  options.sample_tokens = 0;
  options.threads = 1;
  options.micro_batch_size = 2;
  return options;
}

/// Makes the run begin with weights that lie in `folder`.
inline void begin_with_saved_weights(Options& options, const test::TemporaryFolder& folder) {
  options.from = folder / "base";
  std::filesystem::create_directory(options.from);
  const auto model = language_model_config(options.model)->build();
  Engine engine(model->module(), Sgd{});
  save_pretrained(engine, options.from, {.config_json = model->config().to_json()});
}

}  // namespace zero::train
