// ZeRO (Rajbhandari et al., arXiv 1910.02054) in its plainest form, for reading before everything
// else: no pager, no tiers, no streams, no overlap. It is also the oracle of zero::Engine, which
// gives the same losses and weights, bit for bit.
//
//   zero::PlainZero zero(zero::named_tensors(model), zero::AdamW{.lr = 3e-4}, {.stage = 2}, group);
//   zero.step({[&] { model->forward(batch).backward(); }});
//
// Note [Plain ZeRO]
// The parameters are laid out in units, which are flat arrays, and each of the N ranks owns one of
// N equal slices of every unit (partition/layout.h). The four functions at the top of plain.cpp are
// one training step each. They differ in the arrays that a rank keeps whole, and in the moments at
// which a collective runs. Psi is the number of parameters, and the traffic is the number of
// elements that a rank sends in a step of k passes, times (N-1)/N:
//
//   stage  whole on every rank     a slice on each rank      collectives and traffic
//   0      parameters, gradients,                            all-reduce after the last pass, 2 Psi
//          optimizer states
//   1      parameters, gradients   optimizer states          reduce-scatter after the last pass,
//                                                            all-gather after the update, 2 Psi
//   2      parameters              optimizer states,         reduce-scatter after each pass,
//                                  gradients                 all-gather after the update, (k+1) Psi
//   3                              optimizer states,         all-gather before each pass,
//                                  gradients, parameters     reduce-scatter after it, 2 k Psi
//
// The table shows what a rank keeps between passes. In a pass autograd makes every `.grad` whole on
// each rank at any stage, since this class reduces gradients when the pass has ended. At stages 2
// and 3 Engine reduces a unit while backward computes the others, so it never holds all of them.
//
// Section 5 of the paper has the memory of each stage, and section 7 its traffic. The paper counts
// 3 k Psi for stage 3, since it gathers a unit for forward, drops it, and gathers it again for
// backward. This class keeps all units between the two, and Engine gathers unit by unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/named_tensors.h"
#include "zero/optim/optimizer.h"
#include "zero/partition/layout.h"

namespace zero {

class PlainZero {
 public:
  struct Options {
    int stage = 0;                  ///< 0 (plain data parallelism), 1, 2 or 3
    bool bf16 = false;              ///< parameters and gradients in bf16, fp32 master weights
    int64_t micro_batches = 1;      ///< gradients are divided by it; above 1 they add up in fp32
    double gradient_clipping = 0;   ///< largest global L2 norm of the mean gradient; 0: any
    int64_t unit_bytes = 16 << 20;  ///< as Config::unit_bytes
  };
  struct StepResult {
    double grad_norm = 0;  ///< global L2 norm of the mean gradient before clipping
    bool updated = false;  ///< false if a gradient is infinite or NaN: nothing was changed
  };
  /// Computes a loss of one micro-batch on this rank and calls `loss.backward()`.
  using Pass = std::function<void()>;

  /// Moves the parameters of `model` (Float, BFloat16) into units, with rank 0's values. At stage 3
  /// they have no bytes except inside a pass: touching one elsewhere crashes. Throws ConfigError
  /// for an unknown stage, and for an optimizer that needs more of a parameter than the element
  /// that it updates (at stage 0 Lamb works too). Collective.
  PlainZero(const NamedTensors& model, Optimizer optimizer, Options options,
            std::shared_ptr<comm::Group> group);

  /// Runs the passes, adds their gradients over passes and ranks, clips, and updates. As a rule
  /// there is one pass for each micro-batch; all ranks run equally many. Collective. Passes on an
  /// exception of a pass; the object cannot be used any more then.
  StepResult step(const std::vector<Pass>& passes);
  /// Sets the learning rate from the next update on.
  void set_lr(double lr) { lr_ = lr; }
  /// Returns the trained parameters in fp32 (the master weights), in registration order.
  /// Collective.
  std::vector<at::Tensor> weights();

 private:
  struct Unit {
    partition::Unit shape;
    partition::Range owned;  // the elements that this rank updates
    at::Tensor parameters;   // whole; at stage 3 without bytes except inside a pass
    at::Tensor slice;        // the owned: a view of `parameters`; at stage 3 memory of its own
    at::Tensor gradients;    // the sum so far, whole or this rank's slice; or none
    at::Tensor master;       // the owned parameters in fp32, if they are bf16
    std::array<at::Tensor, optim::kMostStates> moments;  // the optimizer's states
  };

  void stage_0(const std::vector<Pass>& passes);
  void stage_1(const std::vector<Pass>& passes);
  void stage_2(const std::vector<Pass>& passes);
  void stage_3(const std::vector<Pass>& passes);
  at::Tensor take_gradients(const Unit& unit);
  at::ScalarType sum_dtype(const Unit& unit) const;
  at::ScalarType next_dtype(const Unit& unit) const;
  void add(Unit& unit, const at::Tensor& gradients) const;
  at::Tensor reduce_scatter(const at::Tensor& whole, at::ScalarType dtype) const;
  void all_gather(Unit& unit) const;
  void update_all();
  void update(Unit& unit, double gradient_scale);

  Optimizer optimizer_;
  Options options_;
  std::shared_ptr<comm::Group> group_;
  double lr_;
  std::vector<at::Tensor> parameters_;  // the trained ones
  at::Tensor present_;                  // by parameter: above 0 if it has a gradient in this step
  std::vector<int64_t> updates_;        // by parameter: how many it has had
  std::vector<Unit> units_;
  StepResult result_;
};

}  // namespace zero
