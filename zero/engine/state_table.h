// The table holds each state of each unit, on the tier that the configuration gives it.
//
// Note [The table]
// A row is a unit, a column a state (State in form.h). A cell is an array of the elements that this
// rank owns, of one dtype, on one tier. Three flows go over it: gather brings parameters to the
// place where operators read them (gather.h), reduce brings gradients to the cells that the update
// reads (reduce.h), and update passes the blocks of a row through the optimizer (update.h). They
// ask the table for ranges and blocks. A plan says on which tier a cell lies, and the table knows
// its place on that tier. Only UpdateSchedule knows when an update runs. Saving, loading and
// reading by name are readers and writers of ranges.
//
// Note [Optimizer on the host]
// If master weights and moments lie in host memory, the update runs there (ZeRO-Offload,
// 2101.06840, section 4). It reads the gradient that has come down and writes the new parameters,
// in their dtype, to a small block of host memory. They go up to the device from there, block by
// block: 2 bytes a parameter in bf16, which is the least possible. fp32 parameters on the device
// get master weights of their own on the host, since fetching the parameters for each update would
// double the traffic. If the parameters are on the host and the optimizer is on the device, the
// blocks lie on the device. Results are those of states on the device, bit for bit.
//
// Note [New parameters]
// An update that runs beside a pass must not change the parameters that the pass uses. It writes
// new parameters to memory of their own, or to a second copy on disk, and `use_new_parameters` puts
// them into force when the pass is over. Between updates that memory holds the same values as the
// parameters. An update starts from it, so the update never sees the user's writes to the
// parameters meanwhile.
//
// Note [Copies to a device]
// On a device with memory of its own the copies of an update are enqueued on the stream of the
// thread that updates, and the host goes on with the next block. The host waits before it writes
// memory that a copy may still read: it waits for the last copy of a block of the ring before it
// uses the block again. Two kinds of memory are written again only by the unit's next update:
// master weights that are copied up themselves, and new parameters that are not in force yet. By
// then that update's gradient has come down from the device on streams that follow these copies. A
// delayed update has its gradient earlier, so it waits (`wait_for_copies`), and so do reads of
// memory that such copies write.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/ledger.h"
#include "zero/engine/disk_use.h"
#include "zero/engine/placement.h"
#include "zero/engine/unit_plan.h"
#include "zero/partition/layout.h"
#include "zero/store/disk_tier.h"
#include "zero/store/state_tier.h"
#include "zero/store/tier.h"

namespace zero {

/// Learns of changes of states before they are made.
class TableObserver {
 public:
  virtual ~TableObserver() = default;
  /// Master weights or optimizer states of a unit are about to change, once this returns. Called by
  /// any thread, also where nothing will change in the end.
  virtual void before_change(int64_t unit) = 0;
};

class StateTable {
 public:
  struct Options {
    /// Updates do not change the parameters in use: Note [New parameters].
    bool keeps_old_parameters = false;
    /// States on disk have two copies, so that `take_back_update` can be called.
    bool keeps_old_states = false;
    /// Stage 3: slices lie side by side in a window, an array that the ranks of a host share, if
    /// there can be one. Devices have none.
    bool in_place = false;
  };
  /// Returns the arrays on disk of all units, for the DiskTier that a table of these plans is
  /// given.
  static std::vector<store::DiskTier::Unit> units_on_disk(const std::vector<UnitPlan>& plans,
                                                          bool keeps_old_parameters,
                                                          bool keeps_old_states);

  /// `plans` has one plan for each unit; `disk` is null if no state lies on a disk. `copier` must
  /// outlive this. Makes all arrays, filled with zeros, except those of gradients, which the flow
  /// that reduces them makes. Collective if `in_place`.
  StateTable(const partition::Layout& layout, std::vector<UnitPlan> plans,
             const Placement& placement, DeviceCopier& copier,
             std::unique_ptr<store::DiskTier> disk, Options options);
  /// Waits for copies that read its memory.
  ~StateTable();
  StateTable(const StateTable&) = delete;
  StateTable& operator=(const StateTable&) = delete;

