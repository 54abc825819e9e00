// Configuration files with DeepSpeed's keys.
#include "zero/config/config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/config/settings.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string error_of(std::string_view text, int world = 2) {
  return message_of<ConfigError>([&] { Config::parse(text, world); });
}

std::string warning_of(std::string_view text, bool lenient = false) {
  std::string all;
  const auto warn = [&](std::string_view warning) { all += std::string(warning) + "\n"; };
  (void)Settings::parse(text, 2, "ds.json", {.lenient = lenient, .warn = warn});
  return all;
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
  config.optimizer.emplace(Sgd{.lr = 0.1, .momentum = 0.9, .nesterov = true});
  EXPECT_EQ(Config::parse(config.dump(), 1), config);
  EXPECT_EQ(Config::parse(Config().dump(), 1), Config());
}

TEST(Config, ReadsActivationCheckpointing) {
  const auto settings = Settings::parse(R"({"activation_checkpointing": {
    "partition_activations": true, "cpu_checkpointing": true, "synchronize_checkpoint_boundary": false,
    "profile": false, "number_checkpoints": 4, "contiguous_memory_optimization": true, "every": 2,
    "nvme": true, "nvme_path": "/disk"}, "aio": {"block_size": 8192}})",
                                        1);
  const ActivationCheckpointing expected{
      .every = 2, .contiguous_memory_optimization = true, .nvme = true, .nvme_path = "/disk"};
  EXPECT_EQ(settings.model.activation_checkpointing, expected);
  const auto again = Settings::parse(settings.dump(), 1);
  EXPECT_EQ(again.model.activation_checkpointing, expected);
  EXPECT_EQ(again.engine.aio.block_size, 8192);
  EXPECT_EQ(Settings::parse("{}", 1).model, ModelSettings());
  EXPECT_EQ(Settings::parse(R"({"activation_checkpointing": {"every": 0}})", 1).model,
            ModelSettings());
  // DeepSpeed passes over unknown keys of this section.
  EXPECT_THAT(warning_of(R"({"activation_checkpointing": {"evry": 2}})"),
              HasSubstr("Did you mean 'every'"));
  EXPECT_THAT(
      warning_of(R"({"activation_checkpointing": {"contiguous_memory_optimization": true}})"),
      HasSubstr("`every` is 0"));
  EXPECT_THAT(error_of(R"({"activation_checkpointing": {"every": -1}})"), HasSubstr("every is -1"));
  EXPECT_THAT(error_of(R"({"activation_checkpointing": {"nvme": true}})"),
              HasSubstr("activation_checkpointing.nvme is true, but nvme_path is missing"));
  EXPECT_THAT(error_of(R"({"activation_checkpointing": {"nvme": true, "nvme_path": "/disk"}})"),
              HasSubstr("but every is 0"));
}

TEST(Config, ReadsTheTilingOfLinearLayers) {
  EXPECT_EQ(Settings::parse("{}", 1).model.tile_elements, std::nullopt);
  const auto settings = Settings::parse(R"({"tiling": {"max_elements": 4e6}})", 1);
  EXPECT_EQ(settings.model.tile_elements, 4'000'000);
  EXPECT_EQ(Settings::parse(settings.dump(), 1).model.tile_elements, 4'000'000);
  EXPECT_THAT(error_of(R"({"tiling": {"max_elements": -1}})"),
              HasSubstr("tiling.max_elements is -1"));
  EXPECT_THAT(error_of(R"({"tiling": {"elements": 5}})"), HasSubstr("'tiling.elements'"));
}

TEST(Config, BatchRuleGivesTheThirdOfTwo) {
  EXPECT_EQ(Config::parse(R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2})", 2)
                .gradient_accumulation_steps,
            3);
  EXPECT_EQ(Settings::parse(R"({"train_batch_size": 12, "gradient_accumulation_steps": 3})", 2)
                .program.micro_batch_size,
            2);
  EXPECT_EQ(Settings::parse(R"({"train_batch_size": 12})", 2).program.micro_batch_size, 6);
  EXPECT_EQ(Settings::parse("{}", 2).program.micro_batch_size, std::nullopt);
  EXPECT_EQ(
      Config::parse(R"({"train_micro_batch_size_per_gpu": 2})", 2).gradient_accumulation_steps, 1);
  EXPECT_THAT(error_of(R"({"train_batch_size": 13, "train_micro_batch_size_per_gpu": 2})"),
              HasSubstr("2 x 3 x 2 = 12"));
  // Products beyond 64 bits.
  EXPECT_THAT(error_of(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3e9,
                           "gradient_accumulation_steps": 4e9})"),
              HasSubstr("= 2.4e+19"));
}

TEST(Config, KeysOfDeepSpeedThatNeedNoChoiceAreAccepted) {
  const auto config = Config::parse(R"({"zero_optimization": {
      "stage": 3, "contiguous_gradients": true, "overlap_comm": null, "reduce_scatter": true,
      "reduce_bucket_size": 5e8, "sub_group_size": 1e9, "stage3_max_live_parameters": 7,
      "stage3_max_reuse_distance": 1e9, "stage3_param_persistence_threshold": "auto",
      "stage3_gather_16bit_weights_on_model_save": true, "mics_shard_size": -1,
      "zero_hpz_partition_size": 1, "zero_quantized_weights": false}})",
                                    1);
  EXPECT_EQ(config.stage, 3);
  EXPECT_EQ(config.max_live_parameters, 7);
  EXPECT_THAT(error_of(R"({"zero_optimization": {"overlap_comm": 3}})"),
              HasSubstr("overlap_comm is 3; it must be true or false"));
}

