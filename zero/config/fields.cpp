// All settings, one row each.
#include "zero/config/rows.h"

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
struct Choices<DtypeName> {
  static constexpr std::pair<std::string_view, DtypeName> list[] = {
      {"fp32", DtypeName::fp32}, {"fp16", DtypeName::fp16}, {"bf16", DtypeName::bf16}};
};
template <>
struct Choices<AutocastDtype> {
  static constexpr std::pair<std::string_view, AutocastDtype> list[] = {
      {"bf16", AutocastDtype::bf16}, {"fp16", AutocastDtype::fp16}};
};
template <>
struct Choices<optim::StateFormat> {
  static constexpr std::pair<std::string_view, optim::StateFormat> list[] = {
      {"fp32", optim::StateFormat::fp32},
      {"bf16", optim::StateFormat::bf16},
      {"8bit", optim::StateFormat::eight_bit}};
};
template <>
struct Choices<AccumulationDtype> {
  static constexpr std::pair<std::string_view, AccumulationDtype> list[] = {
      {"fp32", AccumulationDtype::fp32},
      {"model", AccumulationDtype::model},
      {"bf16", AccumulationDtype::model},  // where that is enabled: see settings.cpp
      {"fp16", AccumulationDtype::model}};
};
template <>
struct Choices<TrainingDevice> {
  static constexpr std::pair<std::string_view, TrainingDevice> list[] = {
      {"cpu", TrainingDevice::cpu}, {"cuda", TrainingDevice::cuda}, {"any", TrainingDevice::any}};
};
template <>
struct Choices<optim::Decay> {
  static constexpr std::pair<std::string_view, optim::Decay> list[] = {
      {"constant", optim::Decay::constant},
      {"linear", optim::Decay::linear},
      {"cosine", optim::Decay::cosine},
      {"wsd", optim::Decay::wsd}};
};

