// Configuration files with DeepSpeed's keys.
#include "zero/engine/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "zero/base/error.h"

namespace zero {
namespace {

using testing::HasSubstr;

std::string error_of(std::string_view text, int world = 2) {
  try {
    Config::parse(text, world);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Config, ReadsDeepSpeedsKeys) {
  const auto config = Config::parse(R"({
    // comments are allowed
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "train_batch_size": 24,
    "gradient_clipping": 0.5, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"},
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e6, "unit_bytes": 4096},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2}}})",
                                    2);
  EXPECT_EQ(config.stage, 3);
  EXPECT_EQ(config.micro_batch_size, 4);
  EXPECT_EQ(config.gradient_accumulation_steps, 3);
  EXPECT_EQ(config.gradient_clipping, 0.5);
  EXPECT_TRUE(config.bf16);
  EXPECT_EQ(config.accumulation_dtype, AccumulationDtype::model);
  EXPECT_EQ(config.max_live_parameters, 1'000'000);
  EXPECT_EQ(config.unit_bytes, 4096);
  const auto& adam = std::get<AdamW>(*config.optimizer);
  EXPECT_EQ(adam.lr, 0.001);
  EXPECT_EQ(adam.beta1, 0.8);
  EXPECT_EQ(adam.weight_decay, 0.2);
}

TEST(Config, WhatIsDumpedReadsBackEqual) {
  Config config;
  config.stage = 2;
  config.bf16 = true;
  config.gradient_accumulation_steps = 5;
  config.accumulation_dtype = AccumulationDtype::model;
  config.optimizer = Sgd{.lr = 0.1, .momentum = 0.9, .nesterov = true};
  EXPECT_EQ(Config::parse(config.dump(), 1), config);
  EXPECT_EQ(Config::parse(Config().dump(), 1), Config());
}

// Each value by itself, the others being defaults: what nothing uses now is kept too, since a
// budget or a program may use it.
TEST(Config, EveryValueIsDumped) {
  const std::vector<std::function<void(Config&)>> changes{
      [](Config& c) { c.stage = 1; },
      [](Config& c) { c.micro_batch_size = 3; },
      [](Config& c) { c.gradient_clipping = 0.25; },
      [](Config& c) { c.layer_major_accumulation = true; },
      [](Config& c) { c.update_in_forward = false; },
      [](Config& c) { c.max_live_parameters = 7; },
      [](Config& c) { c.prefetch_bucket_size = 7; },
      [](Config& c) { c.memory_budget = 1 << 30; },
      [](Config& c) { c.device_memory = 1 << 30; },
      [](Config& c) { c.offload_param.nvme_path = "/disk"; },
      [](Config& c) { c.offload_param.buffer_count = 7; },
      [](Config& c) { c.offload_param.max_in_cpu = 7; },
      [](Config& c) { c.offload_optimizer.nvme_path = "/disk"; },
      [](Config& c) { c.offload_optimizer.buffer_count = 7; },
      [](Config& c) { c.offload_optimizer.pipeline_read = false; },
      [](Config& c) { c.offload_optimizer.pipeline_write = false; },
      [](Config& c) { c.offload_optimizer.ratio = 0.3; },
      [](Config& c) { c.offload_optimizer.delayed_update_after = 40; },
      [](Config& c) { c.aio.block_size = 8192; },
      [](Config& c) { c.aio.queue_depth = 7; },
      [](Config& c) { c.aio.use_io_uring = false; },
      [](Config& c) { c.aio.checksums = false; },
      [](Config& c) { c.activation_checkpointing.every = 2; },
      [](Config& c) { c.activation_checkpointing.contiguous_memory_optimization = true; },
      [](Config& c) { c.activation_checkpointing.nvme_path = "/disk"; },
      [](Config& c) { c.tile_elements = 7; },
      [](Config& c) { c.one_sided_gather = false; },
      [](Config& c) { c.seed_by_rank = false; },
      [](Config& c) { c.optimizer = AdamW{.lr = 0.1, .beta2 = 0.7, .bias_correction = false}; },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    Config config;
    changes[i](config);
    EXPECT_NE(config, Config()) << "change " << i;
    EXPECT_EQ(Config::parse(config.dump(), 1), config) << config.dump();
  }
}

TEST(Config, ReadsActivationCheckpointing) {
  const auto config = Config::parse(R"({"activation_checkpointing": {
    "partition_activations": true, "cpu_checkpointing": true, "synchronize_checkpoint_boundary": false,
    "profile": false, "number_checkpoints": 4, "contiguous_memory_optimization": true, "every": 2,
    "nvme": true, "nvme_path": "/disk"}, "aio": {"block_size": 8192}})",
                                    1);
  const ActivationCheckpointing expected{
      .every = 2, .contiguous_memory_optimization = true, .nvme = true, .nvme_path = "/disk"};
  EXPECT_EQ(config.activation_checkpointing, expected);
  const auto again = Config::parse(config.dump(), 1);
  EXPECT_EQ(again.activation_checkpointing, expected);
  EXPECT_EQ(again.aio.block_size, 8192);
  EXPECT_EQ(Config::parse("{}", 1).activation_checkpointing, ActivationCheckpointing());
  EXPECT_THAT(error_of(R"({"activation_checkpointing": {"evry": 2}})"),
              HasSubstr("Did you mean 'every'"));
  EXPECT_THAT(error_of(R"({"activation_checkpointing": {"every": -1}})"), HasSubstr("every is -1"));
  EXPECT_THAT(error_of(R"({"activation_checkpointing": {"nvme": true}})"),
              HasSubstr("activation_checkpointing.nvme is true, but nvme_path is missing"));
  EXPECT_THAT(error_of(R"({"activation_checkpointing": {"nvme": true, "nvme_path": "/disk"}})"),
              HasSubstr("but every is 0"));
}