TEST(Config, ReadsDeepSpeedsKeysForSeveralHosts) {
  const auto config = Config::parse(R"({"zero_optimization": {
      "stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": true,
      "zero_quantized_nontrainable_weights": true, "zero_quantized_gradients": true,
      "zero_quantized_weights_format": "fp8", "zero_quantized_gradients_format": "int8",
      "zero_quantized_block_size": 256, "mics_hierarchical_params_gather": true,
      "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 7}}})",
                                    1);
  EXPECT_EQ(config.hpz_partition_size, 8);
  EXPECT_TRUE(config.quantised.weights);
  EXPECT_TRUE(config.quantised.frozen_weights);
  EXPECT_TRUE(config.quantised.gradients);
  EXPECT_EQ(config.quantised.weights_format, comm::WireFormat::fp8);
  EXPECT_EQ(config.quantised.gradients_format, comm::WireFormat::int8);
  EXPECT_EQ(config.quantised.block, 256);
  EXPECT_EQ(config.quantised.feedback, (ErrorFeedback{.beta = 0.5, .reset_every = 7}));
  EXPECT_EQ(Config::parse(config.dump(), 1), config);
  EXPECT_EQ(Config::parse(R"({"zero_optimization": {"stage": 3, "mics_shard_size": 4}})", 1)
                .mics_shard_size,
            4);
}

// DeepSpeed too quantises, keeps or replicates nothing that was not asked for.
TEST(Config, OfSeveralHostsNothingIsChosenByDefault) {
  const auto config = Config::parse(
      R"({"zero_optimization": {"stage": 3, "zeropp_loco_param": null, "mics_shard_size": -1,
          "zero_hpz_partition_size": 1, "zero_quantized_weights": false}})",
      1);
  EXPECT_FALSE(config.quantised.any());
  EXPECT_EQ(config.quantised, QuantisedLinks());
  EXPECT_EQ(config.hpz_partition_size, 1);
  EXPECT_EQ(config.mics_shard_size, -1);
  const auto quantised =
      Config::parse(R"({"zero_optimization": {"stage": 3, "zero_quantized_gradients": true,
                        "zeropp_loco_param": {}}})",
                    1)
          .quantised;
  EXPECT_EQ(quantised.gradients_format, comm::WireFormat::int4);
  EXPECT_EQ(quantised.weights_format, comm::WireFormat::int8);
  EXPECT_EQ(quantised.feedback, (ErrorFeedback{.beta = 0.8, .reset_every = 1024}));
}

TEST(Config, OfSeveralHostsWhatCannotBeIsRefused) {
  const auto refused = [](const std::string& keys) {
    return error_of(R"({"zero_optimization": {)" + keys + "}}");
  };
  for (const char* key : {"zero_quantized_weights", "zero_quantized_nontrainable_weights",
                          "zero_quantized_gradients"}) {
    EXPECT_THAT(refused("\"stage\": 2, \"" + std::string(key) + "\": true"),
                AllOf(HasSubstr(std::string("zero_optimization.") + key + " is true"),
                      HasSubstr("the stage is 2"), HasSubstr("Set the stage to 3")));
  }
  EXPECT_THAT(refused(R"("stage": 1, "zero_hpz_partition_size": 8)"),
              HasSubstr("zero_hpz_partition_size is 8, but the stage is 1"));
  EXPECT_THAT(refused(R"("stage": 0, "mics_shard_size": 8)"),
              HasSubstr("mics_shard_size is 8, but the stage is 0"));
  EXPECT_THAT(refused(R"("stage": 3, "mics_shard_size": 0)"), HasSubstr("mics_shard_size is 0"));
  EXPECT_THAT(refused(R"("stage": 3, "zero_hpz_partition_size": 0)"),
              HasSubstr("zero_hpz_partition_size is 0; it must be a whole number, at least 1"));
  EXPECT_THAT(refused(R"("stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 4)"),
              HasSubstr("Leave one of them out"));
  EXPECT_THAT(refused(R"("stage": 3, "mics_shard_size": 4, "zero_quantized_gradients": true)"),
              HasSubstr("sums of replicas are not quantised"));
  // DeepSpeed too says nothing without them.
  EXPECT_EQ(Config::parse(R"({"zero_optimization": {"stage": 3,
                             "zeropp_loco_param": {"err_beta": 0.8}}})",
                          2)
                .quantised.feedback,
            std::nullopt);
  EXPECT_THAT(refused(R"("stage": 3, "zero_quantized_block_size": 100)"),
              HasSubstr("zero_quantized_block_size is 100; it must be a whole number from 64 to "
                        "256, a multiple of 64"));
  EXPECT_THAT(refused(R"("stage": 3, "zero_quantized_weights_format": "int16")"),
              HasSubstr("\"int8\", \"int4\" or \"fp8\""));
  EXPECT_THAT(
      refused(R"("stage": 3, "zeropp_loco_param": {"err_beta": 1})"),
      HasSubstr("zero_optimization.zeropp_loco_param.err_beta is 1; it must be a number, at "
                "least 0 and less than 1"));
  EXPECT_THAT(refused(R"("stage": 3, "zeropp_loco_param": {"err_bete": 0.5})"),
              HasSubstr("Did you mean 'err_beta'?"));
}

