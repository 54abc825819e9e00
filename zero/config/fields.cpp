// The table of all settings: it has one row for each.
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
      {"bf16", AccumulationDtype::model},  // settings.cpp checks that bf16 is enabled
      {"fp16", AccumulationDtype::model}};
};
template <>
struct Choices<TrainingDevice> {
  static constexpr std::pair<std::string_view, TrainingDevice> list[] = {
      {"cpu", TrainingDevice::cpu}, {"cuda", TrainingDevice::cuda}, {"any", TrainingDevice::any}};
};
template <>
struct Choices<BaseFormat> {
  static constexpr const auto& list = kBaseFormats;
};
template <>
struct Choices<TrainingTask> {
  static constexpr std::pair<std::string_view, TrainingTask> list[] = {
      {"auto", TrainingTask::any},
      {"lm", TrainingTask::language},
      {"sft", TrainingTask::supervised},
      {"mlm", TrainingTask::masked},
      {"classify", TrainingTask::classes}};
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

/// The names that DeepSpeed and PyTorch have for dtypes.
const std::vector<std::pair<std::string_view, std::string_view>> kDtypes{
    {"float32", "fp32"},     {"float", "fp32"},    {"torch.float32", "fp32"},
    {"torch.float", "fp32"}, {"bfloat16", "bf16"}, {"torch.bfloat16", "bf16"},
    {"float16", "fp16"},     {"half", "fp16"},     {"torch.float16", "fp16"},
    {"torch.half", "fp16"}};

/// The other names of formats of optimizer states.
const std::vector<std::pair<std::string_view, std::string_view>> kStateFormats{
    {"float32", "fp32"},     {"float", "fp32"},      {"torch.float32", "fp32"},
    {"torch.float", "fp32"}, {"bfloat16", "bf16"},   {"torch.bfloat16", "bf16"},
    {"int8", "8bit"},        {"8-bit", "8bit"},      {"fp8", "8bit"},
    {"torch.int8", "8bit"},  {"torch.uint8", "8bit"}};

void add_zero_optimization(All& all) {
  Rows zero(all, Part::engine, "zero_optimization", &Settings::engine);
  zero.add(
      "stage",
      {.sentence = "ZeRO stage: 0 shards nothing, 1 shards optimizer states, 2 also gradients, 3 "
                   "also parameters",
       .option = "--stage",
       .common = true,
       .most = 3,
       .cost = "Stages 0 to 2 send 2 Psi (N-1)/N elements a step, stage 3 up to 3 Psi (N-1)/N. "
               "In bf16 a rank holds 16 bytes a parameter at stage 0, 4 + 12/N at 1, "
               "2 + 14/N at 2, 16/N at 3."},
      &Config::stage);
  zero.add(
      "stage3_max_live_parameters",
      {.sentence = "Stage 3: the most parameters (elements) that are gathered at a time",
       .details = "0 releases each unit right after the operator that used it. With parameters on "
                  "disk and no `memory_budget`, the engine lowers this to half of the host memory "
                  "that a step leaves to the rank.",
       .option = "--live-parameters",
       .also = {"max_live_parameters"},
       .cost =
           "2 bytes (fp32: 4) for each parameter if units are gathered by copying. A smaller value "
           "gathers units a second time in backward, at most Psi (N-1)/N elements more a step."},
      &Config::max_live_parameters);
  zero.add("stage3_prefetch_bucket_size",
           {.sentence = "Stage 3: the most parameters that are gathered ahead of their use, as a "
                        "part of `stage3_max_live_parameters`",
            .details = "Not used on one host, where units are read in place.",
            .also = {"prefetch_bucket_size"},
            .cost = "No memory beyond that of `stage3_max_live_parameters`."},
           &Config::prefetch_bucket_size);
  Rows speeds(all, Part::engine, "zero_optimization.prefetch_speeds", &Settings::engine,
              &Config::prefetch_speeds);
  const auto speed = [](std::string_view sentence, std::string_view details) {
    return About{.sentence = sentence, .details = details, .least = 0};
  };
  speeds.add(
      "compute",
      speed("FLOPs a second of a rank; if given, stage 3 gathers no further ahead than makes a "
            "step shorter",
            "After the first update the engine simulates a step at the speeds of this section, and "
            "chooses a distance of at most `stage3_prefetch_bucket_size`. Gathered units then take "
            "less memory, and results are the same. `zero bench timeline` shows the simulation. 0: "
            "on several hosts, if `link` is not given either, both speeds are measured, and the "
            "second step is simulated; otherwise the engine does not choose. Not in DeepSpeed."),
      &PrefetchSpeeds::compute);
  speeds.add(
      "link",
      speed("Bytes a second that a rank sends; on several hosts, that a host sends",
            "0: measured at the start on several hosts; treated as infinitely fast on one host, "
            "and where NCCL carries tensors."),
      &PrefetchSpeeds::link);
  speeds.add("pcie",
             speed("Bytes a second between device and host, in each direction",
                   "0: treated as infinitely fast."),
             &PrefetchSpeeds::pcie);
  speeds.add("disk", speed("Bytes a second of a rank's disk", "0: treated as infinitely fast."),
             &PrefetchSpeeds::disk);
  zero.add(
      "unit_bytes",
      {.sentence = "Size of a unit: the bytes of parameters that are gathered and reduced together",
       .details = "A larger parameter is a unit of its own. Not in DeepSpeed.",
       .option = "--bucket-size",
       .least = 1,
       .bytes = true,
       .cost = "Two gradient buckets of this size. Each small unit costs the latency of a "
               "collective; large units take memory while they are gathered."},
      &Config::unit_bytes);

  const auto always = [](std::string_view why, std::vector<Json> holds) {
    return About{.sentence = "Accepted, without effect", .details = why, .holds = std::move(holds)};
  };
  const auto is_so = [&](bool value) {
    return always("libzero always works in this way, or `unit_bytes` decides it.", {value});
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
      always("Slices are always contiguous and aligned, and checks are always on.", {true, false}));
  auto gather_on_save = always("`zero train` always saves whole weights.", {true, false});
  gather_on_save.also = {"gather_16bit_weights_on_model_save",
                         "stage3_gather_fp16_weights_on_model_save"};
  zero.accept<bool>({"stage3_gather_16bit_weights_on_model_save"}, gather_on_save);
  zero.accept<int64_t>(
      {"reduce_bucket_size", "allgather_bucket_size", "allgather_size", "sub_group_size"},
      always("`unit_bytes` is the size that is gathered, reduced and updated at once.", {}));
  const auto of_stage3 = [&]<class Value>(Value, const char* key, const char* other,
                                          std::vector<Json> holds) {
    auto about = always(
        "From the second step on libzero knows the order in which units are used. Within "
        "`stage3_max_live_parameters` it keeps the units that are needed soonest. Small parameters "
        "share a unit.",
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
      "libzero gathers parameters for each operator, in whichever module it is, so no module has "
      "to be a leaf.",
      {Json::array()});
  zero.accept<std::vector<Json>>(
      {"leaf_module.classes", "leaf_module.names", "leaf_module.name_suffixes"}, leaf);
  zero.accept<Json>(
      {"zenflow"},
      {.sentence = "Not supported",
       .refused = "libzero has no ZenFlow. Use offload_optimizer.delayed_update_after, which runs "
                  "the update during the next step."});
}

/// Old names: DeepSpeed maps them in the same way.
void add_old_names(All& all) {
  Rows zero(all, Part::engine, "zero_optimization", &Settings::engine);
  const auto to_cpu = [](std::string_view key) {
    return About{.sentence = "Old name: true means the device \"cpu\"",
                 .stands_for = key,
                 .meaning = {{true, "cpu"}, {false, Json()}}};
  };
  zero.accept<bool>({"cpu_offload"}, to_cpu("zero_optimization.offload_optimizer.device"));
  auto params = to_cpu("zero_optimization.offload_param.device");
  params.also = {"cpu_offload_params"};
  zero.accept<bool>({"cpu_offload_param"}, params);
  zero.accept<bool>({"cpu_offload_use_pin_memory"}, {.sentence = "Accepted, without effect",
                                                     .details = "Memory is pinned only for GPUs.",
                                                     .holds = {false}});
  Rows top(all, Part::program, "", &Settings::program);
  top.accept<int64_t>({"steps_per_print"},
                      {.sentence = "Steps between lines on the console, as `train.log_every`",
                       .least = 1,
                       .stands_for = "train.log_every"});
}

void add_hosts(All& all) {
  Rows zero(all, Part::engine, "zero_optimization", &Settings::engine);
  zero.add("zero_hpz_partition_size",
           {.sentence = "Stage 3: number of ranks that keep all parameters together from forward "
                        "to backward; 1: switched off",
            .details =
                "ZeRO++'s hpZ. The value is 1 or the number of ranks on a host. Each host keeps "
                "all parameters: on the CPU in one array, which its ranks read in place, on "
                "devices an equal part of each unit on each. So parameters cross between hosts "
                "once a step, instead of twice a micro-batch. On one host the key changes nothing. "
                "With quantised weights each rank also keeps its own exact slice.",
            .least = 1,
            .cost = "A rank holds 1 / (ranks of a host) of the parameters, instead of 1/N."},
           &Config::hpz_partition_size);
  zero.add("mics_shard_size",
           {.sentence = "Stages 1 to 3: number of consecutive ranks that shard the states among "
                        "themselves; -1: all ranks",
            .details =
                "MiCS, or PyTorch's HSDP. Each block of so many ranks is a replica of the others. "
                "The value must divide the number of all ranks. It must also divide the ranks of a "
                "host, or be a multiple of them. If it is the ranks of a host, parameters do not "
                "cross between hosts, gradients are added over hosts, and results are the same bit "
                "for bit. A rank then holds as many states as in a job on one host.",
            .least = -1,
            .cost = "A rank holds 1 / `mics_shard_size` of the states, instead of 1/N. Saves the "
                    "gathers between hosts."},
           &Config::mics_shard_size);
  zero.accept<bool>({"mics_hierarchical_params_gather"},
                    {.sentence = "Accepted, without effect",
                     .details = "Data from other hosts always crosses once for each host, and the "
                                "ranks of the host share it.",
                     .holds = {true, false}});

  zero.add("zero_packed_exponents",
           {.sentence = "Stages 1 to 3 on several hosts: send numbers between hosts in fewer "
                        "bytes, without loss",
            .details = "Exponents of neighbouring numbers are similar, so they are sent in 4 bits "
                       "instead of 8. Results are the same bit for bit. Quantised numbers are not "
                       "packed. Not in DeepSpeed.",
            .option = "--packed-exponents",
            .cost = "Processor time for packing, while the link is busy. Between hosts a bf16 "
                    "number takes 12.2 bits instead of 16, and an fp32 number 28.2 instead of 32."},
           &Config::packed_exponents);

  Rows links(all, Part::engine, "zero_optimization", &Settings::engine, &Config::quantised);
  links.add("zero_quantized_weights",
            {.sentence = "Stage 3 on several hosts: quantise parameters that cross between hosts",
             .details = "ZeRO++'s qwZ. The owner of a slice also computes with the values that it "
                        "sent, so all ranks have the same weights. Results differ from those "
                        "without the key. Master weights and saved files are exact.",
             .cost = "Half of bf16's bytes between hosts (int4: a quarter). Accuracy: a parameter "
                     "is rounded to 8 bits, relative to the largest of its block."},
            &QuantisedLinks::weights);
  links.add("zero_quantized_nontrainable_weights",
            {.sentence = "Quantise frozen parameters that cross between hosts, too"},
            &QuantisedLinks::frozen_weights);
  links.add(
      "zero_quantized_gradients",
      {.sentence = "Stage 3 on several hosts: quantise gradients that cross between hosts",
       .details =
           "ZeRO++'s qgZ. Each host adds up its ranks' gradients exactly and quantises the sum "
           "once. The receiver adds the sums in fp32. Results differ from those without the key.",
       .cost = "A quarter of bf16's bytes between hosts. Accuracy, a part of which "
               "`zeropp_loco_param` gives back."},
      &QuantisedLinks::gradients);
  links.add("zero_quantized_weights_format",
            {.sentence = "Format of quantised parameters: integers of 8 or 4 bits, or fp8 (e4m3)",
             .details = "DeepSpeed has only int8."},
            &QuantisedLinks::weights_format);
  links.add("zero_quantized_gradients_format",
            {.sentence = "Format of quantised gradients", .details = "DeepSpeed has only int4."},
            &QuantisedLinks::gradients_format);
  links.add("zero_quantized_block_size",
            {.sentence = "Elements that share one scale, which takes 4 bytes",
             .details = "The scale is the largest magnitude of the block divided by the largest "
                        "number of the format, so no element is clipped. Not in DeepSpeed.",
             .least = 64,
             .most = comm::kLargestBlock,
             .multiple_of = 64},
            &QuantisedLinks::block);
  all.push_back(
      {Spec{"zero_optimization.zeropp_loco_param",
            {.sentence =
                 "Add to each quantised gradient what earlier ones have lost by rounding (LoCo)",
             .details = "`err_beta` (0.8; at least 0, less than 1) is the share of the old value "
                        "in the moving average of the lost parts. `reset_T` (1024; at least 1) is "
                        "the number of updates after which the average starts again from zero. It "
                        "also starts again after a load, because checkpoints do not hold it.",
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
      {.sentence = "Where master weights and moments are kept: none (the device), cpu (host "
                   "memory) or nvme (files)",
       .details =
           "Works at any stage; results are the same bit for bit. \"nvme\": the update streams "
           "them through a few buffers. \"cpu\": the gradients that the update reads are in host "
           "memory too. They are copied to the host as they are reduced (stages 0 and 1: once a "
           "step), and new parameters are copied back in small blocks.",
       .option = "--offload-optimizer",
       .common = true,
       .cost = "The device holds 12 bytes less for each parameter of the rank's share (bf16). "
               "\"cpu\": a step copies 2 bytes a parameter to the host, and 2 back. \"nvme\": each "
               "state is read and written once a step, 24 bytes a parameter in bf16.",
       .off = {"none"}},
      &OffloadOptimizer::device);
  optimizer.add(
      "nvme_path",
      {.sentence = "Folder on a local disk for states that are offloaded to nvme",
       .details =
           "Each rank makes a private folder in it, which is removed when the run ends (the next "
           "run removes the folders of a killed one). You may give several folders, separated by "
           "commas; states are then striped over them by the measured speed of their disks.",
       .option = "--nvme-path",
       .argument = "DIR",
       .acts_alone = true},
      &OffloadOptimizer::nvme_path);
  optimizer.add(
      "buffer_count",
      {.sentence = "Blocks that are in memory at a time; each has 4 MiB of every state array",
       .least = 1},
      &OffloadOptimizer::buffer_count);
  optimizer.add(
      "pipeline_read",
      {.sentence = "Read the next blocks while a block is updated", .details = "DeepSpeed: false."},
      &OffloadOptimizer::pipeline_read);
  optimizer.add("pipeline_write",
                {.sentence = "Write a block back while the next one is updated",
                 .details = "DeepSpeed: false."},
                &OffloadOptimizer::pipeline_write);
  optimizer.add("ratio",
                {.sentence = "The part of master weights and moments that is offloaded; the rest "
                             "(the first units) stays on the device",
                 .least = 0,
                 .most = 1},
                &OffloadOptimizer::ratio);
  optimizer.add(
      "gradients",
      {.sentence = "Keep gradients on disk too, beside the optimizer's states",
       .details = "Needs stage 2 or 3. Gradients are written as they are reduced, and the update "
                  "reads them with the states. Not in DeepSpeed.",
       .option = "--offload-gradients",
       .cost = "The device does not hold the rank's slice of the gradients. The disk writes and "
               "reads the slice once a step, or with accumulation once a micro-batch."},
      &OffloadOptimizer::gradients);
  optimizer.add(
      "delayed_update_after",
      {.sentence = "Number of updates after which each update runs during the next step, which "
                   "then uses weights that are one update old; 0: never",
       .details =
           "ZeRO-Offload's delayed update, with 40 in the paper. Works with states on the device, "
           "host or disk. New parameters and gradients take a second copy. Not in DeepSpeed.",
       .option = "--delayed-update-after",
       .cost = "A second copy of parameters and gradients; weights are one update old.",
       .acts_alone = true},
      &OffloadOptimizer::delayed_update_after);
  const auto of_gpus = [](std::vector<Json> holds) {
    return About{.sentence = "Accepted, without effect",
                 .details = "It concerns DeepSpeed's transfers to a GPU and its start.",
                 .holds = std::move(holds)};
  };
  optimizer.accept<bool>({"pin_memory", "fast_init"}, of_gpus({true, false}));
  optimizer.accept<bool>({"super_offload"}, of_gpus({false}));
  optimizer.accept<double>({"cpuadam_cores_perc", "buffer_size", "max_in_cpu"}, of_gpus({}));

  Rows param(all, Part::engine, "zero_optimization.offload_param", &Settings::engine,
             &Config::offload_param);
  param.add(
      "device",
      {.sentence = "Stage 3: where parameters are kept between their uses: none (the device), cpu "
                   "(host memory) or nvme (files)",
       .details = "\"nvme\": every rank reads its own slices, and the ranks then gather; a single "
                  "rank does so too. \"cpu\": a gather copies the rank's slice to the device, "
                  "where the ranks gather by copying; nothing is read in place.",
       .option = "--offload-param",
       .cost = "The device does not hold the rank's slice of the parameters. Each gather reads it "
               "back, twice a step unless the model fits into `stage3_max_live_parameters`.",
       .off = {"none"}},
      &OffloadParam::device);
  param.add(
      "nvme_path",
      {.sentence = "Folder or folders for parameters on nvme, as in `offload_optimizer.nvme_path`",
       .details =
           "If optimizer states are on disk too, both are striped over the folders of both keys.",
       .option = "--nvme-path"},
      &OffloadParam::nvme_path);
  param.add("buffer_count",
            {.sentence = "Number of slices, of `unit_bytes` / ranks each, that are read ahead of "
                         "their all-gather",
             .least = 1},
            &OffloadParam::buffer_count);
  param.add(
      "max_in_cpu",
      {.sentence =
           "Elements of a rank's slices that stay in host memory, and are not offloaded to nvme",
       .details = "DeepSpeed: 1e9."},
      &OffloadParam::max_in_cpu);
  const char* buffers = "A buffer has the size of its slice, and memory is pinned only for GPUs.";
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
          {.sentence = "Transfers in flight at a time",
           .details = "DeepSpeed: 8.",
           .least = 1,
           .most = 4096},
          &Aio::queue_depth);
  aio.add("use_io_uring", {.sentence = "Use io_uring where it works; false: always use threads"},
          &Aio::use_io_uring);
  aio.add(
      "checksums",
      {.sentence = "Keep a checksum of every page that is written, and stop with an error if the "
                   "disk returns a page with another one",
       .details = "Not in DeepSpeed.",
       .cost =
           "8 bytes for each page of 4 KiB, and a pass over everything that is read and written."},
      &Aio::checksums);
  const auto of_deepspeed = [](std::vector<Json> holds) {
    return About{.sentence = "Accepted, without effect",
                 .details =
                     "It concerns DeepSpeed's own I/O engine. libzero's submits and completes all "
                     "pending transfers at once.",
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
  recompute.add(
      "every",
      {.sentence = "Recompute the activations of one of every so many blocks in backward; 0: none",
       .details = "1 recomputes every block, and 2 the first of every two. A recomputed block "
                  "keeps only its input; results are the same bit for bit. In C++ use "
                  "`Gpt2::recompute`, or `zero::recompute` around any function. Not in DeepSpeed.",
       .option = "--recompute",
       .argument = "EVERY",
       .zero_is_none = true,
       .cost = "A second forward pass of the recomputed blocks, up to a third of a step's "
               "computation. Saves all of their activations but the input."},
      &ActivationCheckpointing::every);
  recompute.add(
      "contiguous_memory_optimization",
      {.sentence =
           "Keep the inputs of recomputed blocks in one buffer, which every step uses again"},
      &ActivationCheckpointing::contiguous_memory_optimization);
  recompute.add(
      "nvme",
      {.sentence = "Keep the inputs of recomputed blocks in files, in a private folder of each "
                   "rank inside `nvme_path`",
       .details = "They are written during forward and read ahead in backward, with the settings "
                  "of `aio`; three are in memory at a time. Refused without `every` or "
                  "`layer_major_accumulation`, because no inputs are kept then. Not in DeepSpeed."},
      &ActivationCheckpointing::nvme);
  recompute.add("nvme_path", {.sentence = "Folder on a local disk for `nvme`"},
                &ActivationCheckpointing::nvme_path);
  const About of_gpus{
      .sentence = "Accepted, without effect",
      .details =
          "Without tensor parallelism there is nothing to partition, and on a CPU all activations "
          "are in host memory anyway. Use `every` to switch recomputation on.",
      .holds = {false}};
  recompute.accept<bool>(
      {"partition_activations", "cpu_checkpointing", "synchronize_checkpoint_boundary", "profile"},
      of_gpus);
  recompute.accept<int64_t>({"number_checkpoints"},
                            {.sentence = "Accepted, without effect",
                             .details = "`every` chooses the blocks that are recomputed."});

  Rows tiling(all, Part::model, "tiling", &Settings::model);
  tiling.add("max_elements",
             {.sentence = "Split linear layers whose weight has more elements than this into tiles "
                          "of at most this size, which stage 3 gathers one at a time; 0: none",
              .details = "Memory-centric tiling: each tile is a parameter of its own. Results are "
                         "the same within rounding. The files of `zero train` hold whole layers. "
                         "In C++ call `zero::tile_linears(*model, elements)` before you construct "
                         "the engine. DeepSpeed has only `zero.TiledLinear`.",
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
                          .details = "The product of micro-batch, accumulation and ranks must "
                                     "equal this. Any two of the three keys determine the third. "
                                     "Options of `zero train` replace the keys of the file."});
  all.back().set = [](Settings&, const Json&) {};  // the batch rule reads it: settings.cpp
  program.add("train_micro_batch_size_per_gpu",
              {.sentence = "Sequences or samples that a rank processes at a time",
               .details = "In `zero train` the default is 8.",
               .option = "--micro-batch",
               .common = true,
               .least = 1},
              &ProgramSettings::micro_batch_size);
  engine.add(
      "gradient_accumulation_steps",
      {.sentence =
           "Number of micro-batches of a rank whose gradients are added up before an update",
       .option = "--accumulate",
       .least = 1,
       .cost =
           "Gradients are kept between micro-batches, in fp32 unless data_types.grad_accum_dtype "
           "says otherwise. For each micro-batch stage 3 gathers, and stages 2 and 3 reduce."},
      &Config::gradient_accumulation_steps);
}

void add_engine(All& all) {
  Rows engine(all, Part::engine, "", &Settings::engine);
  engine.add("gradient_clipping",
             {.sentence = "Global norm to which gradients are clipped; 0: no clipping",
              .option = "--clip",
              .least = 0},
             &Config::gradient_clipping);
  engine.add(
      "gradient_clipping_value",
      {.sentence = "Largest magnitude of an element of the mean gradient, beyond which it is "
                   "clipped; 0: no clipping",
       .details =
           "Applied after clipping by norm. Works with `update_in_backward`. Not in DeepSpeed.",
       .option = "--clip-value",
       .least = 0},
      &Config::gradient_clipping_value);
  engine.add(
      "clip_by_previous_norm",
      {.sentence = "Inexact: clip a step by the factor that the norm of the step before gives",
       .details =
           "No update then waits for the norm of its own step, so `update_in_backward` works with "
           "clipping. The norm is that of the last step that updated with finite gradients. A "
           "checkpoint has it, so a resumed run goes on with the same bits. A step before which "
           "there is none, as the first one of a run, is not clipped. The norm that is reported is "
           "the step's own. Needs `gradient_clipping`. Not in DeepSpeed.",
       .option = "--clip-by-previous-norm",
       .cost = "A gradient that grows suddenly is clipped one step late."},
      &Config::clip_by_previous_norm);
  engine.add(
      "layer_major_accumulation",
      {.sentence = "Pass all micro-batches of a step through one layer before the next layer",
       .details = "Stage 3 then gathers each parameter twice a step (once in forward, once in "
                  "backward), and stages 2 and 3 reduce each gradient once a step, for any number "
                  "of micro-batches. Layers are recomputed in backward; `activation_checkpointing` "
                  "says where their inputs are kept. In C++ `zero::backward_layer_major` does this "
                  "for any model that shows its layers. Not in DeepSpeed.",
       .option = "--layer-major",
       .cost = "A second forward pass of each layer, and memory for the inputs of all layers for "
               "all micro-batches."},
      &Config::layer_major_accumulation);
  engine.add(
      "update_in_backward",
      {.sentence =
           "Update a unit as soon as its gradient is reduced, while the rest of backward runs",
       .details =
           "Gradients are not kept. States on disk are read and written while backward computes. "
           "Results are the same bit for bit. Needs stage 2 or 3, `gradient_clipping` 0 or "
           "`clip_by_previous_norm`, and one pass a step (one micro-batch, or "
           "`layer_major_accumulation`). A gradient that is infinite or NaN is then an error. Not "
           "in DeepSpeed.",
       .option = "--update-in-backward",
       .cost = "No exact clipping. Saves the gradients' memory."},
      &Config::update_in_backward);
  engine.add("update_in_forward",
             {.sentence = "Stage 3: update units during the next forward pass, before their first "
                          "use in it: those whose parameters are on disk, and between hosts those "
                          "in memory",
              .details = "In memory the first gather waits for its own unit's update alone; this "
                         "is so where ranks shard over several hosts on the CPU, without hpZ, "
                         "offloading and delayed updates, and for optimizers whose update takes "
                         "one sweep. It takes no more memory. Works with clipping. With "
                         "`update_in_backward` it completes the updates "
                         "that backward has not finished. Results are the same bit for bit. An "
                         "error of the disk may appear in the next step. Not in DeepSpeed.",
              .option = "--no-update-in-forward"},
             &Config::update_in_forward);
  engine.add(
      "one_sided_gather",
      {.sentence = "On one host, read parameters in place in the owners' memory: a gather waits "
                   "for the owners and copies nothing",
       .details =
           "False: every gather is an all-gather in which all ranks take part. Not in DeepSpeed."},
      &Config::one_sided_gather);
  engine.add("seed_by_rank",
             {.sentence = "Give each rank a random seed of its own when the engine is constructed, "
                          "so that dropout differs",
              .details = "False: the program seeds its ranks itself, as `zero train` does for each "
                         "step. Not in DeepSpeed."},
             &Config::seed_by_rank);
  engine.add(
      "memory_budget",
      {.sentence =
           "Bytes that a rank may hold in total: states, buffers and activations; 0: no limit",
       .details =
           "Written as 6442450944 or \"6GB\" (GB is 2^30 bytes). States that exceed it are "
           "an error before they are allocated, which says what each higher stage would "
           "take. If the first step exceeds it, the run stops after that step. Gathered "
           "units may use what is left, up to `stage3_max_live_parameters` (on one host "
           "units are read in place and need no memory). For a model on a GPU it counts what "
           "the rank holds there. If `offload_optimizer.nvme_path` names a folder and "
           "nothing is offloaded, as much as necessary goes to disk, in this order: a part "
           "of the optimizer's states, all of them, the gradients, the parameters. `zero "
           "train` says what and why. Not in DeepSpeed.",
       .option = "--memory-budget",
       .bytes = true},
      &Config::memory_budget);
  engine.add(
      "device_memory",
      {.sentence = "Bytes of memory that stand for a rank's device, while the rest counts as its "
                   "host's memory; 0: no limit",
       .details =
           "These count against it: states that are not on host or disk, gathered units, gradient "
           "buckets, staging buffers and activations. (Activations are all tensors of LibTorch in "
           "the process, if it uses libzero's allocator as `zero train` does.) If something does "
           "not fit, an `OutOfMemory` lists what is held and names the next cheaper configuration. "
           "Units are then gathered by copying, also on one host. They use what the first step "
           "leaves, less a sixteenth of the device. Not in DeepSpeed.",
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
      {.sentence = "Keep only the lower 16 bits of the fp32 master weights, because the bf16 "
                   "parameters are the upper 16",
       .details = "This saves 2 bytes a parameter in memory, in the traffic of the update, and in "
                  "writes to a disk. The update computes in fp32 as before, but a tie rounds away "
                  "from zero instead of to even. So results differ from those with whole master "
                  "weights, but are the same at every stage and number of ranks. Parameters and "
                  "their states must be in the same place, unless the states are on disk. Writing "
                  "to a parameter in place sets only its upper half. Checkpoints hold whole master "
                  "weights and load with or without this key. Not in DeepSpeed.",
       .option = "--split-master-weights",
       .cost = "Saves 2 bytes a parameter; ties round away from zero."},
      &Config::split_master_weights);
  bf16.add("check_grad_overflow",
           {.sentence = "Skip a step with a gradient that is infinite or NaN",
            .details = "All ranks skip it together. False: the step updates the weights anyway. In "
                       "fp32 and fp16 such a step is always skipped."},
           &Config::check_grad_overflow);
  bf16.accept<bool>(
      {"immediate_grad_update"},
      {.sentence = "Accepted, without effect",
       .details = "Gradients always go directly to the array that the update reads."});
  bf16.add("bf16_master_weights_and_grads",
           {.sentence = "Keep no fp32 master weights: update the bf16 parameters themselves, and "
                        "add up micro-batches in bf16",
            .details = "This saves 4 bytes a parameter. Weights are rounded stochastically, by a "
                       "hash of element and step, so results are the same at every stage and "
                       "number of ranks. DeepSpeed rounds to nearest."},
           &Config::bf16_master_weights_and_grads);
  bf16.add("bf16_optimizer_states",
           {.sentence = "With `bf16_master_weights_and_grads`: keep the optimizer's states in bf16 "
                        "too, rounded in the same way",
            .details = "This halves their bytes."},
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
  fp16.accept<bool>(
      {"auto_cast"},
      {.sentence = "Accepted, without effect",
       .details = "DeepSpeed casts the inputs that it passes to the module. Here the program calls "
                  "its module itself, with inputs of the module's dtype."});
  Rows scaling(all, Part::engine, "fp16", &Settings::engine, &Config::loss_scaling);
  scaling.add("loss_scale",
              {.sentence = "Factor by which the loss is scaled for backward; 0: a dynamic scale",
               .details = "docs/precision.md explains how the dynamic scale changes.",
               .least = 0},
              &LossScaling::fixed);
  scaling.add("initial_scale_power",
              {.sentence = "The first dynamic scale is 2 to this power", .most = 127},
              &LossScaling::initial_power);
  scaling.add(
      "loss_scale_window",
      {.sentence = "Number of steps without overflow after which the dynamic scale doubles"},
      &LossScaling::window);
  scaling.add("hysteresis",
              {.sentence = "Number of the overflow that first halves the dynamic scale; every "
                           "later overflow halves it too",
               .details = "Counting starts again when the scale doubles."},
              &LossScaling::hysteresis);
  scaling.add("consecutive_hysteresis",
              {.sentence = "Start the count of `hysteresis` again after any step without overflow"},
              &LossScaling::consecutive_hysteresis);
  scaling.add(
      "min_loss_scale",
      {.sentence = "Smallest dynamic scale; an overflow at this scale is an error", .least = 0},
      &LossScaling::minimum);
  fp16.accept<bool>(
      {"fp16_master_weights_and_grads"},
      {.sentence = "Must be the default",
       .only = false,
       .because = "an fp16 weight loses updates below 6e-8 whatever its size. Leave it out, or use "
                  "bf16.bf16_master_weights_and_grads"});
}

void add_autocast(All& all) {
  Rows rows(all, Part::engine, "torch_autocast", &Settings::engine, &Config::autocast);
  rows.add(
      "enabled",
      {.sentence = "Compute matrix products in bf16 or fp16, with parameters in fp32",
       .details = "Parameters, gradients and optimizer states do not change. `zero train` does "
                  "this by itself; a C++ program computes its loss in a `zero::Autocast` scope.",
       .option = "--autocast",
       .argument = "bf16|fp16",
       .by_option = true},
      &AutocastSettings::enabled);
  rows.add(
      "dtype",
      {.sentence =
           "Dtype of the products; with fp16 the loss is scaled by the keys of the section fp16",
       .option = "--autocast",
       .spellings = kDtypes},
      &AutocastSettings::dtype);
  rows.accept<std::vector<Json>>(
      {"lower_precision_safe_modules"},
      {.sentence = "Accepted, without effect",
       .details = "DeepSpeed sends gradients of these modules in 16 bits, and at stage 3 also "
                  "their parameters. Here `communication_data_type` applies to all gradients."});
}

void add_data_types(All& all) {
  Rows types(all, Part::engine, "data_types", &Settings::engine);
  types.add("grad_accum_dtype",
            {.sentence = "Dtype in which the gradients of micro-batches are added up; \"model\" is "
                         "the parameters' dtype, which may also be named (\"bf16\", \"fp16\")",
             .spellings = kDtypes},
            &Config::accumulation_dtype);
  types.add(
      "optimizer_state_dtype",
      {.sentence = "Format of the optimizer's states (not of master weights): fp32, bf16, or 8 "
                   "bits an element",
       .details =
           "It applies to AdamW's two moments, to the momentum of Lion and SGD, and to "
           "Adagrad's sum. Updates compute in fp32 and round stochastically, so results are "
           "the same at every stage, number of ranks and tier. \"int8\" and \"fp8\" mean "
           "\"8bit\". Full checkpoints (`save_full`) hold fp32 and load in any format. "
           "Refused with LAMB, Muon, Apollo, Adafactor and ScheduleFreeAdamW. Not in DeepSpeed, "
           "where `bf16.bf16_optimizer_states` chooses bf16 for bf16 parameters.",
       .option = "--optimizer-states",
       .cost = "An element of a state takes 4, 2, or 1 1/16 bytes. docs/precision.md says how near "
               "8 bits come to fp32.",
       .spellings = kStateFormats},
      &Config::optimizer_states);
  types.add("buffer_dtype",
            {.sentence = "Dtype of buffers in floating point",
             .details = "Cast when training begins, but for those of modules that compute in fp32: "
                        "running statistics, and `fp32_modules`. Without it buffers keep theirs.",
             .spellings = kDtypes},
            &Config::buffer_dtype);
  types.accept<std::string>(
      {"param_dtype"}, {.sentence = "Accepted, without effect",
                        .details = "The sections bf16 and fp16 choose the dtype of parameters."});
  Rows engine(all, Part::engine, "", &Settings::engine);
  engine.add("fp32_modules",
             {.sentence = "Modules whose parameters stay in fp32 with bf16 and fp16",
              .details = "Patterns of names with `*` and `?`, separated by commas: \"lm_head, "
                         "*.norm\". Modules below one are taken in. In Python their inputs "
                         "are cast to fp32 and their results back; in C++ the program does it. "
                         "Not in DeepSpeed."},
             &Config::fp32_modules);
}

void add_reduction(All& all) {
  Rows engine(all, Part::engine, "", &Settings::engine);
  engine.add("communication_data_type",
             {.sentence = "Dtype in which gradients are sent and added over ranks; the default is "
                          "the dtype in which a pass collects them",
              .details = "That is the parameters' dtype at stages 2 and 3, and the dtype of the "
                         "sums of micro-batches at 0 and 1. Not together with "
                         "`zero_quantized_gradients`. Between hosts of several ranks a host sends "
                         "the sum of its ranks in fp32. "
                         "With any value, sums add up in fp32 and are rounded once. For 16-bit "
                         "gradients \"fp32\" sends twice the bytes and gives the same results. For "
                         "fp32 gradients \"bf16\" and \"fp16\" halve the bytes. A single rank "
                         "sends nothing and rounds nothing. bf16 and fp16 cannot be mixed.",
              .spellings = kDtypes},
             &Config::communication_dtype);
  engine.add(
      "prescale_gradients",
      {.sentence = "Each rank divides its gradients by the number of ranks before they are added",
       .details = "Sums in fp16 always do this, because they could exceed its range, unless "
                  "`gradient_predivide_factor` is given."},
      &Config::prescale_gradients);
  engine.add("gradient_predivide_factor",
             {.sentence = "Each rank divides its gradients by this before they are added; the sum "
                          "is divided by the number of ranks over this",
              .details = "It has no effect with `prescale_gradients`.",
              .least = 0},
             &Config::gradient_predivide_factor);
}

void add_measuring(All& all) {
  Rows program(all, Part::program, "", &Settings::program);
  program.add(
      "wall_clock_breakdown",
      {.sentence = "Report how long forward, backward and step took in each step, and how much of "
                   "it was waiting",
       .details = "The numbers of rank 0 go to the console and to log.jsonl: docs/profiling.md.",
       .option = "--wall-clock-breakdown"},
      &ProgramSettings::wall_clock_breakdown);
}

void add_program(All& all) {
  Rows train(all, Part::program, "train", &Settings::program);
  using Program = ProgramSettings;
  train.add(
      "model",
      {.sentence = "Architecture of the model: gpt2, gpt2-medium, gpt2-large, gpt2-xl, "
                   "gpt2-nano, or a Hugging Face config.json (GPT-2, Llama, Qwen, Mistral, Gemma) "
                   "or its folder; the initial weights are random",
       .option = "--model",
       .common = true,
       .not_empty = true},
      &Program::model);
  train.add("from",
            {.sentence = "Folder of Hugging Face's (config.json, model.safetensors or its shards) "
                         "whose model and weights training begins with, in place of --model",
             .option = "--from",
             .common = true,
             .argument = "DIR"},
            &Program::from);
  train.add("data",
            {.sentence = "Text or token file, or a folder made by `zero data prepare`",
             .details = "An array of several is a mixture, as is a repeated --data: they have the "
                        "same tokens. docs/zero-data.md says in which order their samples come.",
             .option = "--data",
             .common = true},
            &Program::data);
  train.add("data_weights",
            {.sentence = "How often each of several --data is sampled, as 0.7,0.3; if left out, "
                         "each of their sequences comes once in an epoch",
             .details = "A weight for each, above 0; they need not add up to 1.",
             .option = "--data-weights",
             .argument = "LIST"},
            &Program::data_weights);
  train.add(
      "val_data",
      {.sentence = "File or folder to validate on; if left out, the validation split of --data",
       .option = "--val-data"},
      &Program::val_data);
  train.add("out",
            {.sentence = "Folder for log.jsonl, model.safetensors and config.json",
             .option = "--out",
             .common = true,
             .not_empty = true},
            &Program::out);
  train.add(
      "vocab_size",
      {.sentence =
           "Size of the model's vocabulary; 0: the model's own, and for gpt2-nano that of the data",
       .option = "--vocab-size",
       .zero_is_none = true},
      &Program::vocab_size);
  train.add("seq",
            {.sentence = "Tokens in a sequence", .option = "--seq", .common = true, .least = 1},
            &Program::seq);
  train.add("steps",
            {.sentence = "Number of steps; each updates the weights once",
             .option = "--steps",
             .common = true,
             .least = 1},
            &Program::steps);
  train.add("min_lr",
            {.sentence = "Learning rate at the last step; if left out, a tenth of --lr",
             .option = "--min-lr",
             .least = 0},
            &Program::min_lr);
  train.add("warmup",
            {.sentence = "Steps of linear warm-up; if left out, a tenth of --steps, at most 200",
             .option = "--warmup"},
            &Program::warmup);
  train.add("schedule",
            {.sentence = "How the learning rate decays after the warm-up",
             .details = "wsd keeps the rate constant and lowers it linearly in the last steps. The "
                        "section `scheduler` has more schedules, and replaces this key.",
             .option = "--schedule"},
            &Program::schedule);
  train.add("decay_steps",
            {.sentence = "Steps of wsd's decay; if left out, a tenth of --steps",
             .option = "--decay-steps",
             .least = 1},
            &Program::decay_steps);
  train.add("dropout",
            {.sentence = "Dropout probability; if left out, the model's own",
             .option = "--dropout",
             .least = 0,
             .below = 1},
            &Program::dropout);
  train.add("seed",
            {.sentence = "Seed for the weights, the order of the data, and dropout",
             .option = "--seed",
             .least = -9223372036854775808.0},
            &Program::seed);
  train.add(
      "threads",
      {.sentence = "Threads of each rank; 0: OMP_NUM_THREADS, or the cores divided by the ranks",
       .option = "--threads",
       .most = 65536,
       .zero_is_none = true},
      &Program::threads);
  train.add("device",
            {.sentence = "Device on which the model is trained",
             .details = "cuda: each rank takes the device with its number on the host, and NCCL "
                        "carries the tensors. any: the same if there is such a device and "
                        "libzero's plugin for it; otherwise the CPU, and a line says why.",
             .option = "--device",
             .common = true},
            &Program::device);
  train.add(
      "through_host",
      {.sentence = "On a device: the hosts' memory carries the tensors, in place of NCCL",
       .details = "Ranks copy their tensors to the host and add there as those of the CPU do, "
                  "with the same bits. They may share a device. Between hosts weights and "
                  "gradients can then be quantised or packed.",
       .option = "--through-host",
       .cost = "The host waits for the device and the other ranks in each exchange, and the "
               "bytes pass the bus twice."},
      &Program::through_host);
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
            {.sentence = "Check the output of every operator for the first NaN or infinity",
             .details = "Without it, only a step whose loss or gradient is infinite or NaN is run "
                        "again with this check.",
             .option = "--detect-anomaly",
             .cost = "Time for a pass over each output."},
            &Program::detect_anomaly);
  train.add("deterministic",
            {.sentence = "Use operators that give the same bits each time, on every device",
             .details = "On a CPU they do so anyway. On a GPU the stages, and a run and its "
                        "repetition, have equal bits only with this. An operator of which LibTorch "
                        "has no such kernel is an error that names it.",
             .option = "--deterministic",
             .cost = "On a GPU time, since some kernels are slower."},
            &Program::deterministic);
  train.add("check_replicas",
            {.sentence = "Steps between checks that ranks which hold the same parameters have "
                         "equal values; 0: no checks",
             .details = "The ranks compare checksums of units before the update. A difference is "
                        "an error that names the parameters and ranks. At stage 3 several ranks "
                        "hold the same parameters only with mics_shard_size.",
             .option = "--check-replicas",
             .argument = "STEPS",
             .cost = "A pass over the parameters at each check."},
            &Program::check_replicas);
  train.add("group_norms",
            {.sentence = "Write the gradient norm of each parameter group to log.jsonl",
             .details = "The order is: parameters with weight decay, then those without (biases "
                        "and norms), then those that Muon or Apollo leaves to AdamW.",
             .option = "--group-norms",
             .cost = "A pass over the gradients."},
            &Program::group_norms);
  train.add("skip_spikes",
            {.sentence = "Skip steps whose loss is far above that of the steps before",
             .details = "\"Far above\" means more than 6 standard deviations above the mean of the "
                        "last 32 steps, and more than 1.1 times that mean. Such a step is always "
                        "reported, with what else changed.",
             .option = "--skip-spikes"},
            &Program::skip_spikes);
  train.add(
      "rewind_spikes",
      {.sentence = "At such a loss, go back to the newest checkpoint that is at least this many "
                   "steps old, and continue with the data that follow; 0: never",
       .details = "Needs save_every, and keeps as many checkpoints as necessary. If no checkpoint "
                  "is old enough, the step is skipped. The run ends with an error after it has "
                  "gone back three times without passing the step of the first spike. log.jsonl "
                  "has only the steps that led to the weights, and an event for each return.",
       .option = "--rewind-spikes",
       .argument = "STEPS",
       .zero_is_none = true},
      &Program::rewind_spikes);
  train.add("profile",
            {.sentence = "Write a timeline of one step on all ranks to this file, for Perfetto",
             .details = "The file is in the trace event format, which ui.perfetto.dev and Chrome "
                        "open: docs/profiling.md.",
             .option = "--profile",
             .argument = "FILE",
             .cost = "Memory for the step's spans (16 MiB), and some time in that step."},
            &Program::profile);
  train.add("profile_step",
            {.sentence =
                 "Step that the profile shows, counted from the start or the resumption of the run",
             .option = "--profile-step",
             .least = 1},
            &Program::profile_step);
  train.add("save_every",
            {.sentence = "Steps between checkpoints for --resume; 0: none",
             .option = "--save-every",
             .common = true,
             .zero_is_none = true},
            &Program::save_every);
  train.add(
      "save_in_background",
      {.sentence = "Write checkpoints beside the steps that follow",
       .details = "Training waits only while parameters are copied, and where a step is about "
                  "to change states that are not in the file yet and `save_staging` is "
                  "used up. A checkpoint has the states of its step, bit for bit. The last "
                  "one of a run, and those of runs on a GPU or with `memory_budget`, are "
                  "written before training goes on.",
       .option = "--no-save-in-background",
       .cost = "On the host: from the first save on, a copy of this rank's share of the "
               "parameters, and `save_staging` bytes until a checkpoint is complete."},
      &Program::save_in_background);
  train.add(
      "save_staging",
      {.sentence = "Bytes for copies of states that a step changes before the checkpoint that "
                   "is being written has them",
       .option = "--save-staging",
       .bytes = true},
      &Program::save_staging);
  train.add(
      "memory_copies",
      {.sentence =
           "Steps between copies of all states in the memory of the hosts, from which `zero "
           "launch --max-restarts` goes on when ranks have died; 0: none",
       .details =
           "Each rank's states are kept on its host and on the next one (docs/zero-launch.md). "
           "Training waits as for `save_in_background`. A copy that finds no room, or falls on a "
           "save under way, is left out or put off, and the run goes on.",
       .option = "--memory-copies",
       .zero_is_none = true,
       .cost = "A host's memory holds the states of its ranks, and those of the host before it: "
               "one copy of each, and two until a new one is complete."},
      &Program::memory_copies);
  train.add("stop_after",
            {.sentence = "Stop after the step in which training has lasted this long, as \"3h50m\"",
             .details = "The run then ends as after SIGTERM: with a checkpoint, where `save_every` "
                        "is set, and with the weights. The exit status is 0, and --resume "
                        "continues.",
             .option = "--stop-after",
             .argument = "TIME"},
            &Program::stop_after);
  train.add("keep_last",
            {.sentence = "Newest checkpoints that are kept", .option = "--keep-last", .least = 1},
            &Program::keep_last);
  train.add("keep_every",
            {.sentence = "Keep also the checkpoints of steps that are multiples of it; 0: none",
             .option = "--keep-every",
             .zero_is_none = true},
            &Program::keep_every);
  train.add("keep_best",
            {.sentence = "Keep also the checkpoint with the lowest validation loss",
             .details = "Needs `eval_every`, and `save_every` as a multiple of it.",
             .option = "--keep-best"},
            &Program::keep_best);
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
            {.sentence = "Sample only from this many of the likeliest tokens; 0: from all",
             .option = "--top-k",
             .zero_is_none = true},
            &Program::top_k);
  train.add("decay_all",
            {.sentence = "Apply weight decay to biases and norms too, instead of to matrices only",
             .option = "--decay-all"},
            &Program::decay_all);
  train.add("overwrite", {.sentence = "Replace an earlier run in --out", .option = "--overwrite"},
            &Program::overwrite);
  train.add("resume",
            {.sentence = "Continue the run in --out from a checkpoint: the newest that is sound, "
                         "that of a step, or a folder; auto: the newest, and begin where there is "
                         "none",
             .option = "--resume",
             .common = true,
             .argument = "auto|STEP|PATH",
             .alone = true,
             .by_option = true},
            &Program::resume);
  train.add(
      "resume_from",
      {.sentence = "Step, or folder, of the checkpoint that `resume` goes on from; empty: the "
                   "newest that is sound; \"auto\": the same, and begin where there is none",
       .details = "A folder elsewhere begins a run of its own in `out`.",
       .option = "--resume"},
      &Program::resume_from);
}

void add_fine_tuning(All& all) {
  Rows train(all, Part::program, "train", &Settings::program);
  train.add("task",
            {.sentence = "What is learnt: lm (each next token), sft (the tokens that the data's "
                         "marks name, each with the same weight), mlm (tokens that are masked), "
                         "classify (the label of each text), or auto: as the model's config.json "
                         "says, and sft if there are marks",
             .details = "Marks are files NAME.marks.bin beside NAME.bin: docs/fine-tuning.md.",
             .option = "--task"},
            &ProgramSettings::task);
  train.add("mask_token",
            {.sentence = "The number of the token that hides others in --task mlm; none: the "
                         "tokenizer's mask_token",
             .option = "--mask-token"},
            &ProgramSettings::mask_token);
  train.add("document_attention",
            {.sentence = "Attend inside of each document alone, with positions from 0, where "
                         "sequences pack several; for models that predict the next token",
             .details = "The data's marks say where documents begin: docs/fine-tuning.md.",
             .option = "--document-attention"},
            &ProgramSettings::document_attention);
  train.add("freeze",
            {.sentence = "Parameters that are not trained: names of parameters or modules, or "
                         "their last parts, separated by commas; or a regular expression",
             .details = "They have no gradients and no optimizer states. Not with LoRA, which "
                        "freezes all weights of the model.",
             .option = "--freeze",
             .argument = "NAMES"},
            &ProgramSettings::freeze);
  Rows lora(all, Part::program, "train.lora", &Settings::program, &ProgramSettings::lora);
  lora.add("rank",
           {.sentence = "Freeze the model's weights, and train low-rank adapters of this rank "
                        "beside its linear layers (LoRA, arXiv 2106.09685); 0: none",
            .details = "The run's folder gets the adapter in peft's form instead of the weights.",
            .option = "--lora-rank",
            .zero_is_none = true,
            .cost = "The frozen weights take 2 bytes a parameter in bf16, adapters 16."},
           &LoraOptions::rank);
  lora.add(
      "alpha",
      {.sentence = "The adapter's product counts alpha / rank times", .option = "--lora-alpha"},
      &LoraOptions::alpha);
  lora.add("dropout",
           {.sentence = "Dropout of the adapter's input in training",
            .option = "--lora-dropout",
            .least = 0,
            .below = 1},
           &LoraOptions::dropout);
  lora.add("rslora",
           {.sentence = "The product counts alpha / sqrt(rank) times (arXiv 2312.03732)",
            .option = "--lora-rslora"},
           &LoraOptions::rslora);
  lora.add("dora",
           {.sentence = "Train the lengths of the rows of adapted weights by themselves (DoRA, "
                        "arXiv 2402.09353)",
            .option = "--lora-dora"},
           &LoraOptions::dora);
  lora.add("targets",
           {.sentence = "Linear layers that get adapters: names, separated by commas, a regular "
                        "expression of whole paths, or all-linear; empty: q_proj and v_proj, or "
                        "c_attn",
            .option = "--lora-targets",
            .argument = "NAMES"},
           &LoraOptions::targets);
  lora.add("modules_to_save",
           {.sentence = "Modules that are trained whole and saved with the adapter, separated by "
                        "commas",
            .option = "--lora-modules-to-save",
            .argument = "NAMES"},
           &LoraOptions::modules_to_save);
  lora.add(
      "adapter",
      {.sentence = "Folder of a peft adapter that training begins with, in place of --lora-rank "
                   "and the settings beside it",
       .option = "--adapter",
       .argument = "DIR"},
      &LoraOptions::adapter);
  lora.add(
      "quantize_base",
      {.sentence = "Keep the frozen weights of linear layers in fewer bits: nf4, 4 with double "
                   "quantisation (QLoRA, arXiv 2305.14314), int8, 8 by blocks, or none",
       .details = "They are quantised as they are read, and each layer's are read back for "
                  "each product: docs/fine-tuning.md.",
       .option = "--lora-quantize-base",
       .cost = "nf4 takes 4.127 bits a frozen weight, int8 8.25."},
      &LoraOptions::quantize_base);
  lora.add(
      "merge",
      {.sentence =
           "Also write the whole model, with the adapter merged into its weights, to the folder "
           "`merged` of the run",
       .option = "--lora-merge"},
      &LoraOptions::merge);
}

/// Adds the section, whose `params` have rows of their own for each optimizer.
void add_optimizer(All& all) {
  all.push_back({Spec{"optimizer",
                      {.sentence = "The optimizer: `type` (such as \"AdamW\", \"Adam\" or \"SGD\": "
                                   "docs/optimizers.md) and `params`",
                       .details = "It is used if the program names no optimizer. Names are "
                                  "DeepSpeed's and PyTorch's, in upper or lower case. \"Adam\" "
                                  "means AdamW, as in DeepSpeed, unless `adam_w_mode` is false.",
                       .option = "--optimizer",
                       .common = true,
                       .argument = "TYPE[:KEY=VALUE,...]"},
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
    add_fine_tuning(all);
    add_measuring(all);
    add_monitors(all);
    add_deepspeed(all);
    return all;
  }();
  return rows;
}

}  // namespace zero::fields
