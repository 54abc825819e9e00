#include "zero/partition/link_bytes.h"

namespace zero::partition {

int64_t Wire::bytes(int64_t numel) const {
  const auto part = [&](int64_t elements) { return (numel + elements - 1) / elements; };
  // A message has a base for each 128 elements, a code of 4 bits for each element, the other bits
  // of each element, and room for every 64th exponent.
  if (packed) return part(128) + part(2) + numel * (bits - 8) / 8 + part(64);
  constexpr int64_t kScaleBytes = 4;
  const int64_t scales = block == 0 ? 0 : (numel + block - 1) / block * kScaleBytes;
  return scales + (numel * bits + 7) / 8;
}

Wire partial_wire(const Cluster& cluster, const Wire& elements) {
  const bool rounded = elements.block == 0 && elements.bits < kWireFp32.bits;
  if (!rounded || cluster.ranks_a_host == 1) return elements;
  return {.bits = kWireFp32.bits, .packed = elements.packed};
}

int64_t all_gather_link_bytes(const Cluster& cluster, int64_t numel, const Wire& wire) {
  return cluster.ranks_a_host * (cluster.hosts - 1) * wire.bytes(numel / cluster.ranks());
}

int64_t reduce_scatter_link_bytes(const Cluster& cluster, int64_t numel, const Wire& elements) {
  return all_gather_link_bytes(cluster, numel, partial_wire(cluster, elements));
}

int64_t all_reduce_link_bytes(const Cluster& cluster, int64_t numel, const Wire& elements) {
  return reduce_scatter_link_bytes(cluster, numel, elements) +
         all_gather_link_bytes(cluster, numel, elements);
}

}  // namespace zero::partition