// A value of C++ is checked as one of a file is.
TEST(Config, AnErrorFeedbackOfCppIsCheckedToo) {
  Config config{.stage = 3};
  config.quantised.gradients = true;
  config.quantised.feedback = ErrorFeedback{.beta = 1.5};
  EXPECT_THAT([&] { config.validate(); },
              testing::ThrowsMessage<ConfigError>(HasSubstr("err_beta is 1.5")));
}

TEST(Config, AKeyMayHaveItsOtherName) {
  const auto config = Config::parse(
      R"({"zero_optimization": {"max_live_parameters": 7, "prefetch_bucket_size": 8,
          "stage3_gather_fp16_weights_on_model_save": true,
          "param_persistence_threshold": 1e5}})",
      1);
  EXPECT_EQ(config.max_live_parameters, 7);
  EXPECT_EQ(config.prefetch_bucket_size, 8);
  EXPECT_THAT(error_of(R"({"zero_optimization": {"max_live_parameters": 7,
                                                 "stage3_max_live_parameters": 7}})"),
              HasSubstr("two names of one key"));
}

TEST(Config, ReadsFp16AndItsLossScale) {
  const auto c = Config::parse(R"({"fp16": {"enabled": true, "auto_cast": false, "loss_scale": 0,
      "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
      "consecutive_hysteresis": true, "min_loss_scale": 2}})",
                               1);
  EXPECT_TRUE(c.fp16);
  const LossScaling expected{.initial_power = 12,
                             .window = 500,
                             .hysteresis = 3,
                             .consecutive_hysteresis = true,
                             .minimum = 2};
  EXPECT_EQ(c.loss_scaling, expected);
  EXPECT_EQ(Config::parse(c.dump(), 1), c);
  EXPECT_EQ(Config::parse(R"({"fp16": {"enabled": "auto", "loss_scale": 0,
      "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}})",
                          1),
            Config());
  EXPECT_EQ(
      Config::parse(R"({"fp16": {"enabled": true, "loss_scale": 128, "min_loss_scale": 0}})", 1)
          .loss_scaling.fixed,
      128);
  EXPECT_THAT(error_of(R"({"fp16": {"enabled": true, "loss_scale_window": 0}})"),
              HasSubstr("loss_scale_window is 0"));
  EXPECT_THAT(error_of(R"({"fp16": {"enabled": true, "loss_scale": -1}})"),
              HasSubstr("fp16.loss_scale is -1"));
  EXPECT_THAT(error_of(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"),
              HasSubstr("both true"));
  EXPECT_THAT(error_of(R"({"fp16": {"enabled": true}, "update_in_backward": true,
                           "gradient_clipping": 0, "zero_optimization": {"stage": 3}})"),
              HasSubstr("not all optimizer states are on disk"));
  EXPECT_THAT(error_of(R"({"data_types": {"grad_accum_dtype": "fp16"}})"),
              HasSubstr("fp16.enabled is false"));
}

TEST(Config, ReadsTheFormatOfOptimizerStates) {
  using optim::StateFormat;
  const auto of = [](const std::string& word) {
    return Config::parse(R"({"data_types": {"optimizer_state_dtype": ")" + word + R"("}})", 1);
  };
  EXPECT_EQ(Config().optimizer_states, StateFormat::fp32);
  EXPECT_EQ(of("fp32"), Config());
  EXPECT_EQ(of("bf16").optimizer_states, StateFormat::bf16);
  for (const auto* word : {"8bit", "int8", "8-bit", "fp8", "INT8"})
    EXPECT_EQ(of(word).optimizer_states, StateFormat::eight_bit) << word;
  EXPECT_EQ(Config::parse(of("int8").dump(), 1), of("8bit"));
  EXPECT_THAT(error_of(R"({"data_types": {"optimizer_state_dtype": "int4"}})"),
              HasSubstr("data_types.optimizer_state_dtype"));
  EXPECT_THAT(error_of(R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
                           "bf16_optimizer_states": true},
                           "data_types": {"optimizer_state_dtype": "8bit"}})"),
              HasSubstr("kept in one format"));
}

