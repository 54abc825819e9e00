// What Engine holds; shared by the files that implement it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "zero/base/device_limit.h"
#include "zero/base/owner_process.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/engine/engine.h"
#include "zero/engine/gradient_store.h"
#include "zero/engine/optimizer_store.h"
#include "zero/engine/parameter_store.h"
#include "zero/engine/state_stream.h"
#include "zero/engine/tiers.h"
#include "zero/engine/update_queue.h"
#include "zero/store/tier.h"

namespace zero {

struct Engine::Impl {
  Impl(NamedTensors tensors, std::vector<ParameterGroup> groups, Config config,
       std::shared_ptr<comm::Group> group);

  OwnerProcess owner{};

  // Construction, in order.
  void take_names(NamedTensors tensors);
  void assign_groups(const std::vector<ParameterGroup>& groups);
  /// Throws ConfigError where there is none of that index.
  OptimizerStore::Group& parameter_group(size_t index) const;
  void agree_on_model();
  void broadcast_values(const NamedTensors& tensors);
  void lay_out();
  void place();
  /// Of the model, without activations: by what tiers are chosen.
  StepSize step_size() const;
  void move_in(NamedTensors& tensors);
  std::unique_ptr<StateStream> make_disk() const;

  /// Gradients of what `passes` runs go to the stores.
  void collect(bool holds, const std::vector<int64_t>& shared, const std::function<void()>& passes);
  /// The elements of a unit that this rank updates: all of them at stage 0, its slice from stage 1
  /// on.
  partition::Range owned_range(int64_t unit) const;
  /// By unit: where a state goes of which `may_stay` elements stay on the device.
  std::vector<Tier> beyond(int64_t may_stay, Tier tier) const;
  /// Where each state of a unit lives. Gradients: those that the update reads.
  struct Tiers {
    Tier parameters = Tier::device;
    Tier gradients = Tier::device;
    Tier optimizer = Tier::device;
  };
  void choose_tiers_of_units();
  /// Throws ConfigError where master weights cannot be split.
  void check_split() const;
  StateForm form_of(int64_t unit) const;
  const Tiers& tiers_of(int64_t unit) const { return tiers[static_cast<size_t>(unit)]; }
  /// The dtype of a unit's gradients on disk; none where they are in memory.
  std::optional<at::ScalarType> gradient_on_disk(int64_t unit) const;

  /// Index of a parameter by name (tied ones by any of their names). Throws ConfigError naming the
  /// nearest.
  int64_t index_of(std::string_view name) const;
  /// The full array of which every rank holds `owned`: gathers it where it is sharded. Collective.
  at::Tensor full(int64_t unit, const at::Tensor& owned);
  /// Writes the owned part of a parameter's full values (storage order) to the owned elements of
  /// its unit.
  void write_owned(int64_t index, const at::Tensor& target, const at::Tensor& values);
  /// Writes of the user since the last step go from gathered copies to the shards and master
  /// weights.
  void commit_writes();
  void invalidate();
  /// What makes a sum over ranks and micro-batches the mean.
  double mean_scale() const;
  /// The update of all units (but those that backward has taken up) from the gradients of now:
  /// here, or beside what follows.
  void start_update(double scale, bool delayed);
  /// Starts the update of a unit beside the rest of backward.
  void update_beside(int64_t unit, at::Tensor slice);
  /// Throws Error naming a trainable parameter that the user wrote since the last step; once for
  /// each write.
  void refuse_writes(std::string_view when);
  /// Waits for the update of a unit that runs beside, and shows its parameters on this rank. Nobody
  /// reads them meanwhile.
  void finish_update(int64_t unit);
  /// `step` has left updates under way, of which not all are finished.
  bool left_updates() const;
  /// Finishes them.
  void finish_updates();
  /// Throws ConfigError where an update in backward uses them up.
  void check_gradients_kept() const;
  /// Completes an update under way. Collective.
  void complete_update(std::string_view label);
  bool delays() const { return config.offload_optimizer.delayed_update_after > 0; }
  bool updates_in_backward() const { return config.update_in_backward && placement.gradients; }
  /// The update may run until the next forward pass uses the unit.
  bool updates_in_forward(int64_t unit) const {
    return config.update_in_forward && !delays() && tiers_of(unit).parameters == Tier::disk;
  }
  /// Parameters are still used while new ones are made.
  bool hides() const { return delays() || updates_in_backward(); }
  void publish(int64_t unit);
  /// Runs `write`, which may change owned elements, while no rank reads the parameters, and shows
  /// the result to all. Collective.
  void change_parameters(std::string_view label, const std::function<void()>& write);
  /// The part that both ways to change them share, when nobody reads them any more.
  void show(const std::function<void()>& write);
  double global_norm(bool& finite);

