// The formulas of ZeRO (1910.02054): memory of the model states, traffic of a step, the largest
// model that fits. There are two forms of each: over Psi, as the paper states them, and over a
// Layout. The latter counts the declared padding too, and the ledger shows it byte for byte. Then
// come the bytes that cross between hosts, with ZeRO++ (2306.10209) too, and the formulas of
// ZeRO-Offload (2101.06840) and ZeRO-Infinity (2104.07857), for states that are not on the device.
#pragma once

#include <cstdint>

#include "zero/partition/layout.h"

namespace zero::partition {

/// Says which model states are sharded over the ranks. A stage is one of these tables and nothing
/// else.
struct Sharding {
  bool parameters = false;  ///< sharded from stage 3
  bool gradients = false;   ///< sharded from stage 2
  bool optimizer = false;   ///< sharded from stage 1
};

/// Returns the sharding of ZeRO stage 0, 1, 2 or 3. Throws ConfigError for another.
Sharding sharding_of_stage(int stage);

/// Returns the elements of `unit` that `rank` updates: all of them if optimizer states are
/// replicated, and its slice if they are sharded.
Range owned_range(const Layout& layout, int64_t unit, Sharding sharding, int rank);

/// Bytes of each state per parameter. They are 2, 2 and 12 (fp32 master, m, v) in mixed precision
/// with Adam, and 4, 4 and 8 in fp32, where the parameter is its own master.
struct StateBytes {
  int64_t parameter = 2;
  int64_t gradient = 2;
  int64_t optimizer = 12;
  /// Bytes besides `optimizer` for each kAlignment elements of the optimizer's states: the scales
  /// of 8-bit states.
  int64_t scales = 0;
};

/// Bytes of the model states on one rank.
struct StateMemory {
  double parameters = 0;
  double gradients = 0;
  double optimizer = 0;
  double total() const { return parameters + gradients + optimizer; }
};

/// Returns the memory of section 5, Figure 1 and Table 1. Stage 0: (2+2+K) Psi; stage 1: (2+2) Psi
/// + K Psi/N; stage 2: 2 Psi + (2+K) Psi/N; stage 3: (2+2+K) Psi/N.
StateMemory state_memory(Sharding sharding, double parameters, double world_size,
                         StateBytes bytes = {});

/// Bytes of one unit, or of several units together, in a layout: whole bytes, with padding.
struct LayoutMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t padding = 0;  ///< bytes among the above that are padding
  int64_t total() const { return parameters + gradients + optimizer; }
};

/// Returns the bytes of one unit's states. `bytes` has the bytes of an element, and zero for states
/// that the unit does not have.
LayoutMemory unit_memory(const Layout& layout, int64_t unit, Sharding sharding, StateBytes bytes);

/// Table 2: returns the largest model, in parameters, whose states fit into `device_bytes` on each
/// of `world_size` data-parallel ranks, times `model_parallel` (section 10.1 multiplies).
double largest_model(Sharding sharding, double device_bytes, double world_size,
                     double model_parallel = 1, StateBytes bytes = {});

/// Elements that one rank sends per step, section 7, with k micro-batches accumulated. Each is a
/// multiple of Psi (N-1)/N.
struct StepTraffic {
  double reduce = 0;  ///< reduce-scatter, and the first half of stage 0's all-reduce
  double gather = 0;  ///< all-gather, and the second half of stage 0's all-reduce
  double total() const { return reduce + gather; }
};

/// Returns the traffic of a step. Stages 0 and 1: Psi + Psi, at the accumulation boundary. Stage 2:
/// k Psi + Psi. Stage 3, where every unit is gathered once for forward and once for backward: k Psi
/// + 2k Psi. All are multiplied by (N-1)/N.
StepTraffic step_traffic(Sharding sharding, double parameters, double world_size,
                         int64_t micro_batches = 1);

/// Returns the bytes that one rank sends when a full buffer of `bytes` is gathered or
/// reduce-scattered over N ranks: (N-1)/N of it.
int64_t share_sent(int64_t bytes, int64_t world_size);

// --- Between hosts ---
//
// H hosts of R ranks each, N = H R. Inside a host ranks share memory. Rank r of each host speaks to
// rank r of the others and carries 1/R of what its host sends (Note [Two levels] in
// comm/hosts_collectives.h). All functions below return bytes that leave one host, which its link
// carries each way. Each of the host's ranks sends 1/R of them.

