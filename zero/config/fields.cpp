// All settings, one row each.
#include "zero/config/fields.h"

#include <utility>

namespace zero::fields {

template <>
struct Choices<OffloadDevice> {
  static constexpr std::pair<std::string_view, OffloadDevice> list[] = {
      {"none", OffloadDevice::none}, {"cpu", OffloadDevice::cpu}, {"nvme", OffloadDevice::nvme}};
};
template <>
struct Choices<comm::WireFormat> {
  static constexpr std::pair<std::string_view, comm::WireFormat> list[] = {
      {"int8", comm::WireFormat::int8},
      {"int4", comm::WireFormat::int4},
      {"fp8", comm::WireFormat::fp8}};
};
template <>
struct Choices<AccumulationDtype> {
  static constexpr std::pair<std::string_view, AccumulationDtype> list[] = {
      {"fp32", AccumulationDtype::fp32},
      {"model", AccumulationDtype::model},
      {"bf16", AccumulationDtype::model}};  // where bf16 is enabled: see settings.cpp
};
template <>
struct Choices<optim::Decay> {
  static constexpr std::pair<std::string_view, optim::Decay> list[] = {
      {"constant", optim::Decay::constant},
      {"linear", optim::Decay::linear},
      {"cosine", optim::Decay::cosine}};
};

namespace {

/// The rows of one struct of Settings that stand in one section of the file.
template <class... Member>
class Rows {
 public:
  Rows(std::vector<Field<Settings>>& all, Part part, std::string section, Member... path)
      : all_(all), part_(part), section_(std::move(section)), path_(path...) {
    if (!section_.empty()) section_ += '.';
  }

  template <class... Rest>
  void add(const char* key, About about, Rest... rest) {
    auto row = std::apply(
        [&](auto... path) {
          return field<Settings>(section_ + key, std::move(about), path..., rest...);
        },
        path_);
    row.part = part_;
    all_.push_back(std::move(row));
  }
  /// Keys that are checked and change nothing.
  template <class Value>
  void accept(std::initializer_list<const char*> keys, const About& about) {
    for (const auto* key : keys) {
      all_.push_back(accepted<Settings, Value>(section_ + key, about));
      all_.back().part = part_;
    }
  }

