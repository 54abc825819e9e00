// The formulas of ZeRO (1910.02054) for the memory of the model states: over Psi, as the paper
// states them, and over a Layout. The latter counts the declared padding too, and the ledger shows
// it byte for byte. Then come the bytes of collectives between hosts, with ZeRO++ (2306.10209) too.
// The costs of a whole step are in engine/costs.h.
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

}  // namespace zero::partition