  // The memory budget (budget.cpp).
  /// A rank's states in one tier by the formula, at a placement.
  partition::LayoutMemory states(partition::Placement at, Tier tier) const;
  /// Bytes of those on the device and the host.
  partition::StateMemory states_in_memory(partition::Placement at) const;
  /// What a budget or a device leaves after the first step is for gathered units.
  bool spends_budget() const { return config.memory_budget > 0 || config.device_memory > 0; }
  /// Bytes of as many parameters; saturates.
  int64_t bytes_of(int64_t elements) const;
  /// Throws OutOfMemory where the states alone exceed it, or those on the device its cap.
  void check_budget() const;
  /// Throws OutOfMemory where the states exceed what the host has left for a rank and what the
  /// model holds of it now. All ranks have the same states and are given the same number.
  void check_memory(int64_t available) const;
  /// The cap of the device is in force from here on.
  void limit_device();
  /// After the first step: what is left is for gathered units. Collective.
  void spend_budget();

  // Saving and loading.
  /// A flat array that this rank owns: the parameters of a unit, or a state (`state` is its name).
  struct OwnedArray {
    std::string key;  // in a sharded save
    int64_t unit = 0;
    std::string_view state;
    at::ScalarType dtype = at::kFloat;
  };
  std::vector<OwnedArray> owned_arrays() const;
  at::Tensor values_of(const OwnedArray& array) const;
  TensorInfo info_of(const OwnedArray& array) const;
  /// What a sharded save depends on.
  std::map<std::string, std::string> description() const;
  /// That, and the steps taken. While no update is under way.
  std::map<std::string, std::string> header(const char* format) const;
  struct StepCounts {
    int64_t steps = 0;
    std::vector<int64_t> by_parameter;
  };
  /// Those in the header of the file at `path`. Throws CheckpointError.
  StepCounts step_counts(const SafetensorsReader& file, const std::string& path) const;
  void take_steps(StepCounts counts);
  /// As `change_parameters`, where `write` replaces every state: whatever the step of now has made
  /// is dropped, complete or not. No update runs. Collective.
  void replace_states(std::string_view label, const std::function<void()>& write);
  /// Throws Error where gradients are under way that a save would not have.
  void at_boundary(std::string_view what) const;
  /// Throws Error between backward and step where backward has updated some units and others not
  /// (update_in_backward): no state is that of a step then.
  void check_between_steps(std::string_view what) const;

  Config config;
  std::shared_ptr<comm::Group> group;
  partition::Placement placement;
  std::vector<std::string> names;
  std::unordered_map<std::string, int64_t> index;  // every name, tied ones too
  std::vector<at::Tensor> parameters;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  std::vector<size_t> group_of;
  std::unique_ptr<partition::Layout> layout;
  std::vector<at::ScalarType> unit_dtypes;
  std::vector<Tiers> tiers;            // by unit
  std::unique_ptr<DeviceLimit> limit;  // null without a cap
  HostLink link;
  std::unique_ptr<StateStream> disk;  // null where every state is in memory
  std::unique_ptr<ParameterStore> store;
  std::unique_ptr<GradientStore> gradients;
  std::unique_ptr<OptimizerStore> optimizer;
  std::vector<OptimizerStore::Group> optimizer_groups;
  std::vector<int64_t> versions;  // of replicated parameters, to notice the user's writes
  int64_t micro_batches = 0;      // since the last boundary
  int64_t steps = 0;
  bool budget_spent = false;
  std::vector<uint8_t> updating_present;  // of the update under way
  std::vector<uint8_t> all_present;       // of an update in backward: a whole unit's gradients
  std::vector<uint8_t> updating;          // by unit: `step` has left its update under way
  bool delayed = false;                   // as a delayed update
  int64_t held_before_updates = 0;  // bytes of the host allocator, the most before the first update
  // Null where every update is done here. The last member: it ends first.
  std::unique_ptr<UpdateQueue> queue;
};

}  // namespace zero
