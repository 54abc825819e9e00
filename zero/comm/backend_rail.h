// A rail over c10d's own point-to-point messages.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

#include "zero/comm/piece_rail.h"

namespace zero::comm {

/// Makes a rail over any c10d backend whose ranks are the hosts, in their order (its rank h is this
/// rank's counterpart on host h). The backend must have `send` and `recv` of tensors in the host's
/// memory that go on by themselves once posted and that match by tag, and nobody else may use it.
/// Its works, or the backend itself, should have `abort`: without it a wait ends only when its peer
/// answers or the time is up. The backend must see to it that nobody touches a message's memory
/// after an aborted wait.
std::unique_ptr<Rail> backend_rail(c10::intrusive_ptr<c10d::Backend> backend,
                                   PieceOptions options = {});

/// Post a piece of a message over `backend`. Carriers use them.
std::unique_ptr<Piece> send_piece(c10d::Backend& backend, int rank, int tag,
                                  std::span<const std::byte> bytes);
std::unique_ptr<Piece> receive_piece(c10d::Backend& backend, int rank, int tag,
                                     std::span<std::byte> bytes);

}  // namespace zero::comm