TEST(Config, ReadsTheTilingOfLinearLayers) {
  EXPECT_EQ(Config::parse("{}", 1).tile_elements, 0);
  const auto config = Config::parse(R"({"tiling": {"max_elements": 4e6}})", 1);
  EXPECT_EQ(config.tile_elements, 4'000'000);
  EXPECT_EQ(Config::parse(config.dump(), 1).tile_elements, 4'000'000);
  EXPECT_THAT(error_of(R"({"tiling": {"max_elements": -1}})"),
              HasSubstr("tiling.max_elements is -1"));
  EXPECT_THAT(error_of(R"({"tiling": {"elements": 5}})"), HasSubstr("'tiling.elements'"));
}

TEST(Config, BatchRuleGivesTheThirdOfTwo) {
  EXPECT_EQ(Config::parse(R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2})", 2)
                .gradient_accumulation_steps,
            3);
  EXPECT_EQ(Config::parse(R"({"train_batch_size": 12, "gradient_accumulation_steps": 3})", 2)
                .micro_batch_size,
            2);
  EXPECT_EQ(Config::parse(R"({"train_batch_size": 12})", 2).micro_batch_size, 6);
  EXPECT_EQ(
      Config::parse(R"({"train_micro_batch_size_per_gpu": 2})", 2).gradient_accumulation_steps, 1);
  EXPECT_THAT(error_of(R"({"train_batch_size": 13, "train_micro_batch_size_per_gpu": 2})"),
              HasSubstr("2 x 3 x 2 = 12"));
}

TEST(Config, KeysOfDeepSpeedThatNeedNoChoiceAreAcceptedAndModesThatAreNotThereRefused) {
  const auto config = Config::parse(R"({"zero_optimization": {
      "stage": 3, "contiguous_gradients": true, "overlap_comm": null, "reduce_scatter": true,
      "reduce_bucket_size": 5e8, "sub_group_size": 1e9, "stage3_max_live_parameters": 7,
      "stage3_max_reuse_distance": 1e9, "stage3_param_persistence_threshold": "auto",
      "stage3_gather_16bit_weights_on_model_save": true, "mics_shard_size": -1,
      "zero_hpz_partition_size": 1, "zero_quantized_weights": false}})",
                                    1);
  EXPECT_EQ(config.stage, 3);
  EXPECT_EQ(config.max_live_parameters, 7);
  EXPECT_THAT(error_of(R"({"zero_optimization": {"zero_quantized_gradients": true}})"),
              HasSubstr("zero_optimization.zero_quantized_gradients is true"));
  EXPECT_THAT(error_of(R"({"zero_optimization": {"zero_hpz_partition_size": 8}})"),
              HasSubstr("zero_hpz_partition_size is 8; it must be 1"));
  EXPECT_THAT(error_of(R"({"zero_optimization": {"overlap_comm": 3}})"),
              HasSubstr("overlap_comm is 3; it must be true or false"));
}

TEST(Config, AutoMeansTheDefault) {
  EXPECT_EQ(Config::parse(R"({"gradient_clipping": "auto"})", 1).gradient_clipping,
            Config().gradient_clipping);
}

TEST(Config, WrongInputIsNamedWithItsValueAndTheRemedy) {
  EXPECT_THAT(error_of(R"({"gradient_cliping": 1})"),
              HasSubstr("Did you mean 'gradient_clipping'"));
  EXPECT_THAT(error_of(R"({"zero_optimization": {"stag": 1}})"),
              HasSubstr("'zero_optimization.stag' in the configuration. Did you mean 'stage'"));
  EXPECT_THAT(error_of(R"({"zero_optimization": {"stage": 7}})"),
              HasSubstr("zero_optimization.stage is 7"));
  EXPECT_THAT(error_of(R"({"zero_optimization": {"stage": 1.5}})"),
              HasSubstr("zero_optimization.stage is 1.5"));
  EXPECT_THAT(error_of(R"({"gradient_clipping": -1})"), HasSubstr("gradient_clipping is -1"));
  EXPECT_THAT(error_of(R"({"bf16": {"enabled": "yes"}})"),
              HasSubstr("bf16.enabled is \"yes\"; it must be true or false"));
  EXPECT_THAT(error_of(R"({"bf16": true})"), HasSubstr("bf16 is true; it must be an object"));
  EXPECT_THAT(error_of(R"({"gradient_clipping": 1, "gradient_clipping": 2})"),
              HasSubstr("stands twice"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adamw"}})"), HasSubstr("Did you mean 'AdamW'"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "AdamW", "params": {"betas": 1}}})"),
              HasSubstr("optimizer.params.betas is 1"));
  EXPECT_THAT(error_of(R"({"data_types": {"grad_accum_dtype": "fp8"}})"),
              HasSubstr("grad_accum_dtype"));
  EXPECT_THAT(error_of("{"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error_of("[]"), HasSubstr("must be an object"));
  EXPECT_THROW(Config::load("/no/such/file.json", 1), ConfigError);
}

}  // namespace
}  // namespace zero