  const partition::Layout& layout() const { return layout_; }
  const UnitPlan& plan(int64_t unit) const { return plans_[static_cast<size_t>(unit)]; }
  bool trainable(int64_t unit) const { return plan(unit).trainable; }
  /// Returns the range of all elements of a row on this rank, counted from its first.
  partition::Range all(int64_t unit) const { return {0, plan(unit).owned.size()}; }
  DeviceCopier& copier() const { return copier_; }
  /// Returns the ranks over which arrays are sharded.
  comm::Group& group() const { return group_; }
  /// Returns the name of a unit, for people.
  const std::string& label(int64_t unit) const { return labels_[static_cast<size_t>(unit)]; }
  /// Returns the device that the device tier is on.
  c10::Device device() const { return group_.device(); }
  c10::Device device_of(Tier tier) const { return copier_.device_of(tier); }
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }

  // The next functions handle ranges of cells. Elements are counted from the first that this rank
  // owns of the unit. fp32 parameters without master weights of their own are their own master
  // weights.

  /// Returns the column of a state by name ("master", or the optimizer's name for it), or nothing
  /// if the unit has no such state.
  std::optional<State> find(int64_t unit, std::string_view name) const;
  /// Returns the names that `find` knows of a unit, "master" first. A frozen unit has none.
  std::vector<std::string_view> names(int64_t unit) const;
  std::string_view name(int64_t unit, State state) const;
  /// Returns elements of a state, 1-D: master weights and 8-bit states in fp32, others in their
  /// dtype. The result is the memory itself if the state lies there in that form; a state on disk,
  /// in halves or in codes gives a copy. Waits for a disk, and for copies to the host.
  at::Tensor read(int64_t unit, State state, partition::Range elements) const;
  at::Tensor read(int64_t unit, State state) const { return read(unit, state, all(unit)); }
  /// Returns the full array of a unit, on the device. `owned` is this rank's part; the ranks gather
  /// the parts if the array is sharded. Collective.
  at::Tensor full(int64_t unit, const at::Tensor& owned) const;
  /// Returns the same as the cell stores it: the lower halves of split master weights, and the
  /// bytes of whole blocks of 8-bit states (`elements` begin and end on multiples of kCodedBlock).
  at::Tensor read_stored(int64_t unit, State state, partition::Range elements) const;
  /// Writes elements of a state from 1-D `values` of any floating-point dtype, rounded to nearest,
  /// or from the bytes of 8-bit blocks as `read_stored` gives them. Parameters that are halves of
  /// the master weights change with them, and new parameters change with the parameters.
  void write(int64_t unit, State state, partition::Range elements, const at::Tensor& values);
  // The next functions are for an update whose parameters are not in force yet
  // (`use_new_parameters` puts them into force), and which is over.

  /// Returns what `read` will return once they are in force. `before_change` comes before that.
  at::Tensor read_new(int64_t unit, State state, partition::Range elements) const;
  at::Tensor read_new(int64_t unit, State state) const { return read_new(unit, state, all(unit)); }
  /// Does as `write`, to the values that `read_new` returns. The parameters in force do not change.
  void write_new(int64_t unit, State state, partition::Range elements, const at::Tensor& values);
  /// Says that the new parameters of a unit, written by `write_new`, are to come into force.
  void keep_new_parameters(int64_t unit) { updated_[static_cast<size_t>(unit)] = 1; }

  /// Returns the memory of a cell that is not on a disk: undefined if nobody has made it, or if it
  /// has been given back.
  at::Tensor& memory(int64_t unit, State state) const;

  // The next functions transfer whole cells that lie on a disk, asynchronously.

  /// Returns the bytes of memory that a transfer needs: a multiple of store::kAlignment, or 0 if
  /// the cell lies in memory, which needs no transfer.
  int64_t transfer_bytes(int64_t unit, State state) const;
  /// Starts to read a cell to `to`, which is aligned to store::kAlignment and lives until `wait`
  /// returns.
  store::Transfer start_read(int64_t unit, State state, void* to);
  /// Starts to write a cell that the update only reads. All reads of it have ended.
  store::Transfer start_write(int64_t unit, State state, const void* from);
  /// Waits for a transfer, and counts the time as waiting for the disk.
  void wait(store::Transfer& transfer);
  /// Exchanges the two copies of a cell that has two: the update reads the one that was written,
  /// and writing goes to the other.
  void exchange_copies(int64_t unit, State state);

