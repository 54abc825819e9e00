// Files as public repositories have them: what acts, what is told of, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/config/settings.h"

namespace zero {
namespace {

using testing::HasSubstr;

/// The expected result of reading a file on 2 ranks.
struct Expectation {
  std::string file;
  /// Parts of its warnings; without any there are none.
  std::vector<std::string> warns = {};
  /// Parts of its error; without any it loads.
  std::vector<std::string> refused = {};
};

// Reasons that several files meet.
const std::string kUnits = "`unit_bytes` is the size that is gathered";
const std::string kReuse = "zero_optimization.stage3_max_reuse_distance: From the second step";
const std::string kPartition = "there is nothing to partition";

const std::vector<Expectation>& expectations() {
  static const std::vector<Expectation> all{
      {"accelerate_zero3"},
      {"activation_checkpointing",
       {"activation_checkpointing.cpu_checkpointing, partition_activations", kPartition}},
      {"amp_off",
       {"zero_force_ds_cpu_optimizer: libzero always uses its own update in host memory"}},
      {"amp_on", {}, {"amp: libzero does not have Apex's mixed precision. Use the section"}},
      {"autotuning_off"},
      {"autotuning_on", {"autotuning: libzero does not tune itself"}},
      {"batch_of_eight_ranks", {}, {"train_batch_size is 64, but", "4 x 2 x 2 = 16"}},
      {"bert_lamb_fp16"},
      {"bert_onebit_adam", {"OneBitAdam"}},
      {"bert_onebit_lamb", {"OneBitLamb"}},
      {"bert_zero_one_adam", {"ZeroOneAdam"}},
      {"bf16_and_communication", {"bf16.immediate_grad_update: Gradients always go"}},
      {"checkpoint_and_nebula"},
      {"cifar10", {kUnits}},
      {"comments_and_commas"},
      {"comms_logger"},
      {"compression_off"},
      {"compression_on",
       {},
       {"compression_training.weight_quantization", "libzero does not compress",
        "quantise or prune the weights in model.safetensors"}},
      {"compression_typo", {"schedule_ofset'", "Did you mean 'schedule_offset'?"}},
      {"curriculum_on", {}, {"curriculum_learning: ", "Sort the data beforehand"}},
      {"data_efficiency_off"},
      {"data_efficiency_on",
       {},
       {"data_efficiency.data_routing.random_ltd: ", "activation_checkpointing.every",
        "data_efficiency.data_sampling.curriculum_learning: ", "Sort the data beforehand"}},
      {"duplicate_key", {}, {"duplicate_key.json names 'stage' twice"}},
      {"elasticity_off"},
      {"elasticity_on", {}, {"elasticity: libzero does not choose a batch"}},
      {"flops_profiler", {"dump_state: ", "memory_breakdown: "}},
      {"fp16_static_scale", {"fp16.auto_cast: DeepSpeed casts"}},
      {"gpt_neox", {kPartition, kUnits}},
      {"hf_zero0", {kUnits}},
      {"hf_zero1_bf16", {kUnits}},
      {"hf_zero2_auto", {kUnits}},
      {"hf_zero2_offload", {kUnits}},
      {"hf_zero2_untested_optimizer", {kUnits}},
      {"hf_zero3_auto", {kReuse, kUnits}},
      {"hf_zero3_nvme", {kReuse, kUnits, "zero_optimization.offload_param.buffer_size: "}},
      {"hf_zero3_nvme_fp16_on", {kReuse, kUnits}},
      {"hf_zero3_offload", {kReuse, kUnits}},
      {"hybrid_engine_and_compile", {"hybrid_engine: The training engine also generates"}},
      {"key_in_the_wrong_place",
       {},
       {"'overlap_comm'", "It belongs in the section 'zero_optimization'"}},
      {"llama_factory_zero3_offload", {kReuse, kUnits}},
      {"megatron_curriculum_off"},
      {"megatron_gpt2", {}, {"optimizer.params.max_grad_norm is replaced by gradient_clipping"}},
      {"monitors_off"},
      {"monitors_on", {"wandb: libzero writes nothing"}},
      {"old_bfloat16"},
      {"old_cpu_offload", {"cpu_offload_use_pin_memory: ", "overlap_comm: libzero always works"}},
      {"old_cpu_offload_params"},
      {"old_offload_and_new",
       {},
       {"zero_optimization.cpu_offload and zero_optimization.offload_optimizer.device are two "
        "names of one key"}},
      {"old_zero_is_true", {"allgather_size: "}},
      {"optimizer_adafactor"},
      {"optimizer_adafactor_of_transformers"},
      {"optimizer_adagrad"},
      {"optimizer_lion"},
      {"optimizer_muon"},
      {"optimizer_sgd"},
      {"optimizer_torch_adam", {"optimizer.params.torch_adam: "}},
      {"pipeline_alexnet",
       {"pipeline.activation_checkpoint_interval, partition, stages: libzero has only data "
        "parallelism"}},
      {"progressive_layer_drop",
       {},
       {"progressive_layer_drop: libzero drops no layers", "train.dropout"}},
      {"quantize_training_off"},
      {"scheduler_cosine"},
      {"scheduler_of_torch", {}, {"scheduler.type is \"CosineAnnealingLR\"", "\"Cosine\""}},
      {"scheduler_one_cycle"},
      {"scheduler_range_test"},
      {"scheduler_typo", {}, {"'scheduler.params.warmup_steps'", "Did you mean 'warmup_"}},
      {"scheduler_warmup_decay"},
      {"scheduler_warmup_decay_auto"},
      {"scheduler_warmup_linear"},
      {"sparse_attention", {}, {"sparse_attention.mode: libzero has no sparse attention kernels"}},
      {"sparse_attention_dense"},
      {"stage2_offload_param",
       {"zero_optimization.offload_param: Only stage 3 takes parameters away between their uses; "
        "the stage is 2"}},
      {"tensor_parallel_2", {}, {"tensor_parallel.autotp_size: ", "only data parallelism"}},
      {"torch_autocast", {"torch_autocast.lower_precision_safe_modules"}},
      {"torch_autocast_and_bf16"},
      {"torch_autocast_fp16_of_bf16", {}, {"torch_autocast.dtype is fp16, but bf16.enabled"}},
      {"torch_autocast_fp16"},
      {"typo_monitor",
       {},
       {"'tensorboard.output_dir'", "The section has enabled, output_path, job_name"}},
      {"typo_offload",
       {},
       {"'zero_optimization.offload_optimizer.pin_memmory'", "Did you mean 'pin_memory'?"}},
      {"typo_top_level", {}, {"Did you mean 'gradient_accumulation_steps'?"}},
      {"typo_zero", {}, {"Did you mean 'stage3_max_live_parameters'?"}},
      {"zenflow", {}, {"zero_optimization.zenflow: ", "delayed_update_after"}},
      {"zero1_fp32_sums_on_the_wire", {"optimizer.params.torch_adam"}},
      {"zero3_bare_names", {"max_reuse_distance, model_persistence_threshold"}},
      {"zero3_every_key", {kReuse, kUnits}},
      {"zero3_hpz", {kReuse, kUnits}},
      {"zero3_lion_on_host"},
      {"zero3_mics"}};
  return all;
}

std::string path_of(const std::string& name) {
  return std::string(ZERO_SOURCE) + "/tests/config/files/" + name + ".json";
}

struct Result {
  std::string error;
  std::string warnings;
  Settings settings{};
};

Result load(const std::string& name, bool lenient = false) {
  Result result;
  const auto warn = [&](std::string_view text) { result.warnings += std::string(text) + "\n"; };
  try {
    result.settings = Settings::load(path_of(name), 2, {.lenient = lenient, .warn = warn});
  } catch (const ConfigError& error) {
    result.error = error.what();
  }
  return result;
}

class EachFile : public testing::TestWithParam<Expectation> {};

TEST_P(EachFile, DoesWhatIsExpected) {
  const auto& expected = GetParam();
  const auto result = load(expected.file);
  if (expected.refused.empty()) {
    EXPECT_EQ(result.error, "");
  }
  for (const auto& part : expected.refused) EXPECT_THAT(result.error, HasSubstr(part));
  if (!result.error.empty()) {
    EXPECT_THAT(result.error, HasSubstr(expected.file + ".json"));
    return;
  }
  if (expected.warns.empty()) {
    EXPECT_EQ(result.warnings, "");
  }
  for (const auto& part : expected.warns) EXPECT_THAT(result.warnings, HasSubstr(part));
  EXPECT_EQ(Settings::parse(result.settings.dump(), 2), result.settings);
}

/// The findings of `zero config --check` agree with loading, key by key.
TEST_P(EachFile, IsCheckedAsItIsLoaded) {
  const auto name = GetParam().file;
  const auto loaded = load(name);
  std::vector<Finding> findings;
  try {
    findings = Settings::check(TemporaryFolder::read(path_of(name)), 2, name);
  } catch (const ConfigError&) {
    EXPECT_NE(loaded.error, "") << "It is no JSON.";
    return;
  }
  const bool refused = std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.effect == Effect::refused;
  });
  EXPECT_EQ(refused, !loaded.error.empty()) << loaded.error;
}

