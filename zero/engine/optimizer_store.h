// Master weights, moments and the update of the elements that this rank owns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "zero/base/ledger.h"
#include "zero/engine/state_stream.h"
#include "zero/optim/optimizer.h"
#include "zero/partition/layout.h"

namespace zero {

class OptimizerStore {
 public:
  /// One optimizer a parameter group, with the learning rate in force.
  struct Group {
    Optimizer optimizer;
    double lr = 0;
  };
  /// What a unit needs to be updated. fp32 parameters are the master weights themselves.
  struct Unit {
    partition::Range owned;
    at::ScalarType dtype = at::kFloat;
    at::Tensor parameters;  ///< owned elements; undefined on disk
    bool states_on_disk = false;
    /// Of gradients on disk, which `update` is given none of.
    std::optional<at::ScalarType> gradient_on_disk = {};
    /// Where the update leaves new parameters until `reveal`, if not in their place; undefined on
    /// disk.
    at::Tensor hidden = {};
    bool parameters_on_disk() const { return !parameters.defined(); }
  };

  /// What of a unit lies on disk.
  struct OnDisk {
    bool parameters = false;
    bool optimizer = false;  ///< master weights and states
    std::optional<at::ScalarType> gradients = {};
    bool doubled = false;  ///< the update runs beside the next pass
  };
  /// A unit's arrays in the order of the file: parameters first, gradients last. `trainable`: it
  /// has gradients, master weights and `states` optimizer states.
  static StateStream::Unit arrays_on_disk(int64_t numel, at::ScalarType dtype, bool trainable,
                                          int64_t states, const OnDisk& on_disk);

  /// `group_of` has an entry a parameter; `units` one a unit, with empty `owned` for frozen ones.
  /// What is on disk lies in `disk` (null where nothing is), made of `arrays_on_disk`; it outlives
  /// this.
  OptimizerStore(const partition::Layout& layout, std::vector<Group> groups,
                 std::vector<size_t> group_of, std::vector<Unit> units,
                 const std::shared_ptr<Ledger>& ledger, StateStream* disk, bool hides);

  /// Sets the master weights of the owned elements of `parameter` from its full fp32 values in
  /// storage order.
  void set_master(int64_t parameter, const at::Tensor& values);
  /// After something else wrote the owned (low-precision) parameters: where the master no longer
  /// rounds to the parameter, takes the parameter. Elements that were not written keep the master's
  /// extra bits. No-op for fp32.
  void refresh_master(int64_t parameter);

  /// The next updates use the learning rates of now.
  void begin_update();
  /// Updates the owned elements of `unit` from `gradient` (the same elements, summed over ranks and
  /// micro-batches; undefined where they are on disk) for every parameter with
  /// `present[parameter]`: absent ones keep weights and moments, as in LibTorch. Counts their
  /// steps.
  void update(int64_t unit, const at::Tensor& gradient, double gradient_scale,
              const std::vector<uint8_t>& present);

  /// Shows the parameters of the units that were updated since the last call, where the update
  /// leaves them hidden. Nobody reads the parameters meanwhile.
  void reveal();

  /// Forgets what `reveal` would show.
  void discard() { unrevealed_.clear(); }

  /// fp32 arrays of the owned elements of a unit: "master", or an optimizer state by name.
  /// Undefined if the unit has none. A copy where it lives on disk: after changes call `put`.
  at::Tensor array(int64_t unit, std::string_view name) const;
  /// Puts what `array` gave, and the caller has changed, in its place.
  void put(int64_t unit, std::string_view name, const at::Tensor& values);
  /// Puts new values in the place of all of an array.
  void replace(int64_t unit, std::string_view name, const at::Tensor& values);
  /// The unit has master weights apart from its parameters.
  bool own_master(int64_t unit) const;
  /// "master" and the states of the unit's optimizers.
  std::vector<std::string_view> array_names(int64_t unit) const;

  std::vector<Group>& groups() { return groups_; }
  const std::vector<Group>& groups() const { return groups_; }
  const Group& group_of(int64_t parameter) const {
    return groups_[group_of_[static_cast<size_t>(parameter)]];
  }
  /// Updates that each parameter has had.
  std::vector<int64_t>& steps() { return steps_; }

 private:
  struct Arrays {
    at::Tensor master;  // shares the parameters' memory if they are fp32; undefined on disk
    std::vector<at::Tensor> states;  // empty on disk
  };
  const Unit& unit(int64_t index) const { return units_[static_cast<size_t>(index)]; }
  // Of array_names[index]: its number among the unit's arrays on disk, or -1.
  int64_t place_on_disk(int64_t unit, int64_t index) const;
  int64_t place_on_disk(int64_t unit, std::string_view name) const;
  const partition::Layout& layout_;
  std::vector<Group> groups_;
  std::vector<size_t> group_of_;
  std::vector<Unit> units_;
  std::vector<Arrays> arrays_;
  StateStream* disk_;
  bool doubled_;                     // new parameters on disk go to a second copy
  std::vector<double> rates_;        // by group, of the updates under way
  std::vector<int64_t> unrevealed_;  // units
  std::vector<int64_t> steps_;
};

}  // namespace zero