namespace {

/// Other words for dtypes, as DeepSpeed and PyTorch have them.
const std::vector<std::pair<std::string_view, std::string_view>> kDtypes{
    {"float32", "fp32"},     {"float", "fp32"},    {"torch.float32", "fp32"},
    {"torch.float", "fp32"}, {"bfloat16", "bf16"}, {"torch.bfloat16", "bf16"},
    {"float16", "fp16"},     {"half", "fp16"},     {"torch.float16", "fp16"},
    {"torch.half", "fp16"}};

/// Other words for formats of optimizer states.
const std::vector<std::pair<std::string_view, std::string_view>> kStateFormats{
    {"float32", "fp32"},     {"float", "fp32"},      {"torch.float32", "fp32"},
    {"torch.float", "fp32"}, {"bfloat16", "bf16"},   {"torch.bfloat16", "bf16"},
    {"int8", "8bit"},        {"8-bit", "8bit"},      {"fp8", "8bit"},
    {"torch.int8", "8bit"},  {"torch.uint8", "8bit"}};

void add_zero_optimization(All& all) {
  Rows zero(all, Part::engine, "zero_optimization", &Settings::engine);
  zero.add(
      "stage",
      {.sentence = "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 "
                   "parameters too",
       .option = "--stage",
       .common = true,
       .most = 3,
       .cost = "Stages 0 to 2 send 2 Psi (N-1)/N elements a step, stage 3 up to 3 Psi (N-1)/N. "
               "In bf16 a rank holds 16 bytes a parameter at stage 0, 4 + 12/N at 1, "
               "2 + 14/N at 2, 16/N at 3."},
      &Config::stage);
  zero.add("stage3_max_live_parameters",
           {.sentence = "Stage 3: parameters (elements) that may be gathered at once",
            .details = "0 releases each unit right after the operator that used it. With "
                       "parameters on disk and no budget, lowered to half of what the host has "
                       "left for the rank beside a step.",
            .option = "--live-parameters",
            .also = {"max_live_parameters"},
            .cost = "2 bytes (fp32: 4) for each where units are gathered by copying; fewer cost a "
                    "second gather of a unit in backward, Psi (N-1)/N elements more in all."},
           &Config::max_live_parameters);
  zero.add("stage3_prefetch_bucket_size",
           {.sentence = "Stage 3: of those, parameters that may be gathered ahead of their use",
            .details = "Never needed on one host, where units are read in place.",
            .also = {"prefetch_bucket_size"},
            .cost = "Part of `stage3_max_live_parameters`; nothing beside it."},
           &Config::prefetch_bucket_size);
  Rows speeds(all, Part::engine, "zero_optimization.prefetch_speeds", &Settings::engine,
              &Config::prefetch_speeds);
  const auto speed = [](std::string_view sentence, std::string_view details) {
    return About{.sentence = sentence, .details = details, .least = 0};
  };
  speeds.add("compute",
             speed("FLOPs that a rank does in a second; where given, stage 3 gathers ahead no more "
                   "than makes a step shorter",
                   "The distance is chosen after the first update, by a simulated timeline at the "
                   "speeds of this section, and is at most `stage3_prefetch_bucket_size`; less "
                   "memory for gathered units, and the same results. `zero bench timeline` shows "
                   "it. 0: none is chosen. Not in DeepSpeed."),
             &PrefetchSpeeds::compute);
  speeds.add("link",
             speed("Bytes a second that a rank sends, or on several hosts a host",
                   "0: what goes there takes no time."),
             &PrefetchSpeeds::link);
  speeds.add("pcie", speed("Bytes a second between device and host, each way", "0: the same."),
             &PrefetchSpeeds::pcie);
  speeds.add("disk", speed("Bytes a second of a rank's disk", "0: the same."),
             &PrefetchSpeeds::disk);
  zero.add("unit_bytes",
           {.sentence = "Bytes that are gathered and reduced at once",
            .details = "A larger parameter is a unit of its own. Not in DeepSpeed.",
            .option = "--bucket-size",
            .least = 1,
            .bytes = true,
            .cost = "Two gradient buckets of so many bytes. Small units cost a collective's "
                    "latency each, large ones memory while they are gathered."},
           &Config::unit_bytes);

  const auto always = [](std::string_view why, std::vector<Json> holds) {
    return About{.sentence = "Accepted, without effect", .details = why, .holds = std::move(holds)};
  };
  const auto is_so = [&](bool value) {
    return always("What it chooses is always so here, or decided by `unit_bytes`.", {value});
  };
  zero.accept<bool>({"contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce",
                     "allgather_partitions", "overlap_comm", "load_from_fp32_weights"},
                    is_so(true));
  auto unused = is_so(true);
  unused.also = {"find_unused_parameters"};
  zero.accept<bool>({"ignore_unused_parameters"}, unused);
  zero.accept<bool>({"memory_efficient_linear", "override_module_apply", "compute_grad_norm"},
                    is_so(true));
  zero.accept<bool>({"elastic_checkpoint", "legacy_stage1", "pipeline_loading_checkpoint",
                     "save_muon_momentum_buffer_in_memory"},
                    is_so(false));
  zero.accept<bool>(
      {"round_robin_gradients", "log_trace_cache_warnings", "enable_sanity_checks",
       "parameter_alignment"},
      always("Slices lie side by side, aligned, and checks are always on.", {true, false}));
  auto gather_on_save = always("Weights are always saved whole.", {true, false});
  gather_on_save.also = {"gather_16bit_weights_on_model_save",
                         "stage3_gather_fp16_weights_on_model_save"};
  zero.accept<bool>({"stage3_gather_16bit_weights_on_model_save"}, gather_on_save);
  zero.accept<int64_t>(
      {"reduce_bucket_size", "allgather_bucket_size", "allgather_size", "sub_group_size"},
      always("`unit_bytes` says how much is gathered, reduced and updated at once.", {}));
  const auto of_stage3 = [&]<class Value>(Value, const char* key, const char* other,
                                          std::vector<Json> holds) {
    auto about = always(
        "From the second step on the pager knows every later use of a unit and keeps, within "
        "`stage3_max_live_parameters`, those that are needed soonest; small parameters share a "
        "unit with others.",
        std::move(holds));
    about.also = {other};
    zero.accept<Value>({key}, about);
  };
  of_stage3(int64_t(), "stage3_max_reuse_distance", "max_reuse_distance", {});
  of_stage3(int64_t(), "stage3_param_persistence_threshold", "param_persistence_threshold", {});
  of_stage3(int64_t(), "stage3_model_persistence_threshold", "model_persistence_threshold", {});
  of_stage3(int64_t(), "stage3_module_granularity_threshold", "module_granularity_threshold", {0});
  of_stage3(false, "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params",
            {false});
  of_stage3(false, "stage3_allgather_sequential", "allgather_sequential", {false});
  const auto leaf = always(
      "Operators are served by themselves, whichever module they are in, so that no module is a "
      "leaf.",
      {Json::array()});
  zero.accept<std::vector<Json>>(
      {"leaf_module.classes", "leaf_module.names", "leaf_module.name_suffixes"}, leaf);
  zero.accept<Json>(
      {"zenflow"},
      {.sentence = "Not here",
       .refused = "libzero has no ZenFlow. offload_optimizer.delayed_update_after hides the "
                  "update beside the next step."});
}

/// Old names: DeepSpeed maps them in the same way.
void add_old_names(All& all) {
  Rows zero(all, Part::engine, "zero_optimization", &Settings::engine);
  const auto to_cpu = [](std::string_view key) {
    return About{.sentence = "Old name: true is the device \"cpu\"",
                 .stands_for = key,
                 .meaning = {{true, "cpu"}, {false, Json()}}};
  };
  zero.accept<bool>({"cpu_offload"}, to_cpu("zero_optimization.offload_optimizer.device"));
  auto params = to_cpu("zero_optimization.offload_param.device");
  params.also = {"cpu_offload_params"};
  zero.accept<bool>({"cpu_offload_param"}, params);
  zero.accept<bool>({"cpu_offload_use_pin_memory"}, {.sentence = "Accepted, without effect",
                                                     .details = "Memory is pinned for GPUs alone.",
                                                     .holds = {false}});
  Rows top(all, Part::program, "", &Settings::program);
  top.accept<int64_t>({"steps_per_print"},
                      {.sentence = "Steps between lines on the console, as `train.log_every`",
                       .least = 1,
                       .stands_for = "train.log_every"});
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
       .least = 1,
       .cost = "Parameters of 1 / (ranks of a host) a rank in place of 1/N."},
      &Config::hpz_partition_size);
  zero.add("mics_shard_size",
           {.sentence = "Stages 1 to 3: consecutive ranks among which states are sharded, the "
                        "other blocks being replicas; -1: all ranks",
            .details = "MiCS, PyTorch's HSDP. Divides all ranks, and divides those of a host or is "
                       "a multiple of them. With the ranks of a host, no parameter comes from "
                       "another one, and gradients are added across hosts: the same results "
                       "bit for bit. Each rank then holds states as if there were no other host.",
            .least = -1,
            .cost = "States of 1 / `mics_shard_size` a rank in place of 1/N; saves the gathers "
                    "between hosts."},
           &Config::mics_shard_size);
  zero.accept<bool>(
      {"mics_hierarchical_params_gather"},
      {.sentence = "Accepted, without effect",
       .details =
           "Numbers from other hosts always come once to each host, and its ranks share them.",
       .holds = {true, false}});

  zero.add(
      "zero_packed_exponents",
      {.sentence = "Stages 1 to 3 on several hosts: numbers cross between hosts in fewer bytes, "
                   "and arrive with every bit",
       .details = "Exponents of neighbours are alike, and go in 4 bits instead of 8. Results "
                  "are those without it, bit for bit. What is quantised is not packed. Not in "
                  "DeepSpeed.",
       .option = "--packed-exponents",
       .cost = "Processor time for packing, beside the link's; bytes between hosts are 12.2 of "
               "16 bits in bf16 and 28.2 of 32 in fp32."},
      &Config::packed_exponents);

  Rows links(all, Part::engine, "zero_optimization", &Settings::engine, &Config::quantised);
  links.add(
      "zero_quantized_weights",
      {.sentence = "Stage 3 on several hosts: parameters cross between hosts quantised",
       .details = "ZeRO++'s qwZ. Their owner computes with what it sent, so all ranks have "
                  "the same. Other results than without; master weights are whole, and so is what "
                  "is saved.",
       .cost = "Half the bytes between hosts of bf16 (int4: a quarter); accuracy: a parameter is "
               "rounded to 8 bits of its block's largest."},
      &QuantisedLinks::weights);
  links.add("zero_quantized_nontrainable_weights",
            {.sentence = "Frozen parameters cross between hosts quantised too"},
            &QuantisedLinks::frozen_weights);
  links.add("zero_quantized_gradients",
            {.sentence = "Stage 3 on several hosts: gradients cross between hosts quantised",
             .details = "ZeRO++'s qgZ. They are added up exactly in each host, quantised once, and "
                        "added up in fp32 where they arrive. Other results than without.",
             .cost = "A quarter of bf16's bytes between hosts; accuracy, which `zeropp_loco_param` "
                     "gives back in part."},
            &QuantisedLinks::gradients);
  links.add("zero_quantized_weights_format",
            {.sentence = "Format of quantised parameters: whole numbers of 8 or 4 bits, or e4m3",
             .details = "DeepSpeed has int8 alone."},
            &QuantisedLinks::weights_format);
  links.add("zero_quantized_gradients_format",
            {.sentence = "Format of quantised gradients", .details = "DeepSpeed has int4 alone."},
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
                 "after which it begins anew, as it does after a load: checkpoints do not have "
                 "it.",
             .cost = "About a byte for each element that a rank sends."},
            Kind::section},
       [](Settings& root, const Json& section, Report& report) {
         auto& feedback = root.engine.quantised.feedback;
         if (section.is_null()) {
           feedback.reset();
         } else {
           feedback.emplace();
           read(*feedback, error_feedback(), section, "zero_optimization.zeropp_loco_param.",
                report);
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
      {.sentence = "Place of master weights and moments: none (the device), cpu (host memory) or "
                   "nvme (files)",
       .details = "At any stage, with the same results bit for bit. \"nvme\": they stream through "
                  "a few buffers in the update. \"cpu\": with the gradients that the update reads; "
                  "gradients are copied down as they are reduced (stages 0 and 1: once a step), "
                  "new parameters up in small blocks.",
       .option = "--offload-optimizer",
       .common = true,
       .cost = "12 bytes a parameter and rank share (bf16) leave the device. \"cpu\": 2 bytes a "
               "parameter down and 2 up a step. \"nvme\": each state is read and written once a "
               "step, 24 bytes a parameter in bf16.",
       .off = {"none"}},
      &OffloadOptimizer::device);
  optimizer.add(
      "nvme_path",
      {.sentence = "Folder on a local disk for what is offloaded to nvme",
       .details = "Each rank makes a private folder in it, which goes with the run (what a killed "
                  "run leaves, the next removes). Several, with commas between, are striped by the "
                  "measured speed of their disks.",
       .option = "--nvme-path",
       .argument = "DIR",
       .acts_alone = true},
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
                 .option = "--offload-gradients",
                 .cost = "The rank's slice of the gradients leaves the device; the disk writes and "
                         "reads it once a step, with accumulation once a micro-batch."},
                &OffloadOptimizer::gradients);
  optimizer.add(
      "delayed_update_after",
      {.sentence = "Updates after which each one runs beside the next step, which uses weights one "
                   "update old (ZeRO-Offload's delayed update; the paper: 40); 0: never",
       .details = "On any device; new parameters and gradients take a second copy. Not in "
                  "DeepSpeed.",
       .option = "--delayed-update-after",
       .cost = "A second copy of parameters and gradients; weights are one update old.",
       .acts_alone = true},
      &OffloadOptimizer::delayed_update_after);
  const auto of_gpus = [](std::vector<Json> holds) {
    return About{.sentence = "Accepted, without effect",
                 .details = "It concerns transfers to a GPU and DeepSpeed's start.",
                 .holds = std::move(holds)};
  };
  optimizer.accept<bool>({"pin_memory", "fast_init"}, of_gpus({true, false}));
  optimizer.accept<bool>({"super_offload"}, of_gpus({false}));
  optimizer.accept<double>({"cpuadam_cores_perc", "buffer_size", "max_in_cpu"}, of_gpus({}));

  Rows param(all, Part::engine, "zero_optimization.offload_param", &Settings::engine,
             &Config::offload_param);
  param.add("device",
            {.sentence = "Stage 3: where parameters live between their uses: none (the device), "
                         "cpu (host memory) or nvme (files)",
             .details = "\"nvme\": every rank reads its own slices and the group gathers, also a "
                        "rank that is alone. \"cpu\": a gather copies the rank's slice to the "
                        "device, and the group gathers there (nothing is read in place any more).",
             .option = "--offload-param",
             .cost = "The rank's slice of the parameters leaves the device; each gather brings it "
                     "back, twice a step unless `stage3_max_live_parameters` holds the model.",
             .off = {"none"}},
            &OffloadParam::device);
  param.add("nvme_path",
            {.sentence = "Folder, or folders, as `offload_optimizer.nvme_path`",
             .details = "If both are on disk, states are striped over the folders of both.",
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
  param.accept<bool>(
      {"pin_memory", "fast_init"},
      {.sentence = "Accepted, without effect", .details = buffers, .holds = {true, false}});
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
           .details = "Not in DeepSpeed.",
           .cost = "8 bytes a page of 4 KiB, and a pass over what is read and written."},
          &Aio::checksums);
  const auto of_deepspeed = [](std::vector<Json> holds) {
    return About{.sentence = "Accepted, without effect",
                 .details =
                     "It concerns DeepSpeed's own engine; libzero's submits and completes all that "
                     "there is at once.",
                 .holds = std::move(holds)};
  };
  aio.accept<bool>({"single_submit"}, of_deepspeed({false}));
  aio.accept<bool>({"overlap_events"}, of_deepspeed({true}));
  aio.accept<bool>({"use_gds"}, of_deepspeed({false}));
  aio.accept<int64_t>({"intra_op_parallelism", "thread_count"}, of_deepspeed({1}));
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
                 .zero_is_none = true,
                 .cost = "A second forward of the recomputed blocks, up to a third of a step's "
                         "compute; saves their activations but the input."},
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
          "activations are in host memory. `every` switches recomputation on.",
      .holds = {false}};
  recompute.accept<bool>(
      {"partition_activations", "cpu_checkpointing", "synchronize_checkpoint_boundary", "profile"},
      of_gpus);
  recompute.accept<int64_t>({"number_checkpoints"},
                            {.sentence = "Accepted, without effect",
                             .details = "`every` says which blocks are recomputed."});

  Rows tiling(all, Part::model, "tiling", &Settings::model);
  tiling.add("max_elements",
             {.sentence = "Linear layers whose weight has more elements are split into tiles of at "
                          "most so many, which stage 3 brings in one at a time; 0: none",
              .details = "Memory-centric tiling: each tile is a parameter of its own. Results are "
                         "equal to rounding; the files of `zero train` have the whole layers. In "
                         "C++ `zero::tile_linears(*model, elements)` before the engine is "
                         "constructed. DeepSpeed has `zero.TiledLinear` alone.",
              .option = "--tile-elements",
              .zero_is_none = true,
              .cost = "A matrix product for each tile."},
             &ModelSettings::tile_elements);
}