  /// Tells `observer`, and no earlier one, of changes. Null: nobody.
  void observe(std::shared_ptr<TableObserver> observer);

  /// Returns the accounts of the disk: all zero where every state is in memory.
  DiskUse disk_use() const;

  // Parameters.

  /// Returns all elements of a unit, where parameters are replicated (stages 0 to 2).
  const at::Tensor& whole(int64_t unit) const { return whole_[static_cast<size_t>(unit)]; }
  /// Returns the shared array of stage 3 on one host, else null.
  comm::Window* window() const { return window_.get(); }
  /// Returns this device's part of a unit that each of several hosts keeps, (hosts * slice): Note
  /// [Kept on devices] in kept_units.cpp.
  const at::Tensor& kept(int64_t unit) const { return kept_[static_cast<size_t>(unit)]; }
  /// Returns the byte of the window at which a unit begins.
  int64_t window_offset(int64_t unit) const { return window_offset_[static_cast<size_t>(unit)]; }
  /// Returns the part of a parameter that this rank owns, in elements of its unit.
  partition::Range owned_part(int64_t parameter) const;
  /// Writes the owned part of a parameter's full values (1-D, storage order, any dtype). Master
  /// weights and new parameters do not change.
  void write_parameter(int64_t parameter, const at::Tensor& values);
  /// Does the same with values that operators left on the device, and counts bytes that cross to
  /// the host.
  void write_from_device(int64_t parameter, const at::Tensor& values);
  /// Returns a parameter in its unit's dtype, rounded as the update rounds it.
  at::Tensor narrowed(int64_t unit, const at::Tensor& parameter) const;
  /// Writes the owned part of a state of `parameter` from its full values in storage order.
  void write_owned(int64_t parameter, State state, const at::Tensor& values);
  /// Makes master weights follow after something else wrote the owned (low-precision) parameters:
  /// if a master weight no longer rounds to the parameter, it takes the parameter's value. Elements
  /// that were not written keep the master's extra bits; split masters keep them always.
  void refresh_master(int64_t parameter);
  /// Makes the new parameters of a unit equal to the parameters, all of which were written
  /// elsewhere. (Functions that write ranges or one parameter's masters do so themselves.)
  void reset_new_parameters(int64_t unit) { reset_new_parameters(unit, all(unit)); }
  /// Puts new parameters of a unit into force, if it was updated since the last call. Nobody may
  /// read its parameters meanwhile.
  void use_new_parameters(int64_t unit);
  /// Takes an update back whose parameters are not in force yet. Needs `keeps_old_states`.
  void take_back_update(int64_t unit);
  /// Drops the new parameters that `use_new_parameters` would put into force.
  void drop_new_parameters();
  /// Blocks until new parameters have crossed between device and host.
  void wait_for_copies() const { parameter_copies_.wait_on_host(); }

  // The next functions are for the code that schedules updates. They do nothing if all states are
  // in memory.

  /// From now on updates run beside other work, in the order that `upcoming` names: see
  /// store::DiskTier::run_beside.
  void run_updates_beside(std::function<std::optional<int64_t>(int64_t index)> upcoming);
  /// Blocks until the states that updates wrote are on disk, while no unit is updated.
  void wait_for_written_states();
  /// The updates of a step are done: frees buffers into which nothing can be read ahead.
  void end_updates();
  /// Returns the clock that counts waiting for states on disk, or null if there are none.
  comm::WaitClock* wait_clock() const { return disk_ ? &disk_->clock() : nullptr; }

  // Blocks.

  /// Elements [begin, end) of a row, and the addresses where the update reads and writes them.
  struct Block {
    int64_t begin = 0;
    int64_t end = 0;
    /// The address of element `begin` in each column. New parameters go to that of the parameters,
    /// which is null if the master weights are the parameters.
    std::array<std::byte*, kStates> at{};
    /// The update must write new parameters for all elements, since their place does not hold the
    /// old ones.
    bool fresh = false;
  };
  /// Passes the row of `unit` through `update` block by block; blocks on disk may come from several
  /// threads at once. `gradient` has the owned elements, or is undefined if they lie on disk. With
  /// Weights::unchanged `update` must not change the weights, and only writes new parameters where
  /// the block is fresh.
  enum class Weights : uint8_t { updated, unchanged };
  void for_each_block(int64_t unit, const at::Tensor& gradient,
                      const std::function<void(const Block&)>& update,
                      Weights weights = Weights::updated);