TEST(Config, ReadsBf16) {
  const auto c = Config::parse(R"({"bf16": {"enabled": true, "check_grad_overflow": false,
      "immediate_grad_update": true}})",
                               1);
  EXPECT_TRUE(c.bf16);
  EXPECT_FALSE(c.check_grad_overflow);
  const auto narrow = Config::parse(R"({"bf16": {"enabled": true,
      "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}})",
                                    1);
  EXPECT_TRUE(narrow.bf16_master_weights_and_grads);
  EXPECT_TRUE(narrow.bf16_optimizer_states);
  EXPECT_EQ(Config::parse(narrow.dump(), 1), narrow);
  // Nothing of a section that is off is in force.
  EXPECT_EQ(Config::parse(R"({"bf16": {"enabled": false, "bf16_optimizer_states": true,
                             "bf16_master_weights_and_grads": true}})",
                          1),
            Config());
  EXPECT_EQ(
      Config::parse(R"({"fp16": {"enabled": false, "fp16_master_weights_and_grads": true}})", 1),
      Config());
  Config contradicts;
  contradicts.bf16_master_weights_and_grads = true;
  EXPECT_THAT(message_of<ConfigError>([&] { contradicts.validate(); }),
              HasSubstr("bf16.enabled is false"));
  EXPECT_THAT(error_of(R"({"bf16": {"enabled": true, "bf16_optimizer_states": true}})"),
              HasSubstr("bf16_master_weights_and_grads is false"));
  EXPECT_THAT(error_of(R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
                           "split_master_weights": true}})"),
              HasSubstr("no fp32 master weight to split"));
  EXPECT_THAT(error_of(R"({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}})"),
              HasSubstr("bf16.bf16_master_weights_and_grads"));
  EXPECT_EQ(Config::parse(c.dump(), 1), c);
}

TEST(Config, ReadsHowGradientsAreReduced) {
  const auto c = Config::parse(R"({"communication_data_type": "bf16", "prescale_gradients": true,
      "gradient_predivide_factor": 4})",
                               1);
  EXPECT_EQ(c.communication_dtype, DtypeName::bf16);
  EXPECT_TRUE(c.prescale_gradients);
  EXPECT_EQ(c.gradient_predivide_factor, 4);
  EXPECT_EQ(Config::parse(c.dump(), 1), c);
  EXPECT_EQ(Config::parse(R"({"communication_data_type": null})", 1), Config());
  EXPECT_THAT(error_of(R"({"communication_data_type": "fp8"})"),
              HasSubstr("\"fp32\", \"fp16\" or \"bf16\""));
  EXPECT_THAT(error_of(R"({"communication_data_type": "fp16", "bf16": {"enabled": true}})"),
              HasSubstr("Use \"bf16\" or \"fp32\""));
  EXPECT_THAT(error_of(R"({"communication_data_type": "bf16", "fp16": {"enabled": true}})"),
              HasSubstr("Use \"fp16\" or \"fp32\""));
  EXPECT_THAT(error_of(R"({"gradient_predivide_factor": 0})"), HasSubstr("above 0"));
}

TEST(Config, TextThatIsNoConfigurationIsAnErrorOfOurs) {
  const std::string deep(1'000'000, '[');
  EXPECT_THAT(error_of(deep), HasSubstr("deep"));
  EXPECT_THAT(error_of("{\"zero_optimization\": " + deep), HasSubstr("deep"));
  std::string objects;
  for (int i = 0; i < 200'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(error_of(objects), HasSubstr("deep"));
  // Errors show values in full at a depth that they can show.
  EXPECT_THAT(error_of(std::string(30, '[') + std::string(30, ']')), HasSubstr("an object"));
  EXPECT_THAT(error_of(R"({"bf16": {"enabled": true, "enabled": true}})"),
              HasSubstr("names 'enabled' twice"));
  EXPECT_THAT(error_of(R"({"gradient_clipping": NaN})"), HasSubstr("is not JSON"));
  EXPECT_THAT(error_of(R"({"gradient_clipping": 1e999})"), HasSubstr("is not JSON"));
  EXPECT_THAT(error_of("{\"train\": {\"prompt\": \"\xff\"}}"), HasSubstr("is not JSON"));
  EXPECT_THAT(error_of(""), HasSubstr("is not JSON"));
  const std::string long_key(1'000'000, 'k');
  EXPECT_LT(error_of("{\"" + long_key + "\": 1}").size(), 1000u);
  EXPECT_LT(error_of("{\"gradient_clipping\": \"" + long_key + "\"}").size(), 1000u);
}

TEST(Config, IsReadAsPeopleWriteIt) {
  const auto config = Config::parse(R"(# a comment as HJSON has it
    { // and JavaScript's
      "zero_optimization": {"stage": 2, /* and C's, with a comma, */ }, # and one behind a value
      "_comment": "a note", "//": ["another"], "#": 3,
      "optimizer": {"type": "AdamW", "params": {"betas": [0.5, 0.75,], },},
      "memory_budget": "1 GB" // "quoted", # }
    })",
                                    1);
  EXPECT_EQ(config.stage, 2);
  EXPECT_EQ(std::get<AdamW>(*config.optimizer).beta2, 0.75);
  EXPECT_EQ(config.memory_budget, int64_t{1} << 30);
  EXPECT_EQ(Settings::parse(R"({"train": {"prompt": "// no # comment /* here */, }"}})", 1)
                .program.prompt,
            "// no # comment /* here */, }");
  EXPECT_EQ(Settings::parse(R"({"train": {"prompt": "a \\\" , ] // quote"},})", 1).program.prompt,
            "a \\\" , ] // quote");
  for (const char* wrong : {"{,}", "[,]", R"({"train": {"seq": 1,,}})", R"({"train": {"seq":,}})",
                            R"({"train": /* without an end)", "{} {}"})
    EXPECT_THAT(error_of(wrong), HasSubstr("is not JSON")) << wrong;
  // An error is where the text has it.
  EXPECT_THAT(error_of("{ # comment\n \"gradient_clipping\": x}"), HasSubstr("line 2, column 23"));
}