INSTANTIATE_TEST_SUITE_P(Files, EachFile, testing::ValuesIn(expectations()),
                         [](const auto& info) { return info.param.file; });

TEST(Files, HaveAnExpectationEach) {
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(ZERO_SOURCE) /
                                                               "tests/config/files"))
    files.insert(entry.path().stem().string());
  std::set<std::string> expected;
  for (const auto& expectation : expectations()) expected.insert(expectation.file);
  EXPECT_EQ(files, expected);
  EXPECT_GE(files.size(), 60u);
}

TEST(Files, OfOldNamesMeanWhatTheirSuccessorsDo) {
  EXPECT_EQ(load("old_cpu_offload").settings.engine.offload_optimizer.device, OffloadDevice::cpu);
  const auto params = load("old_cpu_offload_params").settings.engine;
  EXPECT_EQ(params.offload_optimizer.device, OffloadDevice::cpu);
  EXPECT_EQ(params.offload_param.device, OffloadDevice::cpu);
  EXPECT_EQ(load("old_zero_is_true").settings.engine.stage, 1);
  EXPECT_TRUE(load("old_bfloat16").settings.engine.bf16);
  const auto bare = load("zero3_bare_names").settings.engine;
  EXPECT_EQ(bare.max_live_parameters, 500'000'000);
  EXPECT_EQ(bare.prefetch_bucket_size, 20'000'000);
  EXPECT_EQ(load("hf_zero2_auto").settings.program.log_every, 2000);
  EXPECT_EQ(load("stage2_offload_param").settings.engine.offload_param.device, OffloadDevice::none);
}

