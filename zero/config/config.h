// The engine's configuration: a value, or part of a JSON file with DeepSpeed's keys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/comm/quantise_kernels.h"
#include "zero/config/findings.h"
#include "zero/optim/loss_scale.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/state_format.h"

namespace zero {

/// The dtype in which gradients of several micro-batches are added.
enum class AccumulationDtype : uint8_t {
  fp32,   ///< exact sums; 4 bytes a parameter (or 4/N) while gradients accumulate
  model,  ///< the parameter's dtype: less memory, a rounding at each addition
};

/// A dtype by the name that a configuration gives it.
enum class DtypeName : uint8_t { fp32, fp16, bf16 };
constexpr c10::ScalarType dtype_of(DtypeName name) {
  return name == DtypeName::fp16   ? c10::ScalarType::Half
         : name == DtypeName::bf16 ? c10::ScalarType::BFloat16
                                   : c10::ScalarType::Float;
}

/// The place where states live. none: on the device; cpu: in host memory, from which they are
/// copied to the device (Note [Tiers] in store/tier.h); nvme: in files on disk.
enum class OffloadDevice : uint8_t { none, cpu, nvme };

/// The place of parameters between their uses: DeepSpeed's `offload_param` section. Stage 3.
struct OffloadParam {
  OffloadDevice device = OffloadDevice::none;
  /// A folder on a local disk; every rank makes a private one in it. Several, with commas between,
  /// are striped by the measured speed of their disks.
  std::string nvme_path{};
  /// The number of slices that are read from disk ahead of their all-gather.
  int64_t buffer_count = 5;
  /// The number of elements of a rank's slices that stay in host memory nevertheless.
  int64_t max_in_cpu = 0;
  bool operator==(const OffloadParam&) const = default;
};

/// The place of master weights and optimizer states: DeepSpeed's `offload_optimizer` section.
struct OffloadOptimizer {
  OffloadDevice device = OffloadDevice::none;
  /// A folder, as in OffloadParam. If both sections are on disk, a rank's states are striped over
  /// the folders of both.
  std::string nvme_path{};
  /// The blocks of states in memory at a time (4 MiB of each state array).
  int64_t buffer_count = 4;
  bool pipeline_read = true;   ///< read the next blocks while one is updated
  bool pipeline_write = true;  ///< write a block back while the next one is updated
  /// The part of master weights and moments that goes there; the rest stays on the device.
  double ratio = 1;
  /// nvme, stages 2 and 3: reduced gradients live there too, written as they are reduced.
  bool gradients = false;
  /// After this many updates each one runs beside the next step, which then uses weights that are
  /// one update old (ZeRO-Offload's delayed parameter update; the paper: 40). 0: never.
  int64_t delayed_update_after = 0;
  bool operator==(const OffloadOptimizer&) const = default;
  bool on_disk_with_gradients() const { return device == OffloadDevice::nvme && gradients; }
};

/// How files are read and written: DeepSpeed's `aio` section.
struct Aio {
  int64_t block_size = 1 << 20;  ///< bytes of one transfer
  int64_t queue_depth = 32;      ///< transfers under way at a time
  bool use_io_uring = true;      ///< false: threads, even if io_uring works
  bool checksums = true;  ///< a page that the disk returns otherwise than written is an error
  bool operator==(const Aio&) const = default;
};

/// The rounding errors of a quantised gradient are added to the next one: LoCo (2407.04480),
/// DeepSpeed's `zeropp_loco_param` section.
struct ErrorFeedback {
  /// The array that is added is e = beta e + (1 - beta) (the new errors), which begins as 0.
  double beta = 0.8;
  int64_t reset_every = 1024;  ///< updates after which e is 0 again
  bool operator==(const ErrorFeedback&) const = default;
};

/// Numbers that cross between hosts in fewer bits: ZeRO++'s qwZ and qgZ (2306.10209),
/// DeepSpeed's `zero_quantized_...` keys. Stage 3. Inside a host nothing is quantised. See Note
/// [Quantised messages] in comm/quantise_kernels.h.
struct QuantisedLinks {
  bool weights = false;         ///< weights that are trained
  bool frozen_weights = false;  ///< weights that are not
  bool gradients = false;       ///< a host's sums, once
  comm::WireFormat weights_format = comm::WireFormat::int8;
  comm::WireFormat gradients_format = comm::WireFormat::int4;
  int64_t block = 128;  ///< elements that share a scale: 64, 128, 192 or 256
  std::optional<ErrorFeedback> feedback{};
  bool any() const { return weights || frozen_weights || gradients; }
  bool operator==(const QuantisedLinks&) const = default;
};

/// The speeds of a machine, by which stage 3 chooses how far ahead of their use it gathers units:
/// Note [Prefetch distance] in paging/simulation.h. All except `compute` are in bytes a second. 0:
/// the work takes no time.
struct PrefetchSpeeds {
  double compute = 0;  ///< FLOPs of a rank; 0: no distance is chosen
  double link = 0;     ///< bytes that a rank, or between hosts a host, sends
  double pcie = 0;     ///< between device and host, each way
  double disk = 0;
  bool operator==(const PrefetchSpeeds&) const = default;
};

/// The dtypes in which autocast can compute.
enum class AutocastDtype : uint8_t { bf16, fp16 };

/// torch.autocast: DeepSpeed's section torch_autocast.
struct AutocastSettings {
  bool enabled = false;
  AutocastDtype dtype = AutocastDtype::bf16;
  bool operator==(const AutocastSettings&) const = default;
};

/// The settings of the engine. zero/config/settings.h has those of a model and of `zero train`.
struct Config {
  /// ZeRO stage: 0 (plain data parallelism), 1 (optimizer states sharded), 2 (and gradients), 3
  /// (and parameters).
  int stage = 0;
  /// Micro-batches whose gradients are added before an update (k).
  int64_t gradient_accumulation_steps = 1;
  /// Global L2 norm to which gradients are clipped; 0 switches clipping off.
  double gradient_clipping = 1.0;
  /// Each element of the mean gradient is cut off at this magnitude, after clipping by norm; 0:
  /// none is.
  double gradient_clipping_value = 0;
  /// Inexact: a step is clipped by the factor that the norm of the step before gives (that of the
  /// last step that updated with finite gradients; a checkpoint has it), so that no update waits
  /// for the norm of its own step. A step before which there is no such norm, as the first one, is
  /// not clipped. Needs gradient_clipping, and allows update_in_backward beside it.
  bool clip_by_previous_norm = false;
  /// Parameters and gradients in bf16 (buffers keep their dtype), with fp32 master weights in the
  /// optimizer states.
  bool bf16 = false;
  /// Only the lower halves of master weights are stored, beside bf16 parameters, which are the
  /// upper halves: Note [Split master weights] in zero/optim/halves.h. Parameters and optimizer
  /// states then need the same place, or states on disk.
  bool split_master_weights = false;
  /// A step in bf16 with a gradient that is infinite or NaN is left out, as a step in fp32 or fp16
  /// always is. False: it updates the weights nevertheless.
  bool check_grad_overflow = true;
  /// bf16 parameters are their own master weights, rounded stochastically (Note [Stochastic
  /// rounding] in zero/optim/narrow.h), and gradients of several micro-batches add up in bf16.
  bool bf16_master_weights_and_grads = false;
  /// The optimizer's states of bf16 parameters are in bf16 too. Needs
  /// bf16_master_weights_and_grads.
  bool bf16_optimizer_states = false;
  /// The format of the optimizer's states besides master weights, whatever the parameters' dtype:
  /// fp32, or bf16 or 8 bits an element (Note [States in 8 bits] in zero/optim/state_format.h),
  /// rounded stochastically. It works with optimizers that update each element by itself.
  optim::StateFormat optimizer_states = optim::StateFormat::fp32;
  /// Parameters and gradients in fp16, with fp32 master weights, and with the loss scaled as
  /// `loss_scaling` says.
  bool fp16 = false;
  LossScaling loss_scaling{};
  /// The program computes the loss in a zero::Autocast scope of autocast_dtype(); parameters and
  /// their gradients keep their dtype, mostly fp32. In fp16 the loss is scaled as `loss_scaling`
  /// says.
  AutocastSettings autocast{};
  AccumulationDtype accumulation_dtype = AccumulationDtype::fp32;
  /// The dtype in which gradients are sent and added over ranks. None: the dtype in which they are
  /// collected. That is the parameters' dtype at stages 2 and 3, and the dtype of their sums at 0
  /// and 1 and with layer_major_accumulation. Sums are always added up in fp32 and rounded once.
  std::optional<DtypeName> communication_dtype{};
  /// Buffers in floating point get this dtype when the engine takes the model over, except those of
  /// modules that compute in fp32 (running statistics, `fp32_modules`). Without it each keeps its
  /// own.
  std::optional<DtypeName> buffer_dtype{};
  /// The modules whose parameters stay in fp32 with bf16 or fp16, as patterns of their names
  /// ("lm_head, *.norm*"), which take in all modules below them.
  std::string fp32_modules{};
  /// Each rank divides its gradients by the number of ranks before they are added. Otherwise the
  /// sum is divided.
  bool prescale_gradients = false;
  /// Without prescale_gradients each rank divides its gradients by this before, and the sum is
  /// divided by the rest.
  double gradient_predivide_factor = 1;
  /// All micro-batches of a step pass one layer before the next (train/layer_major.h): stage 3
  /// gathers, and stages 2 and 3 reduce, once a step and not once a micro-batch. The model must
  /// show its layers; the engine then takes gradients by Engine::accumulate.
  bool layer_major_accumulation = false;
  /// A unit is updated as soon as its gradient is reduced, beside the rest of backward, and
  /// gradients are not stored. Results are the same as without it. It needs stage 2 or 3, no
  /// clipping (or clip_by_previous_norm), and one pass a step (one micro-batch, or
  /// layer_major_accumulation). A gradient that is not finite is an error then, since other weights
  /// have been updated. Learning rates and the largest norm are those of the beginning of backward.
  bool update_in_backward = false;
  /// Stage 3: a unit whose parameters are on disk may be updated beside the next forward pass, up
  /// to its first use there. With update_in_backward this concerns the updates that backward has
  /// not finished. Results are the same as without it; an error of the update may then come from a
  /// later call.
  bool update_in_forward = true;
  /// The bytes of a unit (Note [Units]), which is gathered and reduced at once.
  int64_t unit_bytes = 16 << 20;
  /// Stage 3: parameters (elements) that may be gathered at once. 0 releases each unit right after
  /// the operator that used it.
  int64_t max_live_parameters = 1'000'000'000;
  /// Stage 3: parameters (elements) that may be gathered ahead of their use, within
  /// `max_live_parameters`. Units that the ranks of one host share need no gathering ahead.
  int64_t prefetch_bucket_size = 50'000'000;
  /// If `compute` is given, the engine chooses a distance after the first update: the least, within
  /// `prefetch_bucket_size`, that makes the step as short as these speeds allow. On several hosts
  /// it measures the speeds if neither `compute` nor `link` is given and libzero carries the
  /// tensors. Results are the same.
  PrefetchSpeeds prefetch_speeds{};
  /// The bytes that a rank may hold: states, buffers and activations together (activations as far
  /// as install_host_allocator() counts them); 0: no limit. States that exceed it are refused
  /// before they are allocated, and a first step that exceeds it is refused when it ends. Gathered
  /// units get the memory that it leaves, as far as `max_live_parameters` allows. See Note [Memory
  /// budget] in engine/memory_budget.h. If `offload_optimizer.nvme_path` names a folder but nothing
  /// is offloaded, as much as needed is (tiers.h).
  int64_t memory_budget = 0;
  /// The bytes of a rank's device. A build for CPUs makes its memory a part of this: everything
  /// that is not on the host or a disk must fit in, activations too (as in `memory_budget`). An
  /// allocation that does not fit is refused with OutOfMemory. Gathered units are then copies, even
  /// on one host, in the memory that the first step leaves. 0: no limit. See Note [Device memory]
  /// in base/device_limit.h.
  int64_t device_memory = 0;
  /// Stage 3: the ranks of a host that keep the parameters from forward to backward and for further
  /// micro-batches: ZeRO++'s hpZ (2306.10209, section 3.2). 1: none. It must be the ranks of a
  /// host. On one host it changes nothing, since the ranks keep them anyway.
  int64_t hpz_partition_size = 1;
  /// Stages 1 to 3: the number of ranks among which states are sharded. Each further group of that
  /// many ranks holds the same states, and gradients are added over all ranks: MiCS (2205.00119),
  /// PyTorch's HSDP. -1: all ranks.
  int64_t mics_shard_size = -1;
  QuantisedLinks quantised{};
  /// Stages 1 to 3: arrays that cross between hosts unquantised keep every bit, in three quarters
  /// of bf16's bytes (fp32's: 0.88). See Note [Packed exponents] in comm/packed_exponents.h.
  bool packed_exponents = false;
  OffloadParam offload_param{};
  OffloadOptimizer offload_optimizer{};
  Aio aio{};
  /// Stage 3: gather one-sidedly if the transport can (one host); false makes every gather a
  /// matched all-gather.
  bool one_sided_gather = true;
  /// Constructing the engine gives each rank after the first a random seed of its own (the current
  /// one plus its rank), so that dropout differs. Otherwise the generator does not change.
  bool seed_by_rank = false;
  /// The optimizer of the file's `optimizer` section, for the Engine constructor that takes no
  /// optimizer.
  std::optional<Optimizer> optimizer{};

