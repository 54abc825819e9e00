// The keys of DeepSpeed's documentation, from 0.3 to 0.19, that do not act here. A section that is
// switched off says nothing. One that is switched on is an error, or has no effect where the
// results are the same without it.
#include <initializer_list>
#include <string>

#include "zero/config/rows.h"

namespace zero::fields {

namespace {

using List = std::vector<Json>;

/// Adds the rows of a section in which no key acts. The key "*" is all others of the section, where
/// nothing is gained by knowing them.
class Section {
 public:
  Section(All& all, std::string name) : rows_(all, Part::engine, std::move(name)) {}

  /// Says `why` the keys that follow have no effect.
  Section& without_effect(std::string_view why, List holds = {}) {
    about_ = {.sentence = "Accepted, without effect", .details = why, .holds = std::move(holds)};
    return *this;
  }
  /// Refuses the keys that follow, and says what to use `instead`.
  Section& refused(std::string_view instead, List holds = {}) {
    about_ = {.sentence = "Not supported", .holds = std::move(holds), .refused = instead};
    return *this;
  }
  template <class Value>
  Section& keys(std::initializer_list<const char*> keys) {
    rows_.template accept<Value>(keys, about_);
    return *this;
  }
  /// Adds a key "enabled" that switches the section around this one too.
  Section& switches_parent() {
    auto about = about_;
    about.off = {false};
    about.off_levels = 2;
    rows_.template accept<bool>({"enabled"}, about);
    return *this;
  }
  /// Adds a switch with this name, which is "enabled" elsewhere.
  template <class Value>
  Section& switched_by(const char* key, Json off) {
    auto about = about_;
    about.off = {std::move(off)};
    about.on_by_default = true;
    rows_.template accept<Value>({key}, about);
    return *this;
  }

