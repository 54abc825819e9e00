// A row of the engine's table as it is planned: all decisions about a unit.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "zero/engine/form.h"
#include "zero/optim/state_format.h"
#include "zero/optim/sweeps.h"
#include "zero/partition/layout.h"
#include "zero/store/tier.h"

namespace zero {

/// A row: where a unit's parameters and states are, and in which form.
struct UnitPlan : Form {
  /// The unit has gradients, master weights and the optimizer's states.
  bool trainable = false;
  /// The elements that this rank updates: all of them at stage 0, its slice from stage 1 on.
  partition::Range owned;
  Tier parameters_at = Tier::device;
  Tier gradients_at = Tier::device;  ///< the gradients that the update reads
  Tier optimizer_at = Tier::device;  ///< master weights and the optimizer's states
  /// The device has memory of its own: states on a disk are updated on the host.
  bool own_memory = false;
  /// How far the update of an element reaches: beyond the element it takes two sweeps
  /// (two_sweeps.h).
  optim::Reach reach = optim::Reach::element;
  /// Names of the optimizer's states; none if the unit is not trainable.
  std::vector<std::string_view> moments;
  std::array<optim::Sign, kStates> moment_signs{};  ///< signs of their values
  Tier factored_at() const { return optimizer_at == Tier::device ? Tier::device : Tier::host; }
  Tier tier(State state) const {
    return state == State::parameters  ? parameters_at
           : state == State::gradients ? gradients_at
                                       : optimizer_at;
  }
  /// Returns whether master weights, or their lower halves, lie apart from the parameters. They do
  /// if the parameters are of low precision, or would have to cross from the device to the host for
  /// an update.
  bool own_master() const {
    return trainable && ((dtype != at::kFloat && !narrow) ||
                         (parameters_at == Tier::device && updated_at() == Tier::host));
  }
  /// Returns whether the update rounds weights or moments: optim::NarrowOperands.
  bool updates_narrow() const {
    return narrow || (moment_format != optim::StateFormat::fp32 && !moments.empty());
  }
  /// Returns the columns of the optimizer that this unit has arrays for.
  c10::SmallVector<State, 3> optimizer_columns() const {
    c10::SmallVector<State, 3> columns;
    if (own_master()) columns.push_back(State::master);
    for (size_t i = 0; i < moments.size(); ++i) columns.push_back(moment(static_cast<int64_t>(i)));
    return columns;
  }
  /// Returns the bytes of `elements` elements of those columns, in whole blocks.
  int64_t optimizer_bytes(int64_t elements) const {
    int64_t bytes = 0;
    for (const auto state : optimizer_columns()) bytes += bytes_of(state, elements);
    return bytes;
  }
  /// Returns the columns on disk, in the order of the file: parameters first, gradients last.
  c10::SmallVector<State, kStates> columns_on_disk() const {
    c10::SmallVector<State, kStates> columns;
    if (parameters_at == Tier::disk) columns.push_back(State::parameters);
    if (optimizer_at == Tier::disk) {
      for (const auto state : optimizer_columns()) columns.push_back(state);
    }
    if (trainable && gradients_at == Tier::disk) columns.push_back(State::gradients);
    return columns;
  }
  /// Returns whether new parameters pass from one memory to the other.
  bool crosses() const { return parameters_at != Tier::disk && parameters_at != updated_at(); }
  /// Returns whether sums of gradients come down from the device to the host's memory.
  bool gradients_come_down() const { return trainable && gradients_at == Tier::host; }
  /// Returns whether a gather brings the slice up from the host's memory to the device.
  bool comes_up() const {
    return parameters_at == Tier::host || (parameters_at == Tier::disk && own_memory);
  }
  /// Returns the tier on which the update makes new parameters.
  Tier updated_at() const {
    if (optimizer_at != Tier::disk) return optimizer_at;
    return own_memory ? Tier::host : parameters_at;
  }
  /// Returns whether the device copies master weights as its new parameters: the parameters are
  /// fp32 and their master weights lie on another tier.
  bool copies_master() const { return own_master() && master_dtype() == dtype; }
  /// Returns whether such master weights lie on disk, so that the update leaves a copy of them for
  /// the device.
  bool copies_from_disk() const { return copies_master() && optimizer_at == Tier::disk; }
};

}  // namespace zero