TEST(Config, WhatHasNoEffectIsOneWarning) {
  std::vector<std::string> warnings;
  const ReadOptions options{.warn = [&](std::string_view text) { warnings.emplace_back(text); }};
  Config::parse(R"({"zero_optimization": {"stage": 2, "overlap_comm": true,
      "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "legacy_stage1": true},
      "wandb": {"enabled": true, "project": "x"}, "flops_profiler": {"enabled": false},
      "comet": {"enabled": true, "workspace": "g"}, "nebula": {"load_path": "g"}, "tensorboard": {"enabled": true, "output_path": "x"}})",
                1, "ds.json", options);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0],
              AllOf(HasSubstr("ds.json: these keys have no effect here:\n"),
                    HasSubstr("  zero_optimization.allgather_bucket_size, reduce_bucket_size: "
                              "`unit_bytes` is"),
                    HasSubstr("  zero_optimization.legacy_stage1: "),
                    HasSubstr("  comet: libzero sends nothing"),
                    HasSubstr("  wandb: libzero writes nothing"), HasSubstr("`wandb sync DIR`")));
  for (const char* silent : {"overlap_comm", "flops_profiler", "nebula", "project", "output_path"})
    EXPECT_THAT(warnings[0], testing::Not(HasSubstr(silent)));
}

TEST(Config, WhatIsNotHereIsRefusedOrPassedOver) {
  const std::string text = R"({"sparse_attention": {"block": 16}, "bogus": 1,
      "curriculum_learning": {"enabled": true}, "zero_optimization": {"stage": 1}})";
  EXPECT_THAT(error_of(text), HasSubstr("Unknown key 'bogus'"));
  const auto known = std::string(text).replace(text.find("bogus"), 5, "_bogus");
  EXPECT_THAT(error_of(known),
              AllOf(HasSubstr("curriculum_learning: libzero draws all sequences"),
                    HasSubstr("\nsparse_attention.block: libzero has no sparse attention")));
  std::string warning;
  const ReadOptions lenient{.lenient = true,
                            .warn = [&](std::string_view told) { warning = told; }};
  EXPECT_EQ(Config::parse(text, 1, "ds.json", lenient).stage, 1);
  EXPECT_THAT(warning, AllOf(HasSubstr("Unknown key 'bogus'"), HasSubstr("sparse_attention"),
                             HasSubstr("curriculum_learning")));
  // A wrong value has no reading.
  EXPECT_THAT([&] { Config::parse(R"({"gradient_clipping": -1})", 1, "ds.json", lenient); },
              testing::ThrowsMessage<ConfigError>(HasSubstr("gradient_clipping is -1")));
}

TEST(Config, EveryFindingOfAFileIsTold) {
  const auto findings = Settings::check(R"({"zero_optimization": {"stage": 9, "overlap_comm": true},
      "gradient_cliping": 1, "comet": {"enabled": false}, "memory_breakdown": true,
      "gradient_accumulation_steps": 2, "optimizer": {"type": "SGD", "params": {"lrr": 1}}})",
                                        1);
  const auto effect_of = [&](std::string_view key) {
    for (const auto& finding : findings) {
      if (finding.key == key) return finding.effect;
    }
    ADD_FAILURE() << key << " is not told of";
    return Effect::acts;
  };
  EXPECT_EQ(effect_of("zero_optimization.stage"), Effect::refused);
  EXPECT_EQ(effect_of("zero_optimization.overlap_comm"), Effect::holds);
  EXPECT_EQ(effect_of("gradient_cliping"), Effect::refused);
  EXPECT_EQ(effect_of("comet.enabled"), Effect::off);
  EXPECT_EQ(effect_of("memory_breakdown"), Effect::none);
  EXPECT_EQ(effect_of("gradient_accumulation_steps"), Effect::acts);
  EXPECT_EQ(effect_of("optimizer.params.lrr"), Effect::refused);
}

TEST(Config, WhatIsOffOrLeftToTheDefaultDoesNotAct) {
  const auto findings = Settings::check(R"({"fp16": {"enabled": false, "loss_scale": 0},
      "bf16": {"enabled": "auto", "bf16_optimizer_states": true}, "gradient_clipping": "auto",
      "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "buffer_count": 4},
                            "offload_param": {"device": "cpu", "buffer_count": 6}}})",
                                        1);
  const auto old = Settings::check(R"({"zero_optimization": {"stage": 1, "cpu_offload": true,
                                       "offload_optimizer": {"buffer_count": 4}}})",
                                   1);
  for (const auto& finding : old) EXPECT_EQ(finding.effect, Effect::acts) << finding.key;
  const auto effects_of = [&](std::string_view key) {
    std::vector<Effect> effects;
    for (const auto& finding : findings) {
      if (finding.key == key) effects.push_back(finding.effect);
    }
    return effects;
  };
  using testing::ElementsAre;
  for (const char* key : {"fp16.enabled", "fp16.loss_scale", "bf16.bf16_optimizer_states",
                          "zero_optimization.offload_optimizer.device",
                          "zero_optimization.offload_optimizer.buffer_count"})
    EXPECT_THAT(effects_of(key), ElementsAre(Effect::off)) << key;
  for (const char* key : {"bf16.enabled", "gradient_clipping"})
    EXPECT_THAT(effects_of(key), ElementsAre(Effect::holds)) << key;
  EXPECT_THAT(effects_of("zero_optimization.stage"), ElementsAre(Effect::acts));
  // One thing is said of one section.
  EXPECT_THAT(effects_of("zero_optimization.offload_param"), ElementsAre(Effect::none));
  EXPECT_THAT(effects_of("zero_optimization.offload_param.device"), ElementsAre());
}

