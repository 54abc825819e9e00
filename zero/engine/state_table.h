// The table: each state of each unit, on the tier that the configuration gives it.
//
// Note [The table]
// A row is a unit, a column a state (unit_plan.h). A cell is an array of the elements that this
// rank owns, of one dtype, on one tier. Three flows go over it: gather brings parameters to where
// operators read them (gather.h), reduce brings gradients to the cells that the update reads
// (reduce.h), and update passes the blocks of a row through the optimizer (update.h). They ask the
// table for cells and blocks. A plan says on which tier a cell lies, the table where on it; when an
// update runs is known to UpdateSchedule alone. Saving, loading and reading by name are readers and
// writers of cells.
//
// Note [Optimizer on the host]
// Where master weights and moments lie in host memory the update runs there (ZeRO-Offload,
// 2101.06840, section 4): it reads the gradient that has come down and leaves the new parameters,
// in their dtype, in a small block of host memory, from where they go up to the device, block by
// block: 2 bytes a parameter in bf16, the least there is. fp32 parameters on the device get master
// weights of their own on the host, since fetching the parameters for each update would double
// that. The other way round (parameters on the host, optimizer on the device) the blocks lie on the
// device. Results are those of states on the device, bit for bit.
//
// Note [Copies to a device]
// Of a device with memory of its own the copies of an update are enqueued on the stream of who
// updates, and the host goes on with the next block. It waits where it would write memory that a
// copy may still read: a block of the ring, once that comes round again. Master weights that are
// copied up themselves, and hidden parameters, are written again by the unit's next update only.
// That one's gradient has come down from the device by then, on streams that follow these copies;
// an update that is delayed has its gradient earlier, and waits (`settle`), as do reads of what
// comes down.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "zero/base/ledger.h"
#include "zero/engine/placement.h"
#include "zero/engine/unit_plan.h"
#include "zero/partition/layout.h"
#include "zero/store/disk_tier.h"
#include "zero/store/state_tier.h"
#include "zero/store/tier.h"

namespace zero {

class StateTable {
 public:
  struct Options {
    /// Updates leave new parameters hidden until `show`: they run beside a pass that uses the old.
    bool hides = false;
    /// States on disk have two copies: an update that was not shown can be left out (`undo`).
    bool undoes = false;
    /// Stage 3: slices lie side by side in an array that the ranks of a host share, where there can
    /// be one.
    bool in_place = false;
    /// Whether a unit's slice is kept apart from that array, which has other values of it. May be
    /// empty: none is.
    std::function<bool(int64_t unit)> apart{};
  };
  /// The arrays on disk of all units, for the DiskTier that a table of these plans is given.
  static std::vector<store::DiskTier::Unit> units_on_disk(const std::vector<UnitPlan>& plans,
                                                          bool hides, bool undoes);

  /// `plans` has one a unit; `disk` is null where nothing lies there. `link` outlives this. Makes
  /// all arrays, zero-filled, but those of gradients, which the flow that reduces them makes.
  /// Collective where `in_place`.
  StateTable(const partition::Layout& layout, std::vector<UnitPlan> plans,
             const Placement& placement, HostLink& link, std::unique_ptr<store::DiskTier> disk,
             Options options);
  /// Waits until nothing reads its memory any more.
  ~StateTable();
  StateTable(const StateTable&) = delete;
  StateTable& operator=(const StateTable&) = delete;

  const UnitPlan& plan(int64_t unit) const { return plans_[static_cast<size_t>(unit)]; }
  bool trainable(int64_t unit) const { return plan(unit).trainable; }
  bool on_disk(int64_t unit, State state) const { return plan(unit).tier(state) == Tier::disk; }
  /// Null where every state is in memory.
  store::DiskTier* disk() const { return disk_.get(); }
  HostLink& link() const { return link_; }
  /// Where the device tier lies.
  c10::Device device() const { return group_.device(); }
  c10::Device device_of(Tier tier) const { return link_.device_of(tier); }
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }

  // Cells. Master weights of fp32 parameters that have none of their own are the parameters.

  /// The column of a state by name, "master" or the optimizer's; none where the unit has no such.
  std::optional<State> find(int64_t unit, std::string_view name) const;
  /// The names that `find` knows of a unit, "master" first; none of a frozen unit.
  std::vector<std::string_view> names(int64_t unit) const;
  std::string_view name(int64_t unit, State state) const;
  /// Its own elements of a state: master weights and 8-bit states in fp32, others in their dtype.
  /// The memory itself where there is some; a copy where they lie on disk, in halves or in codes:
  /// after changes call `put`.
  at::Tensor read(int64_t unit, State state) const;
  /// The array of a cell as it is kept: of split master weights the lower halves, of 8-bit states
  /// the bytes of their blocks.
  at::Tensor read_kept(int64_t unit, State state) const;
  /// Puts what `read` gave, and the caller has changed, in its place.
  void put(int64_t unit, State state, const at::Tensor& values);
  /// Puts new values (1-D, all owned elements) in the place of a cell's. Hidden parameters follow.
  /// Of 8-bit states also their bytes as `read_kept` gives them; others are rounded to nearest.
  void replace(int64_t unit, State state, const at::Tensor& values);
  /// The memory of a cell: undefined where it has none, or none now.
  at::Tensor& memory(int64_t unit, State state) const;
  /// The number of a cell's array on disk; none where it is in memory.
  std::optional<int64_t> place_on_disk(int64_t unit, State state) const;

