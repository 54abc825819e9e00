// Master weights, moments and the update of the elements that this rank owns.
//
// Note [Optimizer on the host]
// Where master weights and moments lie in host memory the update runs there (ZeRO-Offload,
// 2101.06840, section 4): it reads the gradient that has come down and leaves the new parameters,
// in their dtype, in a small block of host memory, from where they go up to the device, block by
// block: 2 bytes a parameter in bf16, the least there is. fp32 parameters on the device get master
// weights of their own on the host, since fetching the parameters for each update would double
// that. The other way round (parameters on the host, optimizer on the device) the blocks lie on the
// device. Results are those of states on the device, bit for bit.
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
#include "zero/store/tier.h"

namespace zero {

/// Where a unit's parameters and states are, and how.
struct StateForm {
  at::ScalarType dtype = at::kFloat;  ///< of the parameters
  Tier parameters_at = Tier::device;
  Tier states_at = Tier::device;  ///< master weights too
  /// Of bf16 parameters only the lower halves of master weights are kept: Note [Split master
  /// weights] in zero/optim/halves.h. Parameters and states then lie in the same place, or the
  /// states on disk.
  bool split = false;

  /// Master weights, or their lower halves, lie apart from the parameters: where these are of low
  /// precision, or would have to cross from the device to the host for an update.
  bool own_master() const {
    return dtype != at::kFloat || (parameters_at == Tier::device && states_at == Tier::host);
  }
  at::ScalarType master_dtype() const { return split ? at::kShort : at::kFloat; }
  /// Bytes an element of master weights and `states` optimizer states.
  int64_t optimizer_bytes(int64_t states) const {
    const auto master = static_cast<int64_t>(c10::elementSize(master_dtype()));
    return 4 * states + (own_master() ? master : 0);
  }
};

class OptimizerStore {
 public:
  /// One optimizer a parameter group, with the learning rate in force.
  struct Group {
    Optimizer optimizer;
    double lr = 0;
  };
  /// What a unit needs to be updated. fp32 parameters are the master weights themselves, unless
  /// they are on the device and the states on the host.
  struct Unit : StateForm {
    partition::Range owned;
    at::Tensor parameters;  ///< owned elements; undefined on disk
    /// Of gradients on disk, which `update` is given none of.
    std::optional<at::ScalarType> gradient_on_disk = {};
    bool parameters_on_disk() const { return parameters_at == Tier::disk; }
    bool states_on_disk() const { return states_at == Tier::disk; }
    /// New parameters pass from one memory to the other.
    bool crosses() const {
      return !parameters_on_disk() && !states_on_disk() && parameters_at != states_at;
    }
    /// Where the update makes new parameters.
    Tier updated_at() const { return states_on_disk() ? parameters_at : states_at; }
    /// fp32 master weights that are the new parameters themselves, for the device to copy.
    bool copies_master() const { return own_master() && dtype == at::kFloat; }
  };

  /// What of a unit lies on disk besides what its form says.
  struct OnDisk {
    std::optional<at::ScalarType> gradients = {};
    bool doubled = false;  ///< the update runs beside the next pass
  };
  /// A unit's arrays in the order of the file: parameters first, gradients last. `trainable`: it
  /// has gradients, master weights and `states` optimizer states.
  static StateStream::Unit arrays_on_disk(int64_t numel, const StateForm& form, bool trainable,
                                          int64_t states, const OnDisk& on_disk);

  /// `group_of` has an entry a parameter; `units` one a unit, with empty `owned` for frozen ones.
  /// What is on disk lies in `disk` (null where nothing is), made of `arrays_on_disk`; it and
  /// `link` outlive this. `hides`: the update leaves new parameters hidden until `reveal`.
  OptimizerStore(const partition::Layout& layout, std::vector<Group> groups,
                 std::vector<size_t> group_of, std::vector<Unit> units,
                 const std::shared_ptr<Ledger>& ledger, HostLink& link, StateStream* disk,
                 bool hides);

