// The keys of DeepSpeed's documentation, from 0.3 to 0.19, that do not act here. There is no
// warning for a section that is switched off. A section that is switched on is an error, or has no
// effect if the results are the same without it.
#include <initializer_list>
#include <string>

#include "zero/config/rows.h"

namespace zero::fields {

namespace {

using List = std::vector<Json>;

/// Adds the rows of a section in which no key acts.
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
  /// Adds a key "enabled" that also switches the section around this one.
  Section& switches_parent() {
    auto about = about_;
    about.off = {false};
    about.off_levels = 2;
    rows_.template accept<bool>({"enabled"}, about);
    return *this;
  }
  /// Adds a switch with this name; other sections call it "enabled".
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
                     "fp16_mixed_quantize.enabled", "fp16_mixed_quantize.quantize_change_ratio",
                     "range_calibration", "method", "block_pattern", "dense_ratio",
                     "excluded_modules"});
    Section(all, technique + ".different_groups.*")
        .refused(kInstead)
        .keys<Json>({"params.start_bits", "params.target_bits", "params.quantization_period",
                     "params.bits", "params.dense_ratio", "params.num_heads", "modules",
                     "related_modules"});
  }
  Section(all, "compression_training")
      .refused(kInstead)
      .keys<bool>({"layer_reduction.enabled"})
      .keys<double>({"layer_reduction.keep_number_layer"})
      .keys<std::string>({"layer_reduction.module_name_prefix"})
      .keys<List>({"layer_reduction.teacher_layer", "layer_reduction.other_module_name"});

  Section moq(all, "quantize_training");
  moq.refused(kInstead)
      .keys<bool>({"enabled", "quantize_verbose", "quantize_eigenvalue", "quantizer_kernel",
                   "fp16_mixed_quantize.enabled"})
      .keys<std::string>(
          {"quantize_type", "quantize_algo.q_type", "quantize_algo.rounding", "quantize_type_name"})
      .keys<double>({"quantize_groups", "quantize_bits.start_bits", "quantize_bits.target_bits",
                     "quantize_schedule.quantize_period", "quantize_schedule.schedule_offset",
                     "fp16_mixed_quantize.quantize_change_ratio"});
  Section(all, "eigenvalue")
      .without_effect("Only quantize_training used it.")
      .keys<bool>({"enabled", "verbose"})
      .keys<double>({"max_iter", "tol", "stability", "gas_boundary_resolution", "layer_num"})
      .keys<std::string>({"layer_name", "model_name"});
  Section(all, "weight_quantization")
      .refused(kInstead)
      .switched_by<bool>("enabled", false)
      .keys<double>({"num_bits", "q_groups"})
      .keys<std::string>({"q_type"})
      .keys<Json>({"quantized_initialization", "post_init_quant"});
  Section(all, "progressive_layer_drop")
      .refused(
          "libzero drops no layers while it trains: use dropout (`train.dropout`), or a "
          "smaller model.")
      .keys<bool>({"enabled"})
      .keys<double>({"theta", "gamma"});
}

void add_attention(All& all) {
  Section(all, "sparse_attention")
      .refused(
          "libzero has no sparse attention kernels. Leave the section out for dense "
          "attention, or give the engine a model with its own.",
          {"dense"})
      .switched_by<std::string>("mode", "dense")
      .keys<double>({"block", "num_local_blocks", "num_global_blocks", "num_random_blocks",
                     "num_sliding_window_blocks", "num_different_global_patterns"})
      .keys<bool>({"different_layout_per_head", "horizontal_global_attention"})
      .keys<std::string>({"attention"})
      .keys<List>({"local_window_blocks", "global_block_indices", "global_block_end_indices"});
}

