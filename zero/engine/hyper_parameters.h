// The hyper-parameters in force, by parameter group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "zero/engine/model.h"
#include "zero/optim/optimizer.h"

namespace zero {

/// The optimizer of parameters, and the learning rate in force.
struct OptimizerInForce {
  explicit OptimizerInForce(const Optimizer& of);
  Optimizer optimizer;
  double lr;
  uint64_t hash;  ///< the hash of `optimizer`; each step compares it over ranks
};

/// A group of Muon or Apollo has a twin for the parameters that are no hidden matrices, which
/// follows its settings. Functions that take the index of a group throw ConfigError if there is no
/// such group.
class HyperParameters {
 public:
  /// Takes the groups of `model`, which outlives this.
  explicit HyperParameters(const Model& model);

  const std::vector<OptimizerInForce>& groups() const { return groups_; }
  /// Returns a number below 2^48 that stands for all of them and for the largest norm.
  int64_t hash(double clipping) const;
  /// Throws Error if a rank has other hyper-parameters. `by_rank` has the hash of each rank; the
  /// other arguments are this rank's.
  void check_same(const std::vector<int64_t>& by_rank, int rank, double clipping) const;
  double lr(size_t index) const { return in_force(index).lr; }
  void set_lr(double lr, size_t index);
  /// Returns a group's optimizer with the learning rate in force.
  Optimizer optimizer(size_t index) const;
  /// Throws ConfigError for another optimizer than the group has, or one with other states.
  void set_optimizer(const Optimizer& optimizer, size_t index);
  /// Throws ConfigError if the optimizer has no betas.
  void set_betas(double beta1, double beta2, size_t index);

 private:
  size_t checked(size_t index) const;
  void check_same_shapes(const Optimizer& now, const Optimizer& before, size_t index) const;
  OptimizerInForce& in_force(size_t index) { return groups_[checked(index)]; }
  const OptimizerInForce& in_force(size_t index) const { return groups_[checked(index)]; }

  const Model& model_;
  std::vector<OptimizerInForce> groups_;
};

}  // namespace zero
