// The sizes of the memory through which states pass in a step. The planner counts them too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zero {

/// The elements of a piece of parameters or of sums that crosses between device and host. A piece
/// stays in a core's cache.
inline constexpr int64_t kPieceNumel = int64_t{1} << 18;
/// The most pieces of new parameters that are under way at a time to a device with memory of its
/// own.
inline constexpr size_t kParameterPieces = 4;
/// The most pieces of sums that are under way at a time from such a device.
inline constexpr size_t kSumPieces = 8;
/// The most updates in backward that are under way while activations have freed no memory for their
/// gradients.
inline constexpr size_t kUpdatesUnderWay = 4;

}  // namespace zero