void add_batch(All& all) {
  Rows engine(all, Part::engine, "", &Settings::engine);
  Rows program(all, Part::program, "", &Settings::program);
  engine.accept<int64_t>({"train_batch_size"},
                         {.sentence = "Micro-batch x accumulation x ranks",
                          .details = "Any two of the three determine the third. The options of "
                                     "`zero train` stand for the keys of the file."});
  all.back().set = [](Settings&, const Json&) {};  // the batch rule reads it: settings.cpp
  program.add("train_micro_batch_size_per_gpu",
              {.sentence = "Sequences or samples that a rank passes at a time",
               .details = "`zero train`: 8 where nothing says it.",
               .option = "--micro-batch",
               .common = true,
               .least = 1},
              &ProgramSettings::micro_batch_size);
  engine.add("gradient_accumulation_steps",
             {.sentence = "Micro-batches of a rank whose gradients are added before an update",
              .option = "--accumulate",
              .least = 1,
              .cost = "Gradients are kept between micro-batches, in fp32 unless "
                      "data_types.grad_accum_dtype says otherwise; stage 3 gathers and stages 2 "
                      "and 3 reduce each time."},
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
      "gradient_clipping_value",
      {.sentence = "Magnitude at which each element of the mean gradient is cut off; 0: none "
                   "is",
       .details = "After clipping by norm. Works with `update_in_backward`. Not in DeepSpeed.",
       .option = "--clip-value",
       .least = 0},
      &Config::gradient_clipping_value);
  engine.add(
      "layer_major_accumulation",
      {.sentence = "All micro-batches of a step pass one layer before the next: stage 3 gathers, "
                   "and stages 2 and 3 reduce, once a step",
       .details = "Stage 3 gathers each parameter twice a step, whatever the number of "
                  "micro-batches. Layers are recomputed in backward; `activation_checkpointing` "
                  "says where their inputs are kept. In C++ `zero::backward_layer_major` for any "
                  "model that shows its layers. Not in DeepSpeed.",
       .option = "--layer-major",
       .cost = "A second forward of each layer, and the inputs of all layers for all "
               "micro-batches."},
      &Config::layer_major_accumulation);
  engine.add("update_in_backward",
             {.sentence = "Update a unit as soon as its gradient is reduced, beside the rest of "
                          "backward; without clipping",
              .details = "Gradients are not kept; for states on disk, whose bytes then pass beside "
                         "the compute. The same results bit for bit; needs stage 2 or 3, "
                         "`gradient_clipping` 0, and one pass a step (one micro-batch, or "
                         "`layer_major_accumulation`); a gradient that is not finite is an error "
                         "then. Not in DeepSpeed.",
              .option = "--update-in-backward",
              .cost = "No clipping. Saves the gradients' memory."},
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
       .details =
           "Written as 6442450944 or \"6GB\" (GB is 2^30 bytes). States that exceed it are refused "
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
            .common = true,
            .words = {{"fp32", false}, {"bf16", true}, {"fp16", false}}},
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
       .option = "--split-master-weights",
       .cost = "Saves 2 bytes a parameter; ties round away from zero."},
      &Config::split_master_weights);
  bf16.add("check_grad_overflow",
           {.sentence = "Leave out a step with a gradient that is infinite or NaN",
            .details = "On all ranks together. False: it updates the weights all the same. In fp32 "
                       "and fp16 such a step is always left out."},
           &Config::check_grad_overflow);
  bf16.accept<bool>({"immediate_grad_update"},
                    {.sentence = "Accepted, without effect",
                     .details = "Gradients go to the array that the update reads as they are made, "
                                "always."});
  bf16.add("bf16_master_weights_and_grads",
           {.sentence = "No fp32 master weights: bf16 parameters are updated themselves, and "
                        "micro-batches add up in bf16",
            .details = "4 bytes a parameter less. Weights are rounded stochastically, by a hash of "
                       "element and step, so that results are the same at every stage and number "
                       "of ranks. DeepSpeed rounds to nearest."},
           &Config::bf16_master_weights_and_grads);
  bf16.add("bf16_optimizer_states",
           {.sentence = "With that: the optimizer's states in bf16 too, rounded likewise",
            .details = "Half of their bytes."},
           &Config::bf16_optimizer_states);
}