 private:
  std::vector<Field<Settings>>& all_;
  Part part_;
  std::string section_;
  std::tuple<Member...> path_;
};

using All = std::vector<Field<Settings>>;

void add_zero_optimization(All& all) {
  Rows zero(all, Part::engine, "zero_optimization", &Settings::engine);
  zero.add("stage",
           {.sentence = "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 "
                        "parameters too",
            .option = "--stage",
            .most = 3},
           &Config::stage);
  zero.add("stage3_max_live_parameters",
           {.sentence = "Stage 3: parameters (elements) that may be gathered at once",
            .details = "0 releases each unit right after the operator that used it. With "
                       "parameters on disk and no budget, lowered to half of what the host has "
                       "left for the rank beside a step.",
            .option = "--live-parameters",
            .also = {"max_live_parameters"}},
           &Config::max_live_parameters);
  zero.add("stage3_prefetch_bucket_size",
           {.sentence = "Stage 3: of those, parameters that may be gathered ahead of their use",
            .details = "Never needed on one host, where units are read in place.",
            .also = {"prefetch_bucket_size"}},
           &Config::prefetch_bucket_size);
  zero.add("unit_bytes",
           {.sentence = "Bytes that are gathered and reduced at once",
            .details = "A larger parameter is a unit of its own. Not in DeepSpeed.",
            .option = "--bucket-size",
            .least = 1,
            .bytes = true},
           &Config::unit_bytes);

  const About without_effect{
      .sentence = "Accepted, without effect",
      .details = "What they choose is always so here, or decided by `unit_bytes`."};
  zero.accept<bool>(
      {"contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce",
       "allgather_partitions", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint",
       "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
       "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
       "log_trace_cache_warnings", "enable_sanity_checks"},
      without_effect);
  auto gather_on_save = without_effect;
  gather_on_save.also = {"gather_16bit_weights_on_model_save",
                         "stage3_gather_fp16_weights_on_model_save"};
  zero.accept<bool>({"stage3_gather_16bit_weights_on_model_save"}, gather_on_save);
  zero.accept<int64_t>({"reduce_bucket_size", "allgather_bucket_size", "sub_group_size"},
                       without_effect);
  const auto of_stage3 = [&]<class Value>(Value, const char* key, const char* other) {
    zero.accept<Value>({key}, {.sentence = "Accepted, without effect",
                               .details = "From the second step on the pager knows every later "
                                          "use of a unit and keeps, within "
                                          "`stage3_max_live_parameters`, those that are needed "
                                          "soonest; small parameters share a unit with others.",
                               .also = {other}});
  };
  of_stage3(int64_t(), "stage3_max_reuse_distance", "max_reuse_distance");
  of_stage3(int64_t(), "stage3_param_persistence_threshold", "param_persistence_threshold");
  of_stage3(int64_t(), "stage3_model_persistence_threshold", "model_persistence_threshold");
  of_stage3(int64_t(), "stage3_module_granularity_threshold", "module_granularity_threshold");
  of_stage3(false, "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params");
  of_stage3(false, "stage3_allgather_sequential", "allgather_sequential");
}

void add_hosts(All& all) {
  Rows zero(all, Part::engine, "zero_optimization", &Settings::engine);
  zero.add(
      "zero_hpz_partition_size",
      {.sentence = "Stage 3: ranks of a host that keep parameters from forward to backward; "
                   "1: none",
       .details = "ZeRO++'s hpZ; the one other value is the ranks of a host. Each of several "
                  "hosts keeps all parameters in one array that its ranks read in place, so they "
                  "cross between hosts once a step and not twice a micro-batch; on one host that "
                  "is so anyway. With the quantised weights each rank keeps its own slice too.",
       .least = 1},
      &Config::hpz_partition_size);
  zero.add("mics_shard_size",
           {.sentence = "Stages 1 to 3: consecutive ranks among which states are sharded, the "
                        "other blocks being replicas; -1: all ranks",
            .details = "MiCS, PyTorch's HSDP. Divides all ranks, and divides those of a host or is "
                       "a multiple of them. With the ranks of a host, no parameter comes from "
                       "another one, and gradients are added across hosts: the same results "
                       "bit for bit. Each rank then holds states as if there were no other host.",
            .least = -1},
           &Config::mics_shard_size);
  zero.accept<bool>({"mics_hierarchical_params_gather"},
                    {.sentence = "Accepted, without effect",
                     .details = "What comes from other hosts comes once to each host, and its "
                                "ranks share it, always."});

  Rows links(all, Part::engine, "zero_optimization", &Settings::engine, &Config::quantised);
  links.add(
      "zero_quantized_weights",
      {.sentence = "Stage 3 on several hosts: parameters cross between hosts quantised",
       .details = "ZeRO++'s qwZ. Their owner computes with what it sent, so all ranks have "
                  "the same. Other results than without; master weights are whole, and so is what "
                  "is saved."},
      &QuantisedLinks::weights);
  links.add("zero_quantized_nontrainable_weights", {.sentence = "The same of frozen parameters"},
            &QuantisedLinks::frozen_weights);
  links.add("zero_quantized_gradients",
            {.sentence = "Stage 3 on several hosts: gradients cross between hosts quantised",
             .details = "ZeRO++'s qgZ. They are added up exactly in each host, quantised once, and "
                        "added up in fp32 where they arrive. Other results than without."},
            &QuantisedLinks::gradients);
  links.add("zero_quantized_weights_format",
            {.sentence = "What parameters are quantised to: whole numbers of 8 or 4 bits, or e4m3",
             .details = "DeepSpeed has int8 alone."},
            &QuantisedLinks::weights_format);
  links.add("zero_quantized_gradients_format",
            {.sentence = "What gradients are quantised to", .details = "DeepSpeed has int4 alone."},
            &QuantisedLinks::gradients_format);
  links.add("zero_quantized_block_size",
            {.sentence = "Elements that share a scale, of 4 bytes",
             .details = "The scale is the largest magnitude over the format's greatest number, so "
                        "none is cut off. Not in DeepSpeed.",
             .least = 64,
             .most = comm::kLargestBlock,
             .multiple_of = 64},
            &QuantisedLinks::block);
  all.push_back(
      {Spec{"zero_optimization.zeropp_loco_param",
            {.sentence = "Add to each quantised gradient what the ones before it lost: LoCo",
             .details =
                 "`err_beta` (0.8; at least 0, less than 1): what a moving average of the "
                 "losses keeps at each gradient. `reset_T` (1024; at least 1): updates "
                 "after which it begins anew, as it does after a load: checkpoints do not have it. "
                 "Takes about a byte for each element that a rank sends."},
            Kind::section},
       [](Settings& root, const Json& section) {
         auto& feedback = root.engine.quantised.feedback;
         if (section.is_null()) {
           feedback.reset();
         } else {
           feedback.emplace();
           read(*feedback, error_feedback(), section, "zero_optimization.zeropp_loco_param.");
         }
       },
       [](const Settings& root) {
         const auto& feedback = root.engine.quantised.feedback;
         return feedback ? write(*feedback, error_feedback()) : Json();
       }});
}

void add_offload(All& all) {
  Rows optimizer(all, Part::engine, "zero_optimization.offload_optimizer", &Settings::engine,
                 &Config::offload_optimizer);
  optimizer.add(
      "device",
      {.sentence = "Where master weights and moments live: none (the device), cpu (host memory) or "
                   "nvme (files)",
       .details = "At any stage, with the same results bit for bit. \"nvme\": they stream through "
                  "a few buffers in the update. \"cpu\": with the gradients that the update reads; "
                  "gradients are copied down as they are reduced (stages 0 and 1: once a step), "
                  "new parameters up in small blocks.",
       .option = "--offload-optimizer"},
      &OffloadOptimizer::device);
  optimizer.add(
      "nvme_path",
      {.sentence = "Folder on a local disk for what is offloaded to nvme",
       .details = "Each rank makes a private folder in it, which goes with the run (what a killed "
                  "run leaves, the next removes). Several, with commas between, are striped by the "
                  "measured speed of their disks.",
       .option = "--nvme-path",
       .argument = "DIR"},
      &OffloadOptimizer::nvme_path);
  optimizer.add(
      "buffer_count",
      {.sentence = "Blocks in memory at a time, each of 4 MiB of every state array", .least = 1},
      &OffloadOptimizer::buffer_count);
  optimizer.add(
      "pipeline_read",
      {.sentence = "Read the next blocks while one is updated", .details = "DeepSpeed: false."},
      &OffloadOptimizer::pipeline_read);
  optimizer.add("pipeline_write",
                {.sentence = "Write a block back while the next one is updated",
                 .details = "DeepSpeed: false."},
                &OffloadOptimizer::pipeline_write);
  optimizer.add("ratio",
                {.sentence = "The part of master weights and moments that goes to host or disk; "
                             "the rest (the first units) stays on the device",
                 .least = 0,
                 .most = 1},
                &OffloadOptimizer::ratio);
  optimizer.add("gradients",
                {.sentence = "Gradients on disk too, beside the optimizer's states there",
                 .details = "Stages 2 and 3: written as they are reduced and read by the update "
                            "with the rest. Not in DeepSpeed.",
                 .option = "--offload-gradients"},
                &OffloadOptimizer::gradients);
  optimizer.add(
      "delayed_update_after",
      {.sentence = "Updates after which each one runs beside the next step, which uses weights one "
                   "update old (ZeRO-Offload's delayed update; the paper: 40); 0: never",
       .details = "On any device; new parameters and gradients take a second copy. Not in "
                  "DeepSpeed.",
       .option = "--delayed-update-after"},
      &OffloadOptimizer::delayed_update_after);
  const About of_gpus{.sentence = "Accepted, without effect",
                      .details = "Of transfers to a GPU and of DeepSpeed's start."};
  optimizer.accept<bool>({"pin_memory", "fast_init", "super_offload"}, of_gpus);
  optimizer.accept<double>({"cpuadam_cores_perc"}, of_gpus);

  Rows param(all, Part::engine, "zero_optimization.offload_param", &Settings::engine,
             &Config::offload_param);
  param.add("device",
            {.sentence = "Stage 3: where parameters live between their uses: none (the device), "
                         "cpu (host memory) or nvme (files)",
             .details = "\"nvme\": every rank reads its own slices and the group gathers, also a "
                        "rank that is alone. \"cpu\": a gather copies the rank's slice to the "
                        "device, and the group gathers there (nothing is read in place any more).",
             .option = "--offload-param"},
            &OffloadParam::device);
  param.add("nvme_path",
            {.sentence = "As `offload_optimizer.nvme_path`",
             .details = "Where both are on disk, states are striped over the folders of both.",
             .option = "--nvme-path"},
            &OffloadParam::nvme_path);
  param.add("buffer_count",
            {.sentence = "Slices of `unit_bytes` / ranks that are read ahead of their all-gather",
             .least = 1},
            &OffloadParam::buffer_count);
  param.add("max_in_cpu",
            {.sentence = "Elements of a rank's slices that stay in host memory all the same",
             .details = "DeepSpeed: 1e9."},
            &OffloadParam::max_in_cpu);
  const char* buffers =
      "A buffer is as large as the slice that it holds; memory is pinned for GPUs alone.";
  param.accept<int64_t>({"buffer_size"},
                        {.sentence = "Accepted, without effect", .details = buffers});
  param.accept<bool>({"pin_memory"}, {.sentence = "Accepted, without effect", .details = buffers});
}

void add_aio(All& all) {
  Rows aio(all, Part::engine, "aio", &Settings::engine, &Config::aio);
  aio.add("block_size",
          {.sentence = "Bytes of one transfer", .least = 4096, .multiple_of = 4096, .bytes = true},
          &Aio::block_size);
  aio.add("queue_depth",
          {.sentence = "Transfers under way at a time",
           .details = "DeepSpeed: 8.",
           .least = 1,
           .most = 4096},
          &Aio::queue_depth);
  aio.add("use_io_uring", {.sentence = "False: threads, even where io_uring works"},
          &Aio::use_io_uring);
  aio.add("checksums",
          {.sentence = "Keep a checksum of every page that is written, and refuse a page that the "
                       "disk returns otherwise",
           .details = "Not in DeepSpeed."},
          &Aio::checksums);
  const About of_deepspeed{
      .sentence = "Accepted, without effect",
      .details =
          "Of DeepSpeed's own engine; ours submits and completes all that there is at once."};
  aio.accept<bool>({"single_submit", "overlap_events", "use_gds"}, of_deepspeed);
  aio.accept<int64_t>({"intra_op_parallelism", "thread_count"}, of_deepspeed);
}

void add_model(All& all) {
  Rows recompute(all, Part::model, "activation_checkpointing", &Settings::model,
                 &ModelSettings::activation_checkpointing);
  recompute.add("every",
                {.sentence = "Compute the activations of the first of every so many blocks again "
                             "in backward; 0: none",
                 .details = "Such a block keeps its input alone, with the same results to the bit. "
                            "In C++ `Gpt2::recompute`, and `zero::recompute` around any function. "
                            "Not in DeepSpeed.",
                 .option = "--recompute",
                 .argument = "EVERY",
                 .zero_is_none = true},
                &ActivationCheckpointing::every);
  recompute.add("contiguous_memory_optimization",
                {.sentence = "The kept inputs lie in one buffer that every step uses again, "
                             "measured in the first"},
                &ActivationCheckpointing::contiguous_memory_optimization);
  recompute.add("nvme",
                {.sentence = "The kept inputs live in files, in a private folder of each rank "
                             "inside `nvme_path`",
                 .details = "Written while forward goes on, read ahead in backward, three of them "
                            "in memory at a time; `aio` says how. Refused without `every` or "
                            "`layer_major_accumulation`: there are none. Not in DeepSpeed."},
                &ActivationCheckpointing::nvme);
  recompute.add("nvme_path", {.sentence = "Folder on a local disk for `nvme`"},
                &ActivationCheckpointing::nvme_path);
  const About of_gpus{
      .sentence = "Accepted, without effect",
      .details =
          "Without tensor parallelism there is nothing to partition, and on a CPU all "
          "activations are in host memory."};
  recompute.accept<bool>(
      {"partition_activations", "cpu_checkpointing", "synchronize_checkpoint_boundary", "profile"},
      of_gpus);
  recompute.accept<int64_t>({"number_checkpoints"}, of_gpus);

  Rows tiling(all, Part::model, "tiling", &Settings::model);
  tiling.add("max_elements",
             {.sentence = "Linear layers whose weight has more elements are split into tiles of at "
                          "most so many, which stage 3 brings in one at a time; 0: none",
              .details = "Memory-centric tiling: each tile is a parameter of its own. Results are "
                         "equal to rounding; the files of `zero train` have the whole layers. In "
                         "C++ `zero::tile_linears(*model, elements)` before the engine is "
                         "constructed. DeepSpeed has `zero.TiledLinear` alone.",
              .option = "--tile-elements",
              .zero_is_none = true},
             &ModelSettings::tile_elements);
}

void add_batch(All& all) {
  Rows engine(all, Part::engine, "", &Settings::engine);
  Rows program(all, Part::program, "", &Settings::program);
  engine.accept<int64_t>({"train_batch_size"},
                         {.sentence = "Micro-batch x accumulation x ranks",
                          .details = "Any two of the three determine the third. The options of "
                                     "`zero train` stand for the keys of the file."});
  program.add("train_micro_batch_size_per_gpu",
              {.sentence = "Sequences or samples that a rank passes at a time",
               .details = "`zero train`: 8 where nothing says it.",
               .option = "--micro-batch",
               .least = 1,
               .zero_is_none = true},
              &ProgramSettings::micro_batch_size);
  engine.add("gradient_accumulation_steps",
             {.sentence = "Micro-batches of a rank whose gradients are added before an update",
              .option = "--accumulate",
              .least = 1},
             &Config::gradient_accumulation_steps);
}

void add_engine(All& all) {
  Rows engine(all, Part::engine, "", &Settings::engine);
  engine.add("gradient_clipping",
             {.sentence = "Global norm to which gradients are clipped; 0: not at all",
              .option = "--clip",
              .least = 0},
             &Config::gradient_clipping);
  engine.add(
      "layer_major_accumulation",
      {.sentence = "All micro-batches of a step pass one layer before the next: stage 3 gathers, "
                   "and stages 2 and 3 reduce, once a step",
       .details = "Stage 3 gathers each parameter twice a step, whatever the number of "
                  "micro-batches. Layers are recomputed in backward; `activation_checkpointing` "
                  "says where their inputs are kept. In C++ `zero::backward_layer_major` for any "
                  "model that shows its layers. Not in DeepSpeed.",
       .option = "--layer-major"},
      &Config::layer_major_accumulation);
  engine.add("update_in_backward",
             {.sentence = "Update a unit as soon as its gradient is reduced, beside the rest of "
                          "backward; without clipping",
              .details = "Gradients are not kept; for states on disk, whose bytes then pass beside "
                         "the compute. The same results bit for bit; needs stage 2 or 3, "
                         "`gradient_clipping` 0, and one pass a step (one micro-batch, or "
                         "`layer_major_accumulation`); a gradient that is not finite is an error "
                         "then. Not in DeepSpeed.",
              .option = "--update-in-backward"},
             &Config::update_in_backward);
  engine.add("update_in_forward",
             {.sentence = "Stage 3: units whose parameters are on disk may be updated beside the "
                          "next forward pass, up to their first use there",
              .details = "With clipping too; with `update_in_backward`, what backward has not got "
                         "to. The same results bit for bit; an error of the disk may show in the "
                         "next step. Not in DeepSpeed.",
              .option = "--no-update-in-forward"},
             &Config::update_in_forward);
  engine.add("one_sided_gather",
             {.sentence = "On one host, use the owners' memory in place: a gather waits for its "
                          "owners and copies nothing",
              .details = "False: every gather is a matched all-gather. Not in DeepSpeed."},
             &Config::one_sided_gather);
  engine.add("seed_by_rank",
             {.sentence = "Constructing the engine gives each rank a random seed of its own, so "
                          "that dropout differs",
              .details = "False: the program seeds its ranks, as `zero train` does for each step. "
                         "Not in DeepSpeed."},
             &Config::seed_by_rank);
  engine.add(
      "memory_budget",
      {.sentence = "Bytes that a rank may hold, states, buffers and activations together; 0: no "
                   "limit",
       .details = "As 6000000000 or \"6GB\" (GB is 2^30 bytes). States that exceed it are refused "
                  "before they are allocated, with what each higher stage would take; a first step "
                  "that exceeds it, when it ends. What it leaves is for gathered units, up to "
                  "`stage3_max_live_parameters` (on one host units are read in place and need "
                  "nothing). Where `offload_optimizer.nvme_path` names a folder and nothing is "
                  "offloaded, as much as needed goes to disk: a part of the optimizer's states, "
                  "all of them, the gradients, the parameters (`zero train` says what and why). "
                  "Not in DeepSpeed.",
       .option = "--memory-budget",
       .bytes = true},
      &Config::memory_budget);
  engine.add(
      "device_memory",
      {.sentence = "Bytes of memory that stand for a rank's device; the rest is its host's; 0: no "
                   "limit",
       .details = "States that are not on host or disk, gathered units, gradient buckets, staging "
                  "and activations (all of LibTorch's tensors in the process, where it uses "
                  "libzero's allocator, as `zero train` does) count against it. What does not fit "
                  "is an `OutOfMemory` with the ledger and the next cheaper choice of "
                  "configuration. Units are gathered by copies then, also on one host, in what the "
                  "first step leaves less a sixteenth. Not in DeepSpeed.",
       .option = "--device-memory",
       .bytes = true},
      &Config::device_memory);
}

void add_dtypes(All& all) {
  Rows bf16(all, Part::engine, "bf16", &Settings::engine);
  bf16.add("enabled",
           {.sentence = "Parameters and gradients in bf16, with fp32 master weights in the "
                        "optimizer states",
            .option = "--dtype",
            .words = {{"fp32", false}, {"bf16", true}}},
           &Config::bf16);
  bf16.add(
      "split_master_weights",
      {.sentence = "Keep of master weights only the half that bf16 parameters lack, 2 bytes a "
                   "parameter less",
       .details = "The lower 16 bits lie beside the bf16 parameters that are the upper ones: "
                  "less in memory, in the update's way to memory, and in what is written to a "
                  "disk. The same fp32 arithmetic; a tie rounds away from zero and not to "
                  "even, so results are not those of whole master weights, but the same at "
                  "every stage and number of ranks. Parameters and their states must lie in "
                  "the same place, or the states on disk. Writing a parameter in place sets "
                  "the upper half alone. Checkpoints hold whole master weights and load either "
                  "way. Not in DeepSpeed.",
       .option = "--split-master-weights"},
      &Config::split_master_weights);
  Rows fp16(all, Part::engine, "fp16", &Settings::engine);
  fp16.accept<bool>({"enabled"}, {.sentence = "Only the default",
                                  .only = false,
                                  .because = "without loss scaling, which libzero does not have "
                                             "yet, fp16 gradients underflow. bf16.enabled needs "
                                             "none"});
  const About no_fp16{.sentence = "Accepted, without effect while fp16 is off"};
  fp16.accept<bool>({"auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"},
                    no_fp16);
  fp16.accept<double>(
      {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"},
      no_fp16);
  Rows types(all, Part::engine, "data_types", &Settings::engine);
  types.add("grad_accum_dtype",
            {.sentence = "Dtype in which micro-batches are added up: \"model\" is the parameters' "
                         "own (with bf16 also \"bf16\")"},
            &Config::accumulation_dtype);
}

void add_program(All& all) {
  Rows train(all, Part::program, "train", &Settings::program);
  using Program = ProgramSettings;
  train.add("model",
            {.sentence = "Sizes of the model, whose initial weights are random: gpt2, gpt2-medium, "
                         "gpt2-large, gpt2-xl, gpt2-nano, or a Hugging Face config.json",
             .option = "--model",
             .not_empty = true},
            &Program::model);
  train.add("data",
            {.sentence = "Text or token file, or a folder made by `zero data prepare`",
             .option = "--data"},
            &Program::data);
  train.add("val_data",
            {.sentence = "File or folder to validate on; without it the validation split of --data",
             .option = "--val-data"},
            &Program::val_data);
  train.add("out",
            {.sentence = "Folder of log.jsonl, model.safetensors and config.json",
             .option = "--out",
             .not_empty = true},
            &Program::out);
  train.add("vocab_size",
            {.sentence = "Tokens of the model; 0: its own, for gpt2-nano those of the data",
             .option = "--vocab-size",
             .zero_is_none = true},
            &Program::vocab_size);
  train.add("seq", {.sentence = "Tokens of a sequence", .option = "--seq", .least = 1},
            &Program::seq);
  train.add("steps", {.sentence = "Updates of the weights", .option = "--steps", .least = 1},
            &Program::steps);
  train.add("min_lr",
            {.sentence = "Rate at the last step; a tenth of --lr where it is left out",
             .option = "--min-lr",
             .least = 0},
            &Program::min_lr);
  train.add("warmup",
            {.sentence = "Steps of linear warm-up; a tenth of --steps, at most 200, where it is "
                         "left out",
             .option = "--warmup"},
            &Program::warmup);
  train.add("schedule", {.sentence = "Decay after the warm-up", .option = "--schedule"},
            &Program::schedule);
  train.add("dropout",
            {.sentence = "Probability; the model's own where it is left out",
             .option = "--dropout",
             .least = 0,
             .below = 1},
            &Program::dropout);
  train.add("seed",
            {.sentence = "Of weights, order of the data and dropout",
             .option = "--seed",
             .least = -9223372036854775808.0},
            &Program::seed);
  train.add("threads",
            {.sentence = "Of each rank; 0: OMP_NUM_THREADS, or the cores shared by the ranks",
             .option = "--threads",
             .most = 65536,
             .zero_is_none = true},
            &Program::threads);
  train.add("eval_every",
            {.sentence = "Steps between validations; 0: at the end only",
             .option = "--eval-every",
             .zero_is_none = true},
            &Program::eval_every);
  train.add("eval_tokens",
            {.sentence = "Tokens of a validation, spread evenly over its text; 0: no validation",
             .option = "--eval-tokens"},
            &Program::eval_tokens);
  train.accept<int64_t>(
      {"eval_batches"},
      {.sentence = "Micro-batches of a validation",
       .option = "--eval-batches",
       .replaced_by = "'train.eval_tokens' (--eval-tokens): the tokens of a validation, which no "
                      "longer depend on the ranks and the micro-batch; 0: no validation"});
  train.add("log_every",
            {.sentence = "Steps between lines on the console (log.jsonl has every step)",
             .option = "--log-every",
             .least = 1},
            &Program::log_every);
  train.add("save_every",
            {.sentence = "Steps between checkpoints for --resume; 0: none",
             .option = "--save-every",
             .zero_is_none = true},
            &Program::save_every);
  train.add("sample_tokens",
            {.sentence = "Tokens to generate at the end; 0: none", .option = "--sample-tokens"},
            &Program::sample_tokens);
  train.add("prompt", {.sentence = "What the sample continues", .option = "--prompt"},
            &Program::prompt);
  train.add("temperature",
            {.sentence = "Of the sample; 0: always the likeliest token",
             .option = "--temperature",
             .least = 0},
            &Program::temperature);
  train.add("top_k",
            {.sentence = "The sample takes only the likeliest so many tokens; 0: any",
             .option = "--top-k",
             .zero_is_none = true},
            &Program::top_k);
  train.add("overwrite", {.sentence = "Replace an earlier run in --out", .option = "--overwrite"},
            &Program::overwrite);
  train.add(
      "resume",
      {.sentence = "Continue the run in --out from its last checkpoint", .option = "--resume"},
      &Program::resume);
}

/// The section has rows of its own, by optimizer.
void add_optimizer(All& all) {
  all.push_back(
      {Spec{"optimizer",
            {.sentence = "The optimizer: `type` (\"AdamW\", \"Adam\" or \"SGD\") and "
                         "`params`",
             .details = "Used where the program names none. \"Adam\" is AdamW too, as in "
                        "DeepSpeed, unless `adam_w_mode` is false."},
            Kind::section},
       [](Settings& root, const Json& section) { root.engine.optimizer = read_optimizer(section); },
       [](const Settings& root) {
         const auto& chosen = root.engine.optimizer;
         return chosen ? write_optimizer(*chosen) : Json();
       }});
}

}  // namespace

const std::vector<Field<ErrorFeedback>>& error_feedback() {
  static const std::vector<Field<ErrorFeedback>> rows{
      field<ErrorFeedback>("err_beta", {.sentence = "", .least = 0, .below = 1},
                           &ErrorFeedback::beta),
      field<ErrorFeedback>("reset_T", {.sentence = "", .least = 1}, &ErrorFeedback::reset_every)};
  return rows;
}

const std::vector<Field<Settings>>& settings() {
  static const auto rows = [] {
    All all;
    add_zero_optimization(all);
    add_hosts(all);
    add_offload(all);
    add_batch(all);
    add_dtypes(all);
    add_engine(all);
    add_optimizer(all);
    add_aio(all);
    add_model(all);
    add_program(all);
    return all;
  }();
  return rows;
}

}  // namespace zero::fields