/// Hosts that have equally many ranks.
struct Cluster {
  int64_t hosts = 1;
  int64_t ranks_a_host = 1;
  int64_t ranks() const { return hosts * ranks_a_host; }
};

/// The format of an element when it is sent.
struct Wire {
  int64_t bits = 16;
  int64_t block = 0;  ///< elements that share a scale of 4 bytes; 0: there is none
  /// Exponents of 8 bits are packed into 4 (Note [Packed exponents] in comm/packed_exponents.h).
  bool packed = false;
  /// Returns the bytes of a message of `numel` elements: comm::wire_bytes and comm::packed_bytes,
  /// for the formats that they have.
  int64_t bytes(int64_t numel) const;
  bool operator==(const Wire&) const = default;
};
inline constexpr Wire kWireFp32{32};
inline constexpr Wire kWireBf16{16};

/// Returns the format in which sums of a host's ranks leave it, if the ranks' own elements have the
/// format `elements`. Numbers of 16 bits are added up in fp32 and leave unrounded if there is
/// something to add (R > 1); at R = 2 that is as much as all raw elements were. Quantised elements
/// are added up first and leave quantised.
Wire partial_wire(const Cluster& cluster, const Wire& elements);

/// Returns the bytes of an all-gather of a whole array of `numel` elements (a multiple of N). Each
/// rank sends its slice to H-1 hosts, which is (H-1)/H of the array in all. With `wire` quantised
/// this is qwZ of ZeRO++ (2306.10209), section 3.1.
int64_t all_gather_link_bytes(const Cluster& cluster, int64_t numel, const Wire& wire);

/// Returns the bytes of a reduce-scatter: sums of the host's ranks for the slices of the H-1 other
/// hosts, (H-1)/H of the array, in the format of `partial_wire`. With `elements` quantised this is
/// qgZ of ZeRO++, section 3.3: elements are quantised once between hosts, and not inside.
int64_t reduce_scatter_link_bytes(const Cluster& cluster, int64_t numel, const Wire& elements);

/// Returns the bytes of an all-reduce: a reduce-scatter, and an all-gather of the sums in the
/// elements' own format.
int64_t all_reduce_link_bytes(const Cluster& cluster, int64_t numel, const Wire& elements);

/// Returns the bytes of an all-to-all: each of N ranks has an array of `numel` elements and sends
/// (H-1)/H of it.
int64_t all_to_all_link_bytes(const Cluster& cluster, int64_t numel, const Wire& wire);

/// Returns the bytes of a broadcast along a chain of hosts, for a host that is not the last. Each
/// host except the last sends the whole array on, by the rank that has the root's place.
int64_t broadcast_link_bytes(const Cluster& cluster, int64_t numel, const Wire& wire);

/// How a step uses the links.
struct LinkPlan {
  Sharding sharding{};
  /// States are sharded only inside a host, and the hosts are replicas of each other: PyTorch's
  /// HSDP, MiCS (2205.00119). Nothing is gathered between hosts.
  bool hybrid = false;
  /// Parameters that a host has gathered stay there until the update: hpZ (ZeRO++, section 3.2).
  /// Backward and further micro-batches then gather inside the host.
  bool kept = false;
  /// Gradients of micro-batches add up inside the host, and across hosts once a step.
  bool deferred = false;
  int64_t micro_batches = 1;
  Wire parameters = kWireBf16;
  Wire gradients = kWireBf16;
};

/// Bytes that leave a host in a step.
struct LinkTraffic {
  int64_t gather = 0;  ///< parameters, and the second half of all-reduces
  int64_t reduce = 0;
  int64_t total() const { return gather + reduce; }
};

/// Returns the traffic of a step over `numel` parameters (a multiple of N), with k micro-batches.
/// In units of numel (H-1)/H it is: ZeRO-3 2k + k; with `kept` 1 + k; with `kept` and `deferred` 1
/// + 1; stage 1 1 + 1; stage 2 1 + k (`deferred`: 1 + 1); stage 0 and `hybrid`, an all-reduce of
/// the gradients, 1 + 1, with `hybrid` k times that unless `deferred`. ZeRO++, section 3: M + M + M
/// of ZeRO-3 becomes 0.5 M + 0 + 0.25 M with INT8 parameters, kept, and INT4 gradients, without the
/// scales.
LinkTraffic link_traffic(const Cluster& cluster, int64_t numel, const LinkPlan& plan);

