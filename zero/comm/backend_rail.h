// A rail over c10d's own point-to-point messages.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

#include "zero/comm/piece_rail.h"

namespace zero::comm {

/// A rail over any c10d backend whose ranks are the hosts, in their order (rank h of it is this
/// rank's counterpart on host h). It must have `send` and `recv` of tensors in the host's memory
/// that go on by themselves once posted and that match by tag, and nobody else may use it. Its
/// works should have `abort`, or the backend itself: of a backend that has neither, a wait ends no
/// sooner than its peer answers or the time is up. That nobody touches a message's memory after an
/// aborted wait is up to the backend too.
std::unique_ptr<Rail> backend_rail(c10::intrusive_ptr<c10d::Backend> backend,
                                   PieceOptions options = {});

/// Posts a piece over `backend`; for carriers.
std::unique_ptr<Piece> send_piece(c10d::Backend& backend, int rank, int tag,
                                  std::span<const std::byte> bytes);
std::unique_ptr<Piece> receive_piece(c10d::Backend& backend, int rank, int tag,
                                     std::span<std::byte> bytes);

}  // namespace zero::comm