  /// Returns the engine's part of the settings that Settings::load (zero/config/settings.h) reads
  /// from a JSON file with DeepSpeed's keys (comments and trailing commas allowed). One warning
  /// names the keys without effect. Throws ConfigError naming the key, its value and the nearest
  /// known key. `world_size` serves the batch rule: train_batch_size ==
  /// train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size.
  static Config load(const std::string& path, int world_size, const ReadOptions& options = {});
  /// Reads the same from text; `origin` names it in errors.
  static Config parse(std::string_view text, int world_size,
                      std::string_view origin = "configuration", const ReadOptions& options = {});
  /// Returns the configuration in force as JSON text, which `parse` reads back to an equal value.
  std::string dump() const;
  /// Returns the dtype that fp32 parameters are given: Float, BFloat16 or Half.
  c10::ScalarType parameter_dtype() const {
    return fp16 ? c10::ScalarType::Half : bf16 ? c10::ScalarType::BFloat16 : c10::ScalarType::Float;
  }
  /// Returns the dtype of autocast; none if it is off.
  std::optional<c10::ScalarType> autocast_dtype() const {
    if (!autocast.enabled) return std::nullopt;
    return autocast.dtype == AutocastDtype::fp16 ? c10::ScalarType::Half
                                                 : c10::ScalarType::BFloat16;
  }
  /// Returns whether gradients pass through fp16, so that backward begins with the loss scale.
  bool scales_loss() const { return fp16 || autocast_dtype() == c10::ScalarType::Half; }
  int64_t parameter_bytes() const {
    return static_cast<int64_t>(c10::elementSize(parameter_dtype()));
  }
  /// Returns the number by which each rank divides its gradients before they are added over
  /// `ranks`. If sums are rounded to fp16 and no setting says otherwise, it is the number of ranks:
  /// sums then stay within fp16's range if the mean does. `sharded`: gradients are sharded, so that
  /// each micro-batch's are added over ranks.
  double gradient_predivisor(int64_t ranks, bool sharded) const {
    if (!prescale_gradients && gradient_predivide_factor != 1) return gradient_predivide_factor;
    // In fp16 micro-batches that are reduced one by one are added up in fp32 afterwards.
    const bool adds_after = fp16 && sharded && !layer_major_accumulation && accumulates_fp32();
    const bool rounds_to_fp16 =
        (fp16 && !accumulates_fp32()) || (communication_dtype == DtypeName::fp16 && !adds_after);
    return prescale_gradients || rounds_to_fp16 ? static_cast<double>(ranks) : 1;
  }
  /// Returns the format of the states of parameters of `dtype`.
  optim::StateFormat states_of(c10::ScalarType dtype) const {
    return bf16_optimizer_states && dtype == c10::ScalarType::BFloat16 ? optim::StateFormat::bf16
                                                                       : optimizer_states;
  }
  /// Returns whether gradients of several micro-batches add up in fp32.
  bool accumulates_fp32() const {
    return gradient_accumulation_steps > 1 && accumulation_dtype == AccumulationDtype::fp32 &&
           !bf16_master_weights_and_grads;
  }
  /// Returns the folders that the sections with device nvme name, each once.
  std::vector<std::string> nvme_folders() const;
  /// Throws ConfigError if a value is out of range.
  void validate() const;
  bool operator==(const Config&) const = default;
};

/// Returns an optimizer as the JSON text of a configuration's `optimizer` section.
std::string dump(const Optimizer& optimizer);

}  // namespace zero