// --- Device, host and disk ---

/// Bytes that one device and its host exchange in a step.
struct OffloadTraffic {
  double down = 0;  ///< gradients to the host
  double up = 0;    ///< parameters to the device
  double total() const { return down + up; }
};

/// ZeRO-Offload, section 3.3: with the optimizer on the host and M parameters, gradients of 2 M
/// bytes go down and parameters of 2 M bytes come back. That is 4 M, the least of all ways that
/// keep fp32 states off the device. `parameters` is the number of parameters that this rank
/// updates. With k micro-batches the gradients of each one go down, 2 k M, unless they are
/// accumulated on the device.
OffloadTraffic offload_traffic(double parameters, int64_t micro_batches = 1,
                               bool accumulated_on_device = false, StateBytes bytes = {});

/// ZeRO-Offload, table 4: returns the bytes that an update of Adam reads and writes. It reads and
/// writes fp32 master weights and moments (24 a parameter), reads the gradient, and writes the
/// parameter in low precision. Divided by the seconds of the update this is its bandwidth.
double adam_bytes(double parameters, StateBytes bytes = {});

/// ZeRO-Offload, section 5.2: returns how many times as fast steps are if each update runs beside
/// the next step's computation. It is the sum of both over the longer of the two, at most 2.
/// Arguments are in seconds.
double delayed_update_speedup(double compute, double update);

/// A transformer and its batch, in ZeRO-Infinity's letters.
struct Transformer {
  double layers = 0;               ///< nl
  double hidden = 0;               ///< hd
  double heads = 0;                ///< attn_heads
  double sequence = 0;             ///< seq, tokens
  double batch = 0;                ///< bsz, sequences
  double checkpoint_interval = 1;  ///< ci, blocks between two activation checkpoints
};

/// ZeRO-Infinity, section 3: returns 12 nl hd^2, for the four linear layers of each block, without
/// embeddings and biases.
double transformer_parameters(const Transformer& model);

/// ZeRO-Infinity, section 3, Figure 2a: returns 20 bytes a parameter: the 16 of mixed precision,
/// and a gradient in fp32 for the update.
double transformer_state_bytes(const Transformer& model);

/// ZeRO-Infinity, section 3: returns 2 bsz seq hd nl / ci bytes, for the inputs of every ci-th
/// block.
double activation_checkpoint_bytes(const Transformer& model);

/// ZeRO-Infinity, section 3, AWM: returns bsz seq ci (16 hd + 2 attn_heads seq) bytes, for the
/// activations between two checkpoints while they are computed again.
double activation_working_bytes(const Transformer& model);

/// ZeRO-Infinity, section 3, MSWM: returns 16 hd^2 bytes, for the parameter and the gradient of the
/// largest linear layer, hd to 4 hd, in half precision. Section 5.1.3: split into `tiles` that are
/// fetched in turn it takes 1/tiles of that.
double state_working_bytes(double hidden, double tiles = 1);

/// ZeRO-Infinity, section 5.1.3: returns that layer's largest single allocation, the weight of one
/// tile: 8 hd^2 / tiles bytes. It must fit into one free stretch of memory.
double largest_tensor_bytes(double hidden, double tiles = 1);

/// Returns the largest hd for which one tile's weight fits into a stretch of `chunk_bytes`.
double largest_hidden(double chunk_bytes, double tiles = 1);

/// ZeRO-Infinity, section 4.1: returns the part of the time in which a device computes, ait bw /
/// (ait bw + peak). Data comes at `bandwidth` bytes a second, each byte serves `intensity`
/// operations, and the device does `peak` operations a second. Nothing overlaps.
double efficiency(double intensity, double bandwidth, double peak);

/// Returns the bandwidth at which `efficiency` is reached: the same formula, solved for bw.
double bandwidth_needed(double efficiency, double intensity, double peak);

/// ZeRO-Infinity, section 4.2: returns the operations per byte of parameters and gradients: seq
/// bsz.
double parameter_intensity(const Transformer& model);
/// Returns the same for optimizer states: seq bsz / 4.
double optimizer_intensity(const Transformer& model);
/// Returns the same for activation checkpoints: 24 hd ci.
double checkpoint_intensity(const Transformer& model);

}  // namespace zero::partition