void add_fp16(All& all) {
  Rows fp16(all, Part::engine, "fp16", &Settings::engine);
  fp16.add("enabled",
           {.sentence = "Parameters and gradients in fp16, with fp32 master weights in the "
                        "optimizer states and a scaled loss",
            .option = "--dtype",
            .common = true,
            .words = {{"fp32", false}, {"bf16", false}, {"fp16", true}}},
           &Config::fp16);
  fp16.accept<bool>({"auto_cast"},
                    {.sentence = "Accepted, without effect",
                     .details = "DeepSpeed casts what it passes to the module; here the program "
                                "calls its module itself, and gives it inputs of its dtype."});
  Rows scaling(all, Part::engine, "fp16", &Settings::engine, &Config::loss_scaling);
  scaling.add("loss_scale",
              {.sentence = "Factor of the loss for backward; 0: a dynamic scale",
               .details = "docs/precision.md says how that follows overflows.",
               .least = 0},
              &LossScaling::fixed);
  scaling.add("initial_scale_power",
              {.sentence = "The first dynamic scale is 2 to this power", .most = 127},
              &LossScaling::initial_power);
  scaling.add("loss_scale_window", {.sentence = "Steps without overflow after which it doubles"},
              &LossScaling::window);
  scaling.add("hysteresis",
              {.sentence = "The overflow of this number halves it, and every one after that",
               .details = "Until it doubles again."},
              &LossScaling::hysteresis);
  scaling.add("consecutive_hysteresis",
              {.sentence = "A step without overflow begins to count `hysteresis` anew"},
              &LossScaling::consecutive_hysteresis);
  scaling.add(
      "min_loss_scale",
      {.sentence = "It is not halved below this; a further overflow is an error", .least = 0},
      &LossScaling::minimum);
  fp16.accept<bool>(
      {"fp16_master_weights_and_grads"},
      {.sentence = "Only the default",
       .only = false,
       .because = "an fp16 weight loses updates below 6e-8 whatever its size. Leave it out, or use "
                  "bf16.bf16_master_weights_and_grads"});
}