TEST(Config, ACheckGoesOnBehindWhatIsRefused) {
  const auto findings = Settings::check(R"({"zero_optimization": {"stage": 9, "cpu_offload": "yes"},
      "gradient_clipping": -1, "train_batch_size": 1e300, "gradient_accumulation_steps": -1e300,
      "train_micro_batch_size_per_gpu": 18446744073709551615})",
                                        1);
  std::vector<std::string> refused;
  for (const auto& finding : findings) {
    if (finding.effect == Effect::refused) refused.push_back(finding.key);
  }
  EXPECT_THAT(refused, testing::IsSupersetOf({"zero_optimization.stage",
                                              "zero_optimization.cpu_offload", "gradient_clipping",
                                              "train_batch_size", "gradient_accumulation_steps",
                                              "train_micro_batch_size_per_gpu"}));
}

TEST(Config, UnknownKeysOfASectionThatIsSaidToBeOffAreAWarning) {
  EXPECT_THAT(warning_of(R"({"comet": {"enabled": false, "workspace": 5, "entity": "us"}})"),
              HasSubstr("Unknown key 'comet.entity'"));
  EXPECT_THAT(warning_of(R"({"aio": {"enabled": true}})"), HasSubstr("Unknown key 'aio.enabled'"));
  EXPECT_THAT(error_of(R"({"comet": {"enabled": true, "entity": "us"}})"),
              HasSubstr("Unknown key 'comet.entity'"));
  EXPECT_THAT(error_of(R"({"fp16": {"enabld": true}})"), HasSubstr("Did you mean 'enabled'"));
}

TEST(Config, ReadsDtypesAsTheyAreSpelt) {
  for (const char* name : {"bf16", "bfloat16", "BFloat16", "torch.bfloat16"}) {
    const auto c = Config::parse(fmt::format(R"({{"bf16": {{"enabled": true}},
        "communication_data_type": "{0}", "data_types": {{"grad_accum_dtype": "{0}"}}}})",
                                             name),
                                 1);
    EXPECT_EQ(c.accumulation_dtype, AccumulationDtype::model);
    EXPECT_EQ(c.communication_dtype, DtypeName::bf16);
  }
  EXPECT_EQ(Config::parse(R"({"communication_data_type": "FP32"})", 1).communication_dtype,
            DtypeName::fp32);
  EXPECT_THAT(error_of(R"({"data_types": {"grad_accum_dtype": "float16"}})"),
              HasSubstr("fp16.enabled is false"));
  EXPECT_THAT(error_of(R"({"communication_data_type": "int8"})"),
              HasSubstr("communication_data_type is \"int8\""));
}

TEST(Config, WhereLenientVariantsThatAreNotHereArePassedOver) {
  constexpr const char* kText = R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})";
  EXPECT_THAT(error_of(kText), HasSubstr("amsgrad is true; it must be false"));
  EXPECT_THAT(warning_of(kText, true), HasSubstr("optimizer.params.amsgrad"));
}

TEST(Config, AFolderIsNoFile) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of<ConfigError>([&] { Config::load(folder / ".", 1); }),
              HasSubstr("Check that it is a file"));
}

TEST(Config, ASchedulesParametersAreItsOwn) {
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}})"),
              HasSubstr("scheduler.params.cycle_max_lr is missing"));
  EXPECT_THAT(error_of(R"({"scheduler": {"params": {"warmup_num_steps": 1}}})"),
              HasSubstr("scheduler.type is missing"));
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 1}}})"),
              HasSubstr("Unknown key 'scheduler.params.total_num_steps'"));
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "WarmupLr"}})"),
              HasSubstr("Did you mean 'WarmupLR'?"));
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "WSD"}, "train": {"min_lr": 1e-5}})"),
              HasSubstr("train.min_lr is 1e-05, but the section scheduler decides the rate"));
  EXPECT_EQ(Settings::parse(R"({"scheduler": null})", 1).scheduler, std::nullopt);
  EXPECT_EQ(Settings::parse(R"({"scheduler": {}})", 1).scheduler, std::nullopt);
}

TEST(Config, NumbersThatDoNotFitAreRefused) {
  const auto live = [](const std::string& number) {
    return R"({"zero_optimization": {"stage3_max_live_parameters": )" + number + "}}";
  };
  EXPECT_EQ(Config::parse(live("9223372036854775807"), 1).max_live_parameters,
            std::numeric_limits<int64_t>::max());
  for (const char* number : {"9223372036854775808", "1e19", "18446744073709551616", "1e300"}) {
    EXPECT_THAT(error_of(live(number)),
                AllOf(HasSubstr("stage3_max_live_parameters is "), HasSubstr("whole number"),
                      HasSubstr("9223372036854775807")));
  }
  EXPECT_THAT(error_of(live("-1e300")), HasSubstr("a whole number, at least 0"));
  EXPECT_THAT(error_of(R"({"zero_optimization": {"stage": 4294967297}})"),
              HasSubstr("stage is 4294967297; it must be 0, 1, 2 or 3"));
  Config config;
  config.gradient_clipping = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT([&] { config.validate(); },
              testing::ThrowsMessage<ConfigError>(HasSubstr("gradient_clipping is nan")));
}