TEST(Files, OfMonitorsSayWhereTheyWrite) {
  const MonitorSettings on{
      .enabled = true, .output_path = "output/ds_logs/", .job_name = "train_bert"};
  const auto program = load("monitors_on").settings.program;
  EXPECT_EQ(program.tensorboard, on);
  EXPECT_EQ(program.csv_monitor, on);
  const auto off = load("monitors_off").settings.program;
  EXPECT_FALSE(off.tensorboard.enabled);
  EXPECT_FALSE(off.csv_monitor.enabled);
  EXPECT_EQ(load("flops_profiler").settings.program.flops_profiler,
            (FlopsProfilerSettings{.enabled = true, .top_modules = 3}));
}

TEST(Files, HaveTheirSchedules) {
  using optim::WarmupType;
  const auto schedule = [](const std::string& name) { return *load(name).settings.scheduler; };
  EXPECT_EQ(
      schedule("scheduler_warmup_linear"),
      optim::Schedule(optim::DeepSpeedWarmup{.warmup_steps = 100, .type = WarmupType::linear}));
  EXPECT_EQ(schedule("scheduler_warmup_decay"),
            optim::Schedule(optim::DeepSpeedWarmupDecay{
                .max_lr = 2e-5, .warmup_steps = 100, .total_steps = 1000}));
  EXPECT_EQ(schedule("scheduler_warmup_decay_auto"),
            optim::Schedule(
                optim::DeepSpeedWarmupDecay{.max_lr = std::nullopt, .warmup_steps = std::nullopt}));
  EXPECT_EQ(schedule("scheduler_cosine"),
            optim::Schedule(optim::DeepSpeedWarmupCosine{
                .cos_min_ratio = 0.1, .warmup_steps = 100, .total_steps = 1000}));
  EXPECT_EQ(schedule("scheduler_one_cycle"),
            optim::Schedule(optim::DeepSpeedOneCycle{.min_lr = 1e-4,
                                                     .max_lr = 1e-3,
                                                     .decay_rate = 0.001,
                                                     .first_steps = 1000,
                                                     .second_steps = 1000,
                                                     .first_stairs = 500,
                                                     .second_stairs = 500,
                                                     .decay_steps = 1000,
                                                     .min_momentum = 0.85,
                                                     .max_momentum = 0.99}));
  EXPECT_EQ(
      schedule("scheduler_range_test"),
      optim::Schedule(optim::DeepSpeedRangeTest{.min_lr = 1e-4, .step_size = 200, .step_rate = 5}));
}

// Features that libzero does not have are passed over on request, and typos are told.
TEST(Files, ThatAskForWhatIsNotHereLoadWhereLenient) {
  for (const char* name :
       {"compression_on", "curriculum_on", "data_efficiency_on", "sparse_attention", "amp_on",
        "tensor_parallel_2", "zenflow", "progressive_layer_drop", "typo_zero", "typo_monitor",
        "key_in_the_wrong_place"}) {
    const auto result = load(name, true);
    EXPECT_EQ(result.error, "") << name;
    EXPECT_THAT(result.warnings, HasSubstr("no effect here")) << name;
  }
  EXPECT_THAT(load("compression_on", true).warnings,
              HasSubstr("compression_training.weight_quantization"));
  for (const char* name : {"duplicate_key", "batch_of_eight_ranks", "scheduler_of_torch"})
    EXPECT_NE(load(name, true).error, "") << name << ": no reading of it is right";
}

TEST(Files, OfOneRefusedSectionEachAreToldTogether) {
  const auto error = load("data_efficiency_on").error;
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 1) << error;
}

}  // namespace
}  // namespace zero
