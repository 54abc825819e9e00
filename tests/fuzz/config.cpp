// A configuration file: the first byte is the number of ranks, the rest JSON.
#include "zero/config/settings.h"

#include <string_view>

#include "tests/fuzz/fuzz.h"
#include "zero/base/error.h"

namespace zero {

std::vector<std::string> seeds() {
  return {
      "\1" + Settings().dump(),
      "\4{}",
      R"(/{"train_batch_size": 48, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps":
          1, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3,
          "stage3_max_live_parameters": 1e9, "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
          "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "aio": {"block_size": 1048576},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}})",
      R"(2{"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
           "gradient_clipping": 0, /* a comment */ "memory_budget": "6GB"})",
      R"(1{"bfloat16": {"enabled": true}, "zero_optimization": true, "steps_per_print": 10, "wandb": {}})",
      R"(1{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
           "zero_optimization": {"stage": 2, "cpu_offload": true, "sub_group_size": 1e9,}, # notes
           "compression_training": {"row_pruning": {"shared_parameters": {"enabled": false},
           "different_groups": {"g": {"params": {"bits": 8}}}}}, "tensorboard": {"enabled": true}})",
      "\1{\"zero_optimization\": " + std::string(200'000, '[') + std::string(200'000, ']') + "}",
  };
}

}  // namespace zero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const int ranks = 1 + data[0] % 64;
  try {
    const zero::ReadOptions quiet{.lenient = size % 2 == 0, .warn = [](std::string_view) {}};
    // One pass finds refusals too, and a text that loads has none.
    const auto findings = zero::Settings::check(text, ranks, "configuration", quiet);
    const auto settings = zero::Settings::parse(text, ranks, "configuration", quiet);
    for (const auto& finding : findings)
      zero::ensure(finding.effect != zero::Effect::refused, "what loads is not refused");
    settings.validate();
    zero::ensure(zero::Settings::parse(settings.dump(), ranks) == settings,
                 "settings that are read back equal");
  } catch (const zero::ConfigError&) {
  }
  return 0;
}