 private:
  Rows<> rows_;
  About about_;
};

void add_reports(All& all) {
  Section(all, "comet")
      .without_effect(
          "libzero sends nothing to Comet, and writes nothing for it. log.jsonl has the numbers of "
          "every step, validations, memory and traffic. Use `tensorboard` or `csv_monitor`.")
      .keys<bool>({"enabled"})
      .keys<double>({"samples_log_interval"})
      .keys<std::string>(
          {"project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"})
      .keys<bool>({"online"});
  Section(all, "wandb")
      .without_effect(
          "libzero writes nothing for Weights & Biases. Switch on the section `tensorboard` "
          "(--tensorboard DIR), and send its event files with `wandb sync DIR`.")
      .keys<bool>({"enabled"})
      .keys<std::string>({"output_path", "group", "team", "project"});
  Section(all, "timers")
      .without_effect("Throughput is always measured.", {true, false})
      .keys<bool>({"throughput.enabled", "throughput.synchronized"});
  Section(all, "")
      .without_effect(
          "Memory by category is always printed, before the first step and at its "
          "peak.",
          {false})
      .keys<bool>({"memory_breakdown"})
      .without_effect("The first line of log.jsonl is the configuration in force.", {false})
      .keys<bool>({"dump_state"})
      .without_effect("libzero has one level of messages.")
      .keys<std::string>({"log_level"});
}

void add_checkpoint(All& all) {
  Section(all, "checkpoint")
      .without_effect(
          "A checkpoint is complete or absent, and each rank always writes and reads its own part.",
          {"Warn", "WARN", "warn", "Ignore", "IGNORE", "ignore", false})
      .keys<std::string>({"tag_validation"})
      .keys<bool>({"load_universal", "use_node_local_storage", "parallel_write.pipeline_stage"})
      .keys<Json>({"serialization", "checkpoint_serialization", "writer"});
  Section(all, "nebula")
      .without_effect("Checkpoints are written to the run's folder.")
      .keys<bool>({"enabled", "enable_nebula_load"})
      .keys<std::string>({"persistent_storage_path", "load_path", "nebula_load_path"})
      .keys<double>({"persistent_time_interval", "num_of_version_in_retention"});
  Section(all, "")
      .without_effect("Checkpoints are written to the run's folder.", {false})
      .keys<Json>({"datastates_ckpt"});
}

void add_compression(All& all) {
  constexpr const char* kInstead =
      "libzero does not compress a model while it trains. Train without it, and quantise or prune "
      "the weights in model.safetensors with a tool for that.";
  for (const char* name : {"weight_quantization", "activation_quantization", "sparse_pruning",
                           "row_pruning", "head_pruning", "channel_pruning"}) {
    const std::string technique = std::string("compression_training.") + name;
    Section(all, technique + ".shared_parameters")
        .refused(kInstead)
        .switches_parent()
        .keys<Json>({"quantizer_kernel", "schedule_offset", "schedule_offset_end",
                     "schedule_offset_stride", "quantize_groups", "quantize_verbose",
                     "quantization_type", "rounding", "quantize_weight_in_forward",
                     "fp16_mixed_quantize", "range_calibration", "method", "block_pattern",
                     "dense_ratio", "excluded_modules"});
    Section(all, technique).refused(kInstead).keys<Json>({"different_groups"});
  }
  Section(all, "compression_training")
      .refused(kInstead)
      .keys<bool>({"layer_reduction.enabled"})
      .keys<Json>({"layer_reduction.*"});

  Section(all, "quantize_training").refused(kInstead).keys<bool>({"enabled"}).keys<Json>({"*"});
  Section(all, "eigenvalue")
      .without_effect("Only quantize_training used it.")
      .keys<bool>({"enabled"})
      .keys<Json>({"*"});
  Section(all, "weight_quantization")
      .refused(kInstead)
      .switched_by<bool>("enabled", false)
      .keys<Json>({"*"});
  Section(all, "progressive_layer_drop")
      .refused(
          "libzero drops no layers while it trains: use dropout (`train.dropout`), or a "
          "smaller model.")
      .keys<bool>({"enabled"})
      .keys<Json>({"*"});
}

void add_attention(All& all) {
  Section(all, "sparse_attention")
      .refused(
          "libzero has no sparse attention kernels. Leave the section out for dense "
          "attention, or give the engine a model with its own.",
          {"dense"})
      .switched_by<std::string>("mode", "dense")
      .keys<Json>({"*"});
}

void add_data(All& all) {
  constexpr const char* kCurriculum =
      "libzero draws all sequences of its data from the first step on. Sort the data beforehand, "
      "and train on one part after the other.";
  Section(all, "curriculum_learning")
      .refused(kCurriculum)
      .keys<bool>({"enabled"})
      .keys<Json>({"*"});
  Section(all, "data_efficiency")
      .without_effect("`zero train` samples its data by `train.seed`.")
      .keys<bool>({"enabled", "data_sampling.enabled", "data_routing.enabled"})
      .keys<double>({"seed", "data_sampling.num_epochs", "data_sampling.num_workers"})
      .keys<bool>({"data_sampling.pin_memory"})
      .refused(kCurriculum)
      .keys<bool>({"data_sampling.curriculum_learning.enabled"})
      .keys<Json>({"data_sampling.curriculum_learning.*"})
      .refused("libzero's batches have a fixed number of sequences of `train.seq` tokens.")
      .keys<bool>({"data_sampling.dynamic_batching.enabled"})
      .keys<Json>({"data_sampling.dynamic_batching.*"})
      .refused(
          "libzero passes every token through every layer (no random-LTD). To save memory use "
          "`activation_checkpointing.every`, to save compute a smaller `train.seq`.")
      .keys<bool>({"data_routing.random_ltd.enabled"})
      .keys<Json>({"data_routing.random_ltd.*"});
  Section(all, "")
      .without_effect("All batches are complete.", {true, false})
      .keys<bool>({"dataloader_drop_last"})
      .without_effect("Use `train.vocab_size`.")
      .keys<double>({"vocabulary_size"})
      .without_effect("Use `train.steps` (--steps).")
      .keys<double>({"train_steps"});
}

void add_parallelism(All& all) {
  constexpr const char* kNoOther =
      "libzero has only data parallelism: each rank passes whole sequences through all layers. For "
      "models that do not fit, use stage 3 and offloading.";
  Section(all, "tensor_parallel")
      .refused(kNoOther, {0, 1})
      .keys<double>({"autotp_size", "tp.tp_size", "tensor_parallel.tp_size"})
      .without_effect(kNoOther)
      .keys<double>({"tp.tp_grain_size", "tensor_parallel.tp_grain_size"})
      .keys<bool>({"tp_overlap_comm", "vocab_parallel_lm_head", "keep_module_on_host",
                   "replace_with_kernel_inject", "kernel_inject"})
      .keys<std::string>({"dtype", "vocab_parallel_ce_backend", "preset_model"})
      .keys<Json>({"partition_config", "injection_policy_tuple"});
  Section(all, "expert_parallel").refused(kNoOther).keys<bool>({"enabled"}).keys<Json>({"*"});
  Section(all, "pipeline")
      .without_effect(kNoOther, {"auto", 1})
      .keys<Json>({"stages"})
      .keys<std::string>({"partition"})
      .keys<bool>({"seed_layers", "pipe_partitioned", "grad_partitioned", "use_reentrant"})
      .keys<double>({"activation_checkpoint_interval"});
  Section(all, "")
      .refused(kNoOther, {1})
      .keys<double>({"sequence_parallel_size"})
      .without_effect(kNoOther, {false})
      .keys<bool>({"use_data_before_expert_parallelism", "use_data_before_expert_parallelism_"})
      .without_effect(kNoOther, {"fp32"})
      .keys<std::string>({"seq_parallel_communication_data_type"});
}

void add_tuning(All& all) {
  Section(all, "autotuning")
      .without_effect("libzero does not tune itself. Use `zero bench step` to measure a step.")
      .keys<bool>({"enabled"})
      .keys<Json>({"*"});
  Section(all, "elasticity")
      .refused(
          "libzero does not choose a batch by the number of ranks, as DeepSpeed's elasticity does. "
          "Set train_batch_size and train_micro_batch_size_per_gpu, and leave the section out or "
          "switch it off.")
      .keys<bool>({"enabled"})
      .keys<Json>({"*"});
  Section(all, "compile")
      .without_effect("libzero runs LibTorch's operators as they are, and compiles nothing.",
                      {false})
      .keys<bool>({"enabled", "disable", "deepcompile", "autoep_non_moe", "free_activation",
                   "offload_activation", "offload_opt_states", "symmetric_memory", "debug_log",
                   "offload_parameters", "sync_before_reduce", "sync_after_reduce",
                   "sync_before_allgather", "sync_after_allgather", "keep_all_input_tensors"})
      .without_effect("libzero runs LibTorch's operators as they are, and compiles nothing.",
                      {true})
      .keys<bool>({"offload_activation_pin_memory", "double_buffer", "keep_int_input_tensors"})
      .keys<double>({"free_activation_threshold"})
      .keys<Json>({"backend", "kwargs", "passes"});
  Section(all, "hybrid_engine")
      .without_effect("The training engine also generates text.")
      .keys<bool>({"enabled"})
      .keys<Json>({"*"});
  Section(all, "")
      .without_effect("It concerns DeepSpeed's inference engine.")
      .keys<Json>({"inference"})
      .without_effect("It concerns CUDA graphs.", {false})
      .keys<bool>({"graph_harvesting"})
      .without_effect("libzero has no garbage collector.", {true, false})
      .keys<bool>({"disable_python_gc"});
}

void add_numbers(All& all) {
  Section(all, "amp")
      .refused("libzero does not have Apex's mixed precision. Use the section bf16 or fp16.")
      .keys<bool>({"enabled"})
      .keys<Json>({"*"});
  Section(all, "")
      .without_effect("Every optimizer here is tested at every stage.", {true, false})
      .keys<bool>({"zero_allow_untested_optimizer"})
      .without_effect("libzero always uses its own update in host memory.", {true})
      .keys<bool>({"zero_force_ds_cpu_optimizer"})
      .without_effect("Gradients of embeddings are reduced like all other gradients.", {false})
      .keys<bool>({"sparse_gradients"})
      .without_effect("Gradients are always summed in fp32.", {true})
      .keys<bool>({"fp32_allreduce", "allreduce_always_fp32"})
      .without_effect("New parameters are always gathered.", {false})
      .keys<bool>({"disable_allgather"})
      .without_effect("`zero_optimization.unit_bytes` is the size that is gathered at once.")
      .keys<double>({"allgather_size"})
      .refused("The engine counts micro-batches itself: set gradient_accumulation_steps.", {true})
      .keys<bool>({"managed_gradient_accumulation"})
      .refused(
          "libzero averages gradients over ranks. To get their sum, multiply the loss by the "
          "number of ranks.",
          {"mean"})
      .keys<std::string>({"gradient_allreduce_op"});
}

}  // namespace

void add_deepspeed(All& all) {
  add_reports(all);
  add_checkpoint(all);
  add_compression(all);
  add_attention(all);
  add_data(all);
  add_parallelism(all);
  add_tuning(all);
  add_numbers(all);
}

}  // namespace zero::fields