void add_autocast(All& all) {
  Rows rows(all, Part::engine, "torch_autocast", &Settings::engine, &Config::autocast);
  rows.add("enabled",
           {.sentence = "Compute matrix products in bf16 or fp16, with parameters in fp32",
            .details = "Parameters, gradients and optimizer states stay as they are. `zero train` "
                       "does it; a C++ program computes its loss in a `zero::Autocast` scope.",
            .option = "--autocast",
            .argument = "bf16|fp16",
            .by_option = true},
           &AutocastSettings::enabled);
  rows.add("dtype",
           {.sentence = "Dtype of these products; with fp16 the loss is scaled as the section fp16 "
                        "says",
            .option = "--autocast",
            .spellings = kDtypes},
           &AutocastSettings::dtype);
  rows.accept<std::vector<Json>>(
      {"lower_precision_safe_modules"},
      {.sentence = "Accepted, without effect",
       .details = "DeepSpeed sends gradients of these modules in 16 bits, and at stage 3 their "
                  "parameters; here `communication_data_type` applies to all gradients."});
}

void add_data_types(All& all) {
  Rows types(all, Part::engine, "data_types", &Settings::engine);
  types.add("grad_accum_dtype",
            {.sentence = "Dtype in which micro-batches are added up: \"model\" is the parameters' "
                         "own (with bf16 or fp16 also \"bf16\", \"fp16\")",
             .spellings = kDtypes},
            &Config::accumulation_dtype);
  types.add("optimizer_state_dtype",
            {.sentence = "Format of the optimizer's states besides master weights: fp32, "
                         "bf16, or 8 bits an element",
             .details = "AdamW's two moments, Lion's and SGD's momentum, Adagrad's sum; updates "
                        "compute in fp32 and round stochastically, so that results are the same "
                        "at every stage, number of ranks and tier. \"int8\" and \"fp8\" mean "
                        "\"8bit\". Checkpoints of the whole (`save_full`) hold fp32 and load in "
                        "any format. Refused with LAMB and Muon. Not in DeepSpeed, whose "
                        "`bf16.bf16_optimizer_states` says \"bf16\" of bf16 parameters.",
             .option = "--optimizer-states",
             .cost = "Bytes an element of a state: 4, 2, or 1 1/16. docs/precision.md says how "
                     "near to fp32 8 bits come.",
             .spellings = kStateFormats},
            &Config::optimizer_states);
  types.accept<std::string>(
      {"param_dtype", "buffer_dtype"},
      {.sentence = "Accepted, without effect",
       .details = "Parameters have the dtype that the sections bf16 and fp16 say, and buffers keep "
                  "theirs."});
}

