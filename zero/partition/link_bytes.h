// The bytes of collectives between hosts, with ZeRO++ (2306.10209) too.
//
// H hosts of R ranks each, N = H R. Inside a host ranks share memory. Rank r of each host speaks to
// rank r of the others and carries 1/R of what its host sends (Note [Two levels] in
// comm/hosts_collectives.h). The functions return bytes that leave one host, which its link
// carries each way. Each of the host's ranks sends 1/R of them.
#pragma once

#include <cstdint>

namespace zero::partition {

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
