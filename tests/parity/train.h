// Trains a subject of the parity tests and keeps what must be equal to the bit.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/parity/models.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero::parity {

struct Outcome {
  std::vector<float> losses;     ///< of this rank, one a micro-batch
  std::vector<double> norms;     ///< one a step
  std::vector<double> scales;    ///< of the loss, one a step
  std::vector<uint8_t> weights;  ///< the final full parameters, on rank 0
};

struct Run {
  Recipe model;
  Config config;
  int steps = 20;
};

/// Trains with AdamW at a rate that moves the weights a lot. `data_rank` says whose data this rank
/// has.
Outcome train(const Run& run, std::shared_ptr<comm::Group> group, int data_rank);

/// Equal bytes on every rank: empty, or where they first differ (the same text on all ranks).
std::string difference(const Outcome& a, const Outcome& b, comm::Group& group);

}  // namespace zero::parity