  // Parameters.

  /// All elements of a unit, where parameters are replicated (stages 0 to 2).
  const at::Tensor& whole(int64_t unit) const { return whole_[static_cast<size_t>(unit)]; }
  /// The shared array of stage 3 on one host; null elsewhere.
  comm::Window* window() const { return window_.get(); }
  /// Where a unit begins in it, bytes.
  int64_t window_offset(int64_t unit) const { return window_offset_[static_cast<size_t>(unit)]; }
  /// Writes the owned part of a parameter's full values (1-D, storage order, any dtype, in memory
  /// of tier `from`).
  void write_parameter(int64_t parameter, const at::Tensor& values, Tier from);
  /// A parameter as its unit's dtype has it, rounded as the update rounds it.
  at::Tensor narrowed(int64_t unit, const at::Tensor& parameter) const;
  /// Sets the owned master weights of `parameter` from its full values in storage order; where they
  /// are split, the parameters too.
  void set_master(int64_t parameter, const at::Tensor& values);
  /// After something else wrote the owned (low-precision) parameters: where the master no longer
  /// rounds to the parameter, takes the parameter. Elements that were not written keep the master's
  /// extra bits; where it is split, others too.
  void refresh_master(int64_t parameter);
  /// After all owned parameters of a unit were written elsewhere: hidden ones, from which an update
  /// starts, become the same. (The functions that set or refresh one parameter do so themselves.)
  void follow(int64_t unit);
  /// Shows the parameters of a unit, if it was updated since the last call, where updates leave
  /// them hidden. Nobody reads its parameters meanwhile.
  void show(int64_t unit);
  /// Takes an update that was not shown back, where the options say that this can be done.
  void undo(int64_t unit);
  /// Forgets what `show` would show.
  void forget_hidden();
  /// Blocks until new parameters have crossed between device and host.
  void settle() const { shown_.wait_on_host(); }

  // Blocks.

  /// Elements [begin, end) of a row, where the update finds them and leaves them.
  struct Block {
    int64_t begin = 0;
    int64_t end = 0;
    /// By column: the address of element `begin`. Parameters: where new ones go (null: the master
    /// is the parameter).
    std::array<std::byte*, kStates> at{};
    /// New parameters are all to be written: their place does not hold the old ones.
    bool fresh = false;
  };
  /// Passes the row of `unit` through `update` block by block; blocks on disk may come from several
  /// threads at once. `gradient`: its owned elements, or undefined where they lie on disk.
  /// With Weights::kept `update` leaves the weights as they are, and only writes what is fresh.
  enum class Weights : uint8_t { updated, kept };
  void for_each_block(int64_t unit, const at::Tensor& gradient,
                      const std::function<void(const Block&)>& update,
                      Weights weights = Weights::updated);

 private:
  void make_parameters(const Placement& placement, const Options& options);
  void make_optimizer(int64_t unit);
  void make_staging();
  bool is_staged(const UnitPlan& plan) const;
  at::Tensor zeros(Tier tier, int64_t numel, at::ScalarType dtype, Category category,
                   int64_t colour = 0) const;
  store::MemoryTier& memory_tier(Tier tier) const { return tier == Tier::host ? *host_ : *device_; }
  store::StateTier& tier(int64_t unit, State state) const;
  // The column that holds a state, and the number of its array there.
  State held_as(int64_t unit, State state) const;
  int64_t number(int64_t unit, State state) const;
  optim::Sign sign_of(int64_t unit, State state) const;
  void write(int64_t unit, State state, int64_t begin, const at::Tensor& values);
  void put_halves(int64_t unit, int64_t begin, const at::Tensor& values);
  void follow(int64_t unit, int64_t begin, int64_t numel);
  partition::Range owned_part(int64_t parameter) const;

  const partition::Layout& layout_;
  std::vector<UnitPlan> plans_;
  comm::Group& group_;
  std::shared_ptr<Ledger> ledger_;
  HostLink& link_;
  bool hides_;
  bool undoes_;
  std::unique_ptr<store::MemoryTier> device_;
  std::unique_ptr<store::MemoryTier> host_;
  std::unique_ptr<store::DiskTier> disk_;
  std::vector<at::Tensor> whole_;  // by unit; empty where parameters are sharded
  std::unique_ptr<comm::Window> window_;
  std::vector<int64_t> window_offset_;
  // By unit: where updates leave new parameters until `show`; undefined where they leave them in
  // their place, on disk, or in fp32 master weights apart. Between updates it equals the
  // parameters, as far as updates start from them: they do so here, where nothing that the user
  // writes meanwhile can get in.
  std::vector<at::Tensor> hidden_;
  std::vector<uint8_t> unshown_;  // by unit
  StreamMark shown_;              // copies of new parameters
  // Blocks of parameters on their way, which take turns; none without need.
  struct Staging {
    at::Tensor memory;
    StreamMark sent;
  };
  std::vector<Staging> staging_;
  size_t staged_ = 0;
};

}  // namespace zero
