// Changes of states between steps: by name, in zero::Gathered, or by loading.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "zero/engine/engine_plan.h"
#include "zero/engine/flows.h"
#include "zero/engine/step_progress.h"

namespace zero {

class StateChanges {
 public:
  /// The arguments outlive this.
  StateChanges(const EnginePlan& plan, StepProgress& progress, const Flows& flows)
      : plan_(plan), progress_(progress), flows_(flows) {}

  /// Completes an update under way. Collective.
  void complete_update(std::string_view label);
  /// Waits until an update under way is computed, and takes over what users have written. The
  /// parameters of a delayed update stay out of force. Returns whether there are such. Collective.
  bool settle_update(std::string_view label);
  /// Runs `write`, which may change owned elements of `units`, while no rank reads the parameters.
  /// Then it publishes these elements, and those that users have written, to all ranks. Collective.
  void change_parameters(
      std::string_view label, const std::function<void()>& write = [] {},
      const std::vector<int64_t>& units = {});
  /// Does the same for a `write` that replaces every state. It drops the gradients and updates of
  /// the step under way, complete or not. No update may run. Collective.
  void replace_states(std::string_view label, const std::function<void()>& write);
  /// Drops the gradients of the step so far. Collective if reductions may have begun.
  void drop_gradients();

  /// Throws Error between backward and step if backward has updated some units and not others
  /// (update_in_backward), since no state then belongs to one step.
  void check_between_steps(std::string_view what) const;
  /// Throws Error while the weights for evaluation are in force (evaluation_weights.h).
  void check_trains(std::string_view what) const;
  /// Throws the same, and Error if there are gradients that a save would not have.
  void at_boundary(std::string_view what) const {
    check_between_steps(what);
    progress_.check_at_boundary(what);
  }

 private:
  void change(std::string_view label, const std::function<void()>& write,
              const std::vector<int64_t>& units, bool keeps_delayed);
  std::vector<uint8_t> changed_units(std::string_view label, std::vector<uint8_t> changed);
  void publish(const std::vector<uint8_t>& units) const;

  const EnginePlan& plan_;
  StepProgress& progress_;
  const Flows& flows_;
};

}  // namespace zero
