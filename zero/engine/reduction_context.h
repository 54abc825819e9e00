// The parts of the flow of gradients share these settings and objects.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/device/stream.h"
#include "zero/engine/bucket_pool.h"
#include "zero/engine/form.h"
#include "zero/engine/gradient_arrivals.h"
#include "zero/engine/gradient_presence.h"
#include "zero/engine/placement.h"
#include "zero/engine/reduction_order.h"
#include "zero/engine/state_table.h"
#include "zero/partition/layout.h"

namespace zero {

struct ReductionSettings {
  /// Bytes of the largest ordinary unit.
  int64_t unit_bytes = 0;
  /// Each rank divides its gradients by this before they are added up. A sum in fp16 of gradients
  /// that fp16 can hold may leave its range, so there it is the number of ranks.
  double predivisor = 1;
  /// The beta of LoCo, by which rounding errors of a quantised sum are added to the next one.
  std::optional<float> feedback{};
  /// An update may use the gradients of one step while those of the next are reduced.
  bool doubled = false;
  /// Each sum of sharded gradients goes to BackwardUpdates at once. A step has one pass then.
  bool hands_over = false;
};

/// The parts of the flow share this. All of it outlives them.
struct ReductionContext {
  const partition::Layout& layout;
  StateTable& table;
  const Placement& placement;
  const ReductionSettings& settings;
  GradientArrivals& arrivals;
  GradientPresence& presence;
  ReductionOrder& order;
  BucketPool& pool;
  const std::vector<std::string>& labels;  ///< by unit, for its collectives
  /// The stream of a device on which gradients are reduced; none on the CPU.
  const std::optional<c10::Stream>& side;
  StreamMark& mark;  ///< kept for scopes on `side`

  const GradientForm& gradient_form(int64_t unit) const { return table.plan(unit).gradients; }
  const std::string& label(int64_t unit) const { return labels[static_cast<size_t>(unit)]; }
  /// Returns the ranks that hold the same as this one, if there are others.
  comm::Group* replicas() const {
    return placement.replicas->size() > 1 ? placement.replicas.get() : nullptr;
  }
};

}  // namespace zero