void add_reduction(All& all) {
  Rows engine(all, Part::engine, "", &Settings::engine);
  engine.add(
      "communication_data_type",
      {.sentence =
           "Dtype in which gradients are sent and added over ranks, where not that in which "
           "they are collected",
       .details =
           "Sums are added up in fp32 and rounded once, whatever it is: \"fp32\" sends twice "
           "the bytes of 16 bits and gives what those give, \"bf16\" and \"fp16\" halve what "
           "fp32 gradients take. One rank sends nothing and rounds nothing. Refused between "
           "bf16 and fp16.",
       .spellings = kDtypes},
      &Config::communication_dtype);
  engine.add("prescale_gradients",
             {.sentence = "Each rank divides its gradients by the ranks before they are added",
              .details = "Always so in fp16, whose sums would leave its range, unless "
                         "`gradient_predivide_factor` is given."},
             &Config::prescale_gradients);
  engine.add("gradient_predivide_factor",
             {.sentence = "Each rank divides its gradients by this before they are added, and the "
                          "sum is divided by the rest",
              .details = "Without effect with `prescale_gradients`.",
              .least = 0},
             &Config::gradient_predivide_factor);
}

void add_measuring(All& all) {
  Rows program(all, Part::program, "", &Settings::program);
  program.add("wall_clock_breakdown",
              {.sentence = "Tell of each step how long forward, backward and step took, and what "
                           "of that was spent waiting",
               .details = "On the console and in log.jsonl: docs/profiling.md. Of rank 0.",
               .option = "--wall-clock-breakdown"},
              &ProgramSettings::wall_clock_breakdown);
}

