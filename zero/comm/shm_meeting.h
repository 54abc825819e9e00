// How the ranks of a shared-memory group find each other and come to hold the same memory.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <vector>

#include "zero/comm/arena.h"
#include "zero/comm/peers.h"

namespace zero::comm {

struct Meeting {
  std::shared_ptr<Mapping> mapping;
  std::unique_ptr<Peers> peers;
};

/// Meets the other ranks in `store`, and returns once every rank has mapped the memory. Collective;
/// may be called again with the same store for another group. Throws CommError if the ranks are
/// not on one host, a rank fails or dies, or one does not arrive within `timeout`. `numbers` are as
/// in Peers.
Meeting meet(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
             std::vector<int> numbers = {});

}  // namespace zero::comm
