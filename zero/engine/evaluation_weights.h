// The weights for evaluation of an optimizer that trains others (optim::evaluated).
//
// Note [Weights for evaluation]
// Schedule-free AdamW trains y and evaluates x = y + k (z - y). Between steps `begin` puts x in
// place of y wherever operators and exports read parameters. x and y cannot be computed from each
// other without rounding, so `end` does not compute y: training goes on as if nobody had evaluated.
// Where master weights lie apart they keep y, and only the parameters change. Where the parameters
// are their own master weights, or halves of them, y goes to memory of its own meanwhile: 4 bytes
// for each element that this rank owns, beside the states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "zero/engine/engine_plan.h"
#include "zero/engine/flows.h"
#include "zero/engine/hyper_parameters.h"
#include "zero/engine/state_changes.h"

namespace zero {

class EvaluationWeights {
 public:
  /// The arguments outlive this.
  EvaluationWeights(EnginePlan& plan, const Flows& flows, const HyperParameters& hyper_parameters,
                    StateChanges& changes)
      : plan_(plan), flows_(flows), hyper_parameters_(hyper_parameters), changes_(changes) {}

  /// Puts them into force. Does nothing where they are, and where the optimizer evaluates what it
  /// trains. Collective.
  void begin();
  /// Puts the weights of training back. Returns whether the others were in force. Collective.
  bool end();
  /// Returns the owned weights of a trainable unit in fp32: its master weights, or those for
  /// evaluation while they are in force.
  at::Tensor read(int64_t unit) const;

 private:
  std::optional<double> share_of(int64_t parameter) const;
  std::vector<int64_t> units() const;
  bool lies_apart(int64_t unit) const;
  at::Tensor computed(int64_t unit) const;

  EnginePlan& plan_;
  const Flows& flows_;
  const HyperParameters& hyper_parameters_;
  StateChanges& changes_;
  std::vector<at::Tensor> trained_;  // by unit while in force: y where it does not lie apart
};

}  // namespace zero