  /// A parameter of the unit as its dtype has it, rounded as the update rounds it.
  at::Tensor narrowed(int64_t unit, const at::Tensor& parameter) const;
  /// Sets the master weights of the owned elements of `parameter` from its full values in storage
  /// order; where they are split, the parameters too.
  void set_master(int64_t parameter, const at::Tensor& values);
  /// After something else wrote the owned (low-precision) parameters: where the master no longer
  /// rounds to the parameter, takes the parameter. Elements that were not written keep the master's
  /// extra bits; where it is split, others too.
  void refresh_master(int64_t parameter);
  /// After all owned parameters of a unit were written elsewhere: where an update starts from
  /// hidden ones, these follow. (The functions that set or refresh a parameter do so themselves.)
  void follow(int64_t unit);

  /// The next updates use the learning rates of now.
  void begin_update();
  /// Updates the owned elements of `unit` from `gradient` (the same elements, summed over ranks and
  /// micro-batches; undefined where they are on disk) for every parameter with
  /// `present[parameter]`: absent ones keep weights and moments, as in LibTorch. Counts their
  /// steps.
  void update(int64_t unit, const at::Tensor& gradient, double gradient_scale,
              const std::vector<uint8_t>& present);

  /// Shows the parameters of a unit, if it was updated since the last call, where the update leaves
  /// them hidden. Nobody reads its parameters meanwhile.
  void reveal(int64_t unit);

  /// Forgets what `reveal` would show.
  void discard() { std::fill(unrevealed_.begin(), unrevealed_.end(), uint8_t{0}); }

  /// Bytes that the update of a unit moves between device and host. One on the device fetches fp32
  /// parameters from the host, unless it hides the new ones: then it has those of before.
  HostTraffic host_bytes(int64_t unit) const;

  /// fp32 arrays of the owned elements of a unit: "master", or an optimizer state by name.
  /// Undefined if the unit has none. A copy where it lives on disk or in halves: after changes call
  /// `put`.
  at::Tensor array(int64_t unit, std::string_view name) const;
  /// Puts what `array` gave, and the caller has changed, in its place.
  void put(int64_t unit, std::string_view name, const at::Tensor& values);
  /// Puts new values in the place of all of an array.
  void replace(int64_t unit, std::string_view name, const at::Tensor& values);
  /// The unit has master weights apart from its parameters.
  bool own_master(int64_t unit) const;
  /// They have other values than the parameters: more bits.
  bool extra_bits(int64_t unit) const { return this->unit(unit).dtype != at::kFloat; }
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
    at::Tensor master;  // of master_dtype; shares the parameters' memory if it is not its own;
                        // undefined on disk
    std::vector<at::Tensor> states;  // empty on disk
    // Where the update leaves new parameters until `reveal`; undefined where it leaves them in
    // their place, on disk, or in fp32 master weights apart. Between updates it equals the
    // parameters, as far as the update starts from them: it does so here, where nothing that the
    // user writes meanwhile can get in.
    at::Tensor hidden;
  };
  // As the public one, of owned elements [begin, begin + numel).
  void follow(int64_t unit, int64_t begin, int64_t numel);
  // Master weights in halves, of elements [begin, begin + numel) of those owned.
  at::Tensor joined(int64_t unit) const;
  void put_halves(int64_t unit, int64_t begin, const at::Tensor& values);
  const Unit& unit(int64_t index) const { return units_[static_cast<size_t>(index)]; }
  // Of array_names[index]: its number among the unit's arrays on disk, or -1.
  int64_t place_on_disk(int64_t unit, int64_t index) const;
  int64_t place_on_disk(int64_t unit, std::string_view name) const;
  const partition::Layout& layout_;
  std::vector<Group> groups_;
  std::vector<size_t> group_of_;
  std::vector<Unit> units_;
  std::vector<Arrays> arrays_;
  HostLink& link_;
  StateStream* disk_;
  bool hides_;                       // new parameters on disk go to a second copy
  at::Tensor staging_;               // a block of parameters on their way; undefined without need
  std::vector<double> rates_;        // by group, of the updates under way
  std::vector<uint8_t> unrevealed_;  // by unit
  std::vector<int64_t> steps_;
};

}  // namespace zero