void add_data(All& all) {
  constexpr const char* kCurriculum =
      "libzero draws all sequences of its data from the first step on. Sort the data beforehand, "
      "and train on one part after the other.";
  Section(all, "curriculum_learning")
      .refused(kCurriculum)
      .keys<bool>({"enabled"})
      .keys<std::string>({"curriculum_type", "schedule_type"})
      .keys<double>({"min_difficulty", "max_difficulty"})
      .keys<double>({"schedule_config.total_curriculum_step", "schedule_config.difficulty_step",
                     "schedule_config.root_degree"})
      .keys<List>({"schedule_config.difficulty", "schedule_config.max_step"});
  Section(all, "data_efficiency")
      .without_effect("`zero train` samples its data by `train.seed`.")
      .keys<bool>({"enabled", "data_sampling.enabled", "data_routing.enabled"})
      .keys<double>({"seed", "data_sampling.num_epochs", "data_sampling.num_workers"})
      .keys<bool>({"data_sampling.pin_memory"})
      .refused(kCurriculum)
      .keys<bool>({"data_sampling.curriculum_learning.enabled"})
      .keys<std::string>({"data_sampling.curriculum_learning.data_cluster_path"})
      .keys<Json>({"data_sampling.curriculum_learning.curriculum_metrics.*.index_to_sample_path",
                   "data_sampling.curriculum_learning.curriculum_metrics.*.index_to_metric_path",
                   "data_sampling.curriculum_learning.curriculum_metrics.*.difficulty_type",
                   "data_sampling.curriculum_learning.curriculum_metrics.*.clustering_type",
                   "data_sampling.curriculum_learning.curriculum_metrics.*.min_difficulty",
                   "data_sampling.curriculum_learning.curriculum_metrics.*.max_difficulty",
                   "data_sampling.curriculum_learning.curriculum_metrics.*.schedule_type",
                   "data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config"})
      .refused("libzero's batches have a fixed number of sequences of `train.seq` tokens.")
      .keys<bool>(
          {"data_sampling.dynamic_batching.enabled", "data_sampling.dynamic_batching.verbose"})
      .keys<std::string>({"data_sampling.dynamic_batching.metrics_path",
                          "data_sampling.dynamic_batching.lr_scaling_method",
                          "data_sampling.dynamic_batching.sequence_picking_order"})
      .keys<double>({"data_sampling.dynamic_batching.min_batch_size",
                     "data_sampling.dynamic_batching.max_batch_size",
                     "data_sampling.dynamic_batching.max_tokens"})
      .refused(
          "libzero passes every token through every layer (no random-LTD). To save memory use "
          "`activation_checkpointing.every`, to save compute a smaller `train.seq`.")
      .keys<bool>({"data_routing.random_ltd.enabled",
                   "data_routing.random_ltd.layer_token_lr_schedule.enabled"})
      .keys<std::string>({"data_routing.random_ltd.model_mask_name",
                          "data_routing.random_ltd.model_type",
                          "data_routing.random_ltd.hidden_state_order",
                          "data_routing.random_ltd.random_ltd_schedule.schedule_type"})
      .keys<List>({"data_routing.random_ltd.random_ltd_layer_id"})
      .keys<double>({"data_routing.random_ltd.total_layer_num",
                     "data_routing.random_ltd.random_ltd_layer_num",
                     "data_routing.random_ltd.micro_batch_size",
                     "data_routing.random_ltd.global_batch_size",
                     "data_routing.random_ltd.random_ltd_schedule.min_value",
                     "data_routing.random_ltd.random_ltd_schedule.max_value",
                     "data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps",
                     "data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step",
                     "data_routing.random_ltd.layer_token_lr_schedule.total_layer_tokens",
                     "data_routing.random_ltd.layer_token_lr_schedule.warmup_layer_tokens"})
      .keys<std::string>({"data_routing.random_ltd.layer_token_lr_schedule.warmup_type"});
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
  Section(all, "expert_parallel")
      .refused(kNoOther)
      .keys<bool>({"enabled"})
      .keys<Json>({"autoep_size",
                   "expert_tensor_parallel_size",
                   "validate_folding_routing",
                   "async_split_plan",
                   "preset_model",
                   "moe_layer_pattern",
                   "expert_pattern",
                   "router_pattern",
                   "use_grouped_mm",
                   "disable_triton_grouped_mm",
                   "route_norm",
                   "route_scale",
                   "score_apply",
                   "combine_impl",
                   "row_weighting_impl",
                   "gate_up_impl",
                   "comm_backend",
                   "comm_num_sm",
                   "comm_qp_margin",
                   "comm_max_tokens_per_rank",
                   "num_expert_groups",
                   "num_limited_groups",
                   "score_func",
                   "top_k",
                   "routed_scaling_factor",
                   "expert_w1",
                   "expert_w2",
                   "expert_w3",
                   "num_experts_attr",
                   "top_k_attr",
                   "has_shared_experts",
                   "shared_experts_pattern",
                   "shared_experts_gate_pattern",
                   "expert_activation",
                   "load_balance_coeff"});
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
      .keys<bool>({"enabled", "fast", "overwrite", "model_info.profile"})
      .keys<std::string>(
          {"results_dir", "exps_dir", "metric", "metric_path", "tuner_type", "model_info_path"})
      .keys<double>({"start_step", "end_step", "start_profile_step", "end_profile_step",
                     "tuner_early_stopping", "tuner_num_trials", "mp_size", "max_train_batch_size",
                     "min_train_batch_size", "max_train_micro_batch_size_per_gpu",
                     "min_train_micro_batch_size_per_gpu", "num_tuning_micro_batch_sizes",
                     "model_info.num_params", "model_info.hidden_size", "model_info.num_layers"})
      .keys<Json>({"arg_mappings"});
  Section(all, "elasticity")
      .refused(
          "libzero does not choose a batch by the number of ranks, as DeepSpeed's elasticity does. "
          "Set train_batch_size and train_micro_batch_size_per_gpu, and leave the section out or "
          "switch it off.")
      .keys<bool>({"enabled", "ignore_non_elastic_batch_info", "prefer_larger_batch"})
      .keys<double>({"max_train_batch_size", "min_gpus", "max_gpus", "min_time", "version",
                     "num_gpus_per_node", "model_parallel_size"})
      .keys<List>({"micro_batch_sizes"});
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
      .keys<bool>({"enabled", "release_inference_cache", "pin_parameters", "enable_cuda_graph"})
      .keys<double>({"max_out_tokens", "inference_tp_size", "tp_gather_partition_size"});
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
      .keys<Json>({"opt_level", "loss_scale", "cast_model_type", "patch_torch_functions",
                   "keep_batchnorm_fp32", "master_weights", "cast_model_outputs", "num_losses",
                   "verbosity", "min_loss_scale", "max_loss_scale"});
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