 private:
  // How the update of a unit makes its new parameters.
  struct NewParameters {
    enum class Kind : uint8_t {
      masters,  // the parameters are their own master weights
      copies,   // they equal master weights that lie elsewhere
      rounded   // they are rounded from master weights, or their upper halves
    };
    enum class Place : uint8_t {
      cell,          // the update writes where the old ones lie
      master,        // the master weights serve as the new parameters
      apart,         // memory of their own: Note [New parameters]
      staged_block,  // a block that is copied to the other memory
      disk_block     // a block that is written to the disk
    };
    Kind kind = Kind::masters;
    Place place = Place::cell;
    // Each block is copied to the cell, in the other memory, when it is made.
    bool crosses = false;
    at::Tensor memory{};  // the new parameters that lie apart
  };
  NewParameters new_parameters(const UnitPlan& plan) const;

  void make_parameters(const Placement& placement, const Options& options);
  void make_optimizer(int64_t unit);
  void make_staging();
  Block cells(int64_t unit, const at::Tensor& gradient, const store::DiskTier::Block& part) const;
  at::Tensor zeros(Tier tier, int64_t numel, at::ScalarType dtype, Category category,
                   int64_t colour = 0) const;
  store::MemoryTier& memory_tier(Tier tier) const;
  store::StateTier& tier(int64_t unit, State state) const;
  // The number of a cell's array on disk, or none if it is in memory.
  std::optional<int64_t> place_on_disk(int64_t unit, State state) const;
  int64_t array_on_disk(int64_t unit, State state) const;
  // The column that holds a state, and the number of its array there.
  State held_as(int64_t unit, State state) const;
  int64_t number(int64_t unit, State state) const;
  partition::Range entries(int64_t unit, State state, partition::Range elements) const;
  optim::Sign sign_of(int64_t unit, State state) const;
  void write_stored(int64_t unit, State state, partition::Range elements, const at::Tensor& values);
  struct Halves {
    at::Tensor upper;  // the parameters
    at::Tensor lower;
  };
  Halves split(int64_t unit, const at::Tensor& values) const;
  at::Tensor joined(const at::Tensor& upper, const at::Tensor& lower) const;
  void write_halves(int64_t unit, partition::Range elements, const at::Tensor& values);
  void write_beside(int64_t unit, partition::Range elements, const at::Tensor& values);
  void write_codes(int64_t unit, State state, partition::Range elements, const at::Tensor& values);
  void write_parameter(int64_t parameter, const at::Tensor& values, std::optional<Tier> from);
  void reset_new_parameters(int64_t unit, partition::Range elements);
  void before_change(int64_t unit) const;

  const partition::Layout& layout_;
  std::vector<UnitPlan> plans_;
  std::vector<std::string> labels_;  // the units' labels
  comm::Group& group_;
  std::shared_ptr<Ledger> ledger_;
  DeviceCopier& copier_;
  bool keeps_old_parameters_;
  bool keeps_old_states_;
  std::unique_ptr<store::MemoryTier> device_;
  std::unique_ptr<store::MemoryTier> host_;
  std::unique_ptr<store::DiskTier> disk_;
  std::vector<at::Tensor> whole_;  // by unit; empty if parameters are sharded
  std::unique_ptr<comm::Window> window_;
  std::vector<int64_t> window_offset_;
  std::vector<at::Tensor> kept_;               // by unit; empty unless devices keep all parameters
  std::vector<NewParameters> new_parameters_;  // by unit
  std::vector<uint8_t> updated_;  // by unit: since new parameters were last put into force
  StreamMark parameter_copies_;   // the last copy of new parameters between host and device
  // Blocks of parameters on their way, which take turns; none if no update needs them.
  struct Staging {
    at::Tensor memory;
    StreamMark sent;
  };
  std::vector<Staging> staging_;
  size_t staged_ = 0;
  mutable std::mutex observer_mutex_;
  std::shared_ptr<TableObserver> observer_;
};

}  // namespace zero