TEST(Config, AFileIsNamedInItsErrors) {
  const TemporaryFolder folder;
  const std::string path = folder.write("ds.json", R"({"zero_optimization": {"stage": 5}})");
  EXPECT_THAT([&] { Config::load(path, 1); },
              testing::ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("ds.json"), HasSubstr("zero_optimization.stage is 5"))));
}

// C++ programs name what they want of the engine, and leave their generator to themselves.
TEST(Config, IsAPlainValue) {
  const Config config{.stage = 3, .offload_optimizer = {.device = OffloadDevice::cpu}};
  EXPECT_NO_THROW(config.validate());
  EXPECT_FALSE(config.seed_by_rank);
}

TEST(Config, AutoMeansTheDefault) {
  EXPECT_EQ(Settings::parse(R"({"gradient_clipping": "auto", "optimizer": null, "bf16": "auto",
                                "train_batch_size": "auto", "train": {"vocab_size": null}})",
                            1),
            Settings());
  EXPECT_EQ(Settings::parse(R"({"train": {"prompt": "auto"}})", 1).program.prompt, "auto");
}

// DeepSpeed's and PyTorch's names, in any case, with the defaults and the meaning that they have
// there.
TEST(Config, OptimizersAreNamedAsInDeepSpeedAndPyTorch) {
  const auto read = [](const std::string& section) {
    return Config::parse(R"({"optimizer": )" + section + "}", 1).optimizer.value();
  };
  const AdamW fused{.weight_decay = 0};
  for (const auto* name : {"Adam", "adam", "ADAMW", "FusedAdam", "DeepSpeedCPUAdam"})
    EXPECT_EQ(read(std::string(R"({"type": ")") + name + R"("})"), Optimizer(fused)) << name;
  auto l2 = fused;
  l2.decoupled = false;
  EXPECT_EQ(read(R"({"type": "Adam", "params": {"adam_w_mode": false, "torch_adam": true}})"),
            Optimizer(l2));
  EXPECT_EQ(read(R"({"type": "AdamW", "params": {"adam_w_mode": false}})"), Optimizer(fused));
  EXPECT_EQ(read(R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})"),
            Optimizer(Sgd{.lr = 0.1, .momentum = 0.9}));
  EXPECT_EQ(read(R"({"type": "adagrad", "params": {"lr": 0.1, "eps": 1e-8}})"),
            Optimizer(Adagrad{.lr = 0.1, .eps = 1e-8}));
  EXPECT_EQ(read(R"({"type": "Lion", "params": {"betas": [0.95, 0.98], "weight_decay": 0.1}})"),
            Optimizer(Lion{.lr = 1e-3, .beta1 = 0.95, .beta2 = 0.98, .weight_decay = 0.1}));
  EXPECT_EQ(read(R"({"type": "Lamb", "params": {"min_coeff": 0.1, "eps_inside_sqrt": true}})"),
            Optimizer(Lamb{.min_coeff = 0.1, .eps_inside_sqrt = true}));
  EXPECT_EQ(
      read(R"({"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3, "ns_method": "gram"}})"),
      Optimizer(Muon{.lr = 0.01, .adam_lr = 1e-3, .beta2 = 0.95, .eps = 1e-10}));
  // The rest has `lr`, and DeepSpeed's 3e-4 without that.
  EXPECT_EQ(read(R"({"type": "Muon", "params": {"muon_lr": 0.02, "lr": 0.01}})"),
            Optimizer(Muon{.lr = 0.02, .adam_lr = 0.01, .beta2 = 0.95, .eps = 1e-10}));
  EXPECT_EQ(read(R"({"type": "Muon", "params": {"lr": 0.01}})"),
            Optimizer(Muon{.lr = 0.01, .beta2 = 0.95, .eps = 1e-10}));
  EXPECT_EQ(read(R"({"type": "Muon", "params": {"muon_lr": 0.01}})"),
            Optimizer(Muon{.lr = 0.01, .adam_lr = 3e-4, .beta2 = 0.95, .eps = 1e-10}));
  // PyTorch's names, as DeepSpeed passes them on, and transformers'.
  EXPECT_EQ(read(R"({"type": "AdaFactor", "params": {"lr": 0.1, "beta2_decay": -0.7, "d": 2,
                     "eps": [null, 0.01], "weight_decay": 0.1, "foreach": false}})"),
            Optimizer(Adafactor{
                .lr = 0.1, .beta2_decay = -0.7, .eps2 = 0.01, .d = 2, .weight_decay = 0.1}));
  EXPECT_EQ(read(R"({"type": "Adafactor", "params": {"lr": null, "eps": [1e-20, 0.01],
                     "clip_threshold": 2, "decay_rate": -0.7, "beta1": null,
                     "scale_parameter": false, "relative_step": true, "warmup_init": true}})"),
            Optimizer(Adafactor{.beta2_decay = -0.7,
                                .eps1 = 1e-20,
                                .eps2 = 0.01,
                                .d = 2,
                                .scale_parameter = false,
                                .warmup_init = true,
                                .eps_added = true}));
  // The exact optimizers that these names approximate.
  EXPECT_EQ(read(R"({"type": "OneBitAdam", "params": {"freeze_step": 400, "cuda_aware": false,
                     "comm_backend_name": "nccl"}})"),
            Optimizer(fused));
  EXPECT_EQ(read(R"({"type": "ZeroOneAdam", "params": {"var_freeze_step": 1000}})"),
            Optimizer(fused));
  EXPECT_EQ(read(R"({"type": "OneBitLamb", "params": {"coeff_beta": 0.9, "max_coeff": 0.3}})"),
            Optimizer(Lamb{.max_coeff = 0.3}));

  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})"),
              HasSubstr("optimizer.params.amsgrad"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1}}})"),
              HasSubstr("gradient_clipping"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "MuAdamW"}})"), HasSubstr("parameter group"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adafactor", "params": {"beta1": 0.9}}})"),
              HasSubstr("no first moment"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adafactor", "params": {"maximize": true}}})"),
              HasSubstr("optimizer.params.maximize"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adafactor", "params": {"eps": [0, 1]}}})"),
              HasSubstr("eps[0]"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adafactor", "params": {"eps": [1, null]}}})"),
              HasSubstr("the first of which may be null"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adafactor",
                           "params": {"relative_step": false, "warmup_init": true}}})"),
              HasSubstr("warmup_init"));
  for (const auto* name : {"ScheduleFreeAdamW", "AdamWScheduleFree", "schedule_free_adamw"}) {
    EXPECT_EQ(read(std::string(R"({"type": ")") + name +
                   R"(", "params": {"lr": 0.1, "r": 0, "weight_lr_power": 2, "warmup_steps": 3}})"),
              Optimizer(ScheduleFreeAdamW{.lr = 0.1, .warmup_steps = 3}));
  }
  for (const auto* name : {"Apollo", "apollo_adamw"}) {
    EXPECT_EQ(read(std::string(R"({"type": ")") + name +
                   R"(", "params": {"rank": 8, "scale": 4, "update_proj_gap": 50,
                       "scale_type": "tensor", "adam_lr": 0.1, "betas": [0.8, 0.9]}})"),
              Optimizer(Apollo{.rank = 8,
                               .scale_type = Apollo::Scaling::tensor,
                               .alpha = 2,
                               .update_proj_gap = 50,
                               .adam_lr = 0.1,
                               .beta1 = 0.8,
                               .beta2 = 0.9}));
  }
  EXPECT_EQ(read(R"({"type": "apollo_mini"})"), Optimizer(Apollo::mini()));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Apollo", "params": {"rank": 0}}})"),
              HasSubstr("optimizer.params.rank"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Apollo", "params": {"norm_growth": 0.5}}})"),
              HasSubstr("norm_growth is 0.5, but it must be at least 1"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "schedule_free_adamw", "params": {"r": 1}}})"),
              HasSubstr("optimizer.params.r"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "RMSprop"}})"),
              HasSubstr("ZeroRedundancyOptimizer"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Lion", "params": {"eps": 1}}})"),
              HasSubstr("optimizer.params.eps"));

  for (const Optimizer& each :
       {Optimizer(AdamW{.lr = 1}), Optimizer(AdamW{.decoupled = false}), Optimizer(Sgd{.lr = 2}),
        Optimizer(Adagrad{.lr_decay = 0.5}), Optimizer(Lion{.beta2 = 0.5}),
        Optimizer(Lamb{.min_coeff = 1}), Optimizer(Muon{.lr = 1, .ns_steps = 7, .adam_lr = 2}),
        Optimizer(Adafactor{}), Optimizer(Adafactor{.d = 3, .eps_added = true}),
        Optimizer(Adafactor{.eps1 = 1e-9, .warmup_init = true, .factored = false}),
        Optimizer(ScheduleFreeAdamW{.beta1 = 0.95, .warmup_steps = 7}), Optimizer(Apollo::mini()),
        Optimizer(Apollo{.rank = 2, .norm_growth = 0, .seed = 9, .adam_lr = 0.5})}) {
    Config config;
    config.optimizer = each;
    EXPECT_EQ(Config::parse(config.dump(), 1).optimizer, each) << config.dump();
  }
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
              HasSubstr("names 'gradient_clipping' twice"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "AdamX"}})"), HasSubstr("Did you mean 'AdamW'"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "AdamW", "params": {"betas": 1}}})"),
              HasSubstr("optimizer.params.betas is 1"));
  EXPECT_THAT(error_of(R"({"data_types": {"grad_accum_dtype": "fp8"}})"),
              HasSubstr("grad_accum_dtype"));
  EXPECT_THAT(error_of("{"), HasSubstr("is not JSON"));
  EXPECT_THAT(error_of("[]"), HasSubstr("must be an object"));
  EXPECT_THROW(Config::load("/no/such/file.json", 1), ConfigError);
}

}  // namespace
}  // namespace zero