void add_program(All& all) {
  Rows train(all, Part::program, "train", &Settings::program);
  using Program = ProgramSettings;
  train.add("model",
            {.sentence = "Sizes of the model, whose initial weights are random: gpt2, gpt2-medium, "
                         "gpt2-large, gpt2-xl, gpt2-nano, or a Hugging Face config.json",
             .option = "--model",
             .common = true,
             .not_empty = true},
            &Program::model);
  train.add("data",
            {.sentence = "Text or token file, or a folder made by `zero data prepare`",
             .option = "--data",
             .common = true},
            &Program::data);
  train.add("val_data",
            {.sentence = "File or folder to validate on; without it the validation split of --data",
             .option = "--val-data"},
            &Program::val_data);
  train.add("out",
            {.sentence = "Folder of log.jsonl, model.safetensors and config.json",
             .option = "--out",
             .common = true,
             .not_empty = true},
            &Program::out);
  train.add("vocab_size",
            {.sentence = "Tokens of the model; 0: its own, for gpt2-nano those of the data",
             .option = "--vocab-size",
             .zero_is_none = true},
            &Program::vocab_size);
  train.add("seq",
            {.sentence = "Tokens of a sequence", .option = "--seq", .common = true, .least = 1},
            &Program::seq);
  train.add("steps",
            {.sentence = "Updates of the weights", .option = "--steps", .common = true, .least = 1},
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
  train.add("schedule",
            {.sentence = "Decay after the warm-up",
             .details = "wsd: the rate stays, and falls linearly in the last steps. The section "
                        "`scheduler` has more schedules, and comes in its place.",
             .option = "--schedule"},
            &Program::schedule);
  train.add("decay_steps",
            {.sentence = "Steps of wsd's decay; a tenth of --steps where it is left out",
             .option = "--decay-steps",
             .least = 1},
            &Program::decay_steps);
  train.add("dropout",
            {.sentence = "Probability; the model's own where it is left out",
             .option = "--dropout",
             .least = 0,
             .below = 1},
            &Program::dropout);
  train.add("seed",
            {.sentence = "Seed of weights, of the order of the data and of dropout",
             .option = "--seed",
             .least = -9223372036854775808.0},
            &Program::seed);
  train.add(
      "threads",
      {.sentence = "Threads of each rank; 0: OMP_NUM_THREADS, or the cores shared by the ranks",
       .option = "--threads",
       .most = 65536,
       .zero_is_none = true},
      &Program::threads);
  train.add("device",
            {.sentence = "Device on which the model lies and is trained",
             .details = "cuda: each rank of a host takes the device of its number there, and NCCL "
                        "carries their tensors. any: that, where there is such a device and "
                        "libzero's plugin for it; else the CPU, and a line says why.",
             .option = "--device",
             .common = true},
            &Program::device);
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
  train.add("detect_anomaly",
            {.sentence = "Looks at the output of every operator for the first NaN or infinity",
             .details = "Without it a step whose loss or gradient is not finite is run again so.",
             .option = "--detect-anomaly",
             .cost = "time: a pass over each output"},
            &Program::detect_anomaly);
  train.add(
      "check_replicas",
      {.sentence = "Steps between checks that parameters which several ranks hold are the same; 0: "
                   "none",
       .details =
           "By checksums of units, before the update. What differs is an error that names "
           "parameters and ranks. At stage 3 nothing is held twice, but with mics_shard_size.",
       .option = "--check-replicas",
       .argument = "STEPS",
       .cost = "A pass over the parameters every so many steps."},
      &Program::check_replicas);
  train.add("group_norms",
            {.sentence = "Write the gradient norm of each parameter group to log.jsonl",
             .details = "In the order of the groups: what decays, then what does not (biases and "
                        "norms), then what Muon leaves to AdamW.",
             .option = "--group-norms",
             .cost = "A pass over the gradients."},
            &Program::group_norms);
  train.add("skip_spikes",
            {.sentence = "Leave out steps whose loss is far above that of the steps before",
             .details = "More than 6 standard deviations above the mean of the last 32, and 1.1 "
                        "times it. Such a step is always told of, with what changed.",
             .option = "--skip-spikes"},
            &Program::skip_spikes);
  train.add(
      "rewind_spikes",
      {.sentence = "At such a loss go back to the newest checkpoint that is at least so many steps "
                   "old, and on with the data that follow; 0: never",
       .details =
           "Needs save_every; as many checkpoints are kept as that takes. Where none is so old, "
           "the step is left out. The run ends with an error when it has gone back three times "
           "without passing the step of the first spike. log.jsonl has the steps that made the "
           "weights, and an event for each time.",
       .option = "--rewind-spikes",
       .argument = "STEPS",
       .zero_is_none = true},
      &Program::rewind_spikes);
  train.add("profile",
            {.sentence = "Write what all ranks do in one step to this file, for Perfetto",
             .details = "The trace event format, which ui.perfetto.dev and Chrome open: "
                        "docs/profiling.md.",
             .option = "--profile",
             .argument = "FILE",
             .cost = "Memory for the step's spans (16 MiB), and some time in that step."},
            &Program::profile);
  train.add("profile_step",
            {.sentence = "Step that the profile shows; a resumed run begins to count anew",
             .option = "--profile-step",
             .least = 1},
            &Program::profile_step);
  train.add("save_every",
            {.sentence = "Steps between checkpoints for --resume; 0: none",
             .option = "--save-every",
             .common = true,
             .zero_is_none = true},
            &Program::save_every);
  train.add("keep_last",
            {.sentence = "Newest checkpoints that are kept", .option = "--keep-last", .least = 1},
            &Program::keep_last);
  train.add("keep_every",
            {.sentence = "Keep also the checkpoints of steps that are multiples of it; 0: none",
             .option = "--keep-every",
             .zero_is_none = true},
            &Program::keep_every);
  train.add("sample_tokens",
            {.sentence = "Tokens to generate at the end; 0: none", .option = "--sample-tokens"},
            &Program::sample_tokens);
  train.add("prompt", {.sentence = "Text that the sample continues", .option = "--prompt"},
            &Program::prompt);
  train.add("temperature",
            {.sentence = "Temperature of the sample; 0: always the likeliest token",
             .option = "--temperature",
             .least = 0},
            &Program::temperature);
  train.add("top_k",
            {.sentence = "The sample takes only the likeliest so many tokens; 0: any",
             .option = "--top-k",
             .zero_is_none = true},
            &Program::top_k);
  train.add("decay_all",
            {.sentence = "Weight decay acts on biases and norms too, and not on matrices alone",
             .option = "--decay-all"},
            &Program::decay_all);
  train.add("overwrite", {.sentence = "Replace an earlier run in --out", .option = "--overwrite"},
            &Program::overwrite);
  train.add("resume",
            {.sentence = "Continue the run in --out from a checkpoint: the newest that is sound "
                         "(auto), that of a step, or a folder",
             .option = "--resume",
             .common = true,
             .argument = "auto|STEP|PATH",
             .alone = true,
             .by_option = true},
            &Program::resume);
  train.add("resume_from",
            {.sentence = "Step, or folder, of the checkpoint that `resume` goes on from; empty or "
                         "\"auto\": the newest that is sound",
             .details = "A folder elsewhere begins a run of its own in `out`.",
             .option = "--resume"},
            &Program::resume_from);
}

/// The section has rows of its own, by optimizer.
void add_optimizer(All& all) {
  all.push_back(
      {Spec{
           "optimizer",
           {.sentence = "The optimizer: `type` (\"AdamW\", \"Adam\", \"SGD\", ...: "
                        "docs/optimizers.md) and `params`",
            .details = "Used where the program names none. Names are DeepSpeed's and PyTorch's, in "
                       "any case; \"Adam\" is AdamW too, as in DeepSpeed, unless `adam_w_mode` is "
                       "false."},
           Kind::section},
       [](Settings& root, const Json& section, Report& report) {
         root.engine.optimizer = read_optimizer(section, report);
       },
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
    add_old_names(all);
    add_batch(all);
    add_dtypes(all);
    add_fp16(all);
    add_autocast(all);
    add_data_types(all);
    add_reduction(all);
    add_engine(all);
    add_optimizer(all);
    add_scheduler(all);
    add_aio(all);
    add_model(all);
    add_program(all);
    add_measuring(all);
    add_monitors(all);
    add_deepspeed(all);
    return all;
  }();
  return rows;
}

}  // namespace zero::fields
