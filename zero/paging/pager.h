// The pager: keeps units present while operators use them, within a budget of live bytes.
//
// Note [Following the plan]
// A step begins with the first touch whose result has a gradient, or in a backward pass, and ends
// with the update. Evaluation between steps is not part of it. (Within a step gradients may be off:
// a custom autograd function runs its forward so, and recomputation its first run. Such a first run
// counts as one whose result has a gradient.) The pager compares the touches of a step with the
// steps before. While they repeat a known step, that step's plan (plan.h) says which units stay,
// which are released after each operator and which are gathered ahead. All of this goes by the
// position in the trace, never by timing, so that every rank gathers in the same order. At a touch
// that leaves the trace the pager looks for another known step that began the same way (an
// alternating model, another sequence length). If there is none, the rest of the step is served on
// demand, the least recently used unit is released first, and the step is planned when it ends.
// Touches of evaluation are served on demand too and change no plan. Every choice is correct; plans
// only save bytes.
//
// Note [Gathers that ranks agree on]
// Ranks may agree on the gather of a unit before it starts (UnitSource::asks): if all look some of
// its rows up, the source brings these rows alone. Every rank must still issue the same collectives
// in the same order. So:
//   1. The agreement takes the place of a gather. A rank agrees where it would gather the unit:
//      not where the unit is present, and always where it is absent, whoever wants it (an operator,
//      a scope, evaluation). If a rank needs all of the unit, all ranks gather it at once.
//   2. Ranks agree on a unit before they gather what is used behind it, with a plan or without. So
//      no plan gathers such a unit ahead of its use, nor a unit that is used behind it. A look-up
//      by rows is an operator of the trace that pins no unit, and a plan gathers nothing ahead of
//      it.
//   3. With its rows a rank tells which units its plan gathers next. If that is the same on all
//      ranks, the first of these gathers start before the rows are sent: while each rank brings
//      its slice of the weight up to date, the link would stand still.
// A unit may be asked for at each gather (Asks::always), since no operator but look-ups uses it.
// Then the ranks look it up as often as they would gather it. Or it may be asked for once in a
// step, and all of it is used later, by the output projection. There a rank may leave its plan:
//   4. The order of rule 3 then has all units up to this one, each once, all within the budget. If
//   it
//      is the same on all ranks, they gather these units in this order (`owed_`), even a rank that
//      leaves its plan: it first gathers those that come before the one that it needs. `start_owed`
//      gathers the rest, before any other collective of the engine: a rank may compute no more than
//      a part of its model, or throw.
//   5. After an agreement no plan evicts the unit in forward (`agreed_`): a rank that makes one
//      more forward pass would gather it again, and the others would not. The unit goes when
//      backward has used it, when a budget needs its place, or with the step.
//
// Note [Frames on a device]
// On a device units are gathered on a stream of the pager's own, into frames that are used again
// and again. The first operator of a stream that uses a unit makes its stream wait for the gather.
// The next gather into the frame waits for the last operators of the frame's old unit. So gathers
// run beside operators, and the host waits for neither. Free frames count within the budget.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "zero/base/ledger.h"
#include "zero/device/memory.h"
#include "zero/device/stream.h"
#include "zero/paging/page.h"
#include "zero/paging/plan.h"
#include "zero/partition/layout.h"

namespace zero::paging {

/// A part of a unit.
struct UnitPart {
  partition::Range elements{};  ///< counted from the unit's first
  at::Tensor values{};          ///< 1-D, in the unit's dtype; undefined: there is no such part
};

/// The source of the bytes of a unit. It is called without the pager's lock, by one thread at a
/// time for a given unit, and by several for different units.
class UnitSource {
 public:
  virtual ~UnitSource() = default;
  /// Called before `gather`, and before the memory for it is taken. Brings this rank's part of the
  /// unit up to date, which needs no other rank.
  virtual void prepare(int64_t /*unit*/) {}
  /// Starts to fill `destination` with the full unit. It has room for unit(index).bytes() (on the
  /// CPU rounded up to a page, and it begins on a page), and lives until `finish` has returned or
  /// thrown. On a device the gather must use this thread's current stream.
  virtual void gather(int64_t unit, void* destination) = 0;
  /// Blocks until the gather of `unit` is done. Called once for each gather, even if nobody needs
  /// its result any more. On a device it makes the current stream wait for it, not the host.
  virtual void finish(int64_t unit) = 0;
  /// Returns the part of a unit that can be read while its gather is under way, with the bits that
  /// the gathered unit will have there. It is valid until the source's bytes change.
  virtual UnitPart here(int64_t /*unit*/) { return {}; }
  /// Tells when ranks agree (`look_up`) before they gather a unit: Note [Gathers that ranks agree
  /// on].
  enum class Asks : uint8_t {
    never,
    once,   ///< at the next gather; the unit is gathered later
    always  ///< at each gather
  };
  /// Returns it for a unit, the same on all ranks.
  virtual Asks asks(int64_t /*unit*/) const { return Asks::never; }
  /// A look-up in the weight that is all of a unit.
  struct LookUp {
    at::Tensor indices{};  ///< the rows; undefined: it is another use, which needs the unit
    uint64_t order = 0;    ///< a number of the units that the rank gathers behind it, in order
    /// Starts the first gathers of that order.
    std::function<void()> meanwhile{};
  };
  /// Agrees with the other ranks on a unit that they ask for. If all ranks look up, it returns the
  /// rows. If their orders are the same, it calls `meanwhile` before; a unit that is asked for once
  /// needs that. Otherwise it returns an undefined tensor, and all ranks gather the unit
  /// now. Collective.
  virtual at::Tensor look_up(int64_t /*unit*/, const LookUp& /*mine*/) { return {}; }
  /// Says that `unit` will be gathered after the units that were named before. A source with a slow
  /// tier may then begin to fetch its part. Returns false if it can take no more now. Called with
  /// the pager's lock held, so it must not wait for other ranks.
  virtual bool expect(int64_t /*unit*/) { return false; }
  /// Says that an operator is about to use `unit`, which an exception refuses. Called often, with
  /// the pager's lock held.
  virtual void touched(int64_t /*unit*/) {}
  /// Returns whether full units lie in memory that this rank can read. Then `view` is called, and
  /// `gather` never.
  virtual bool in_place() const { return false; }
  /// Blocks until the unit is valid. Returns its bytes, which stay where they are as long as the
  /// source lives. Only this rank sees its own writes there.
  virtual void* view(int64_t /*unit*/) { return nullptr; }
};

struct PagerOptions {
  /// The device on which the parameters lie.
  c10::Device device{c10::kCPU};
  /// The limit of gathered bytes. Above it, units that no operator uses are released, least
  /// recently used first. 0 releases a unit as soon as the operator that used it returns. Pinned
  /// units may exceed the limit.
  int64_t budget_bytes = 0;
  /// Bytes that may be gathered ahead of their use, within the budget.
  int64_t prefetch_bytes = 0;
  Category category = Category::gathered_units;
  /// Called in the handler of an exception that a touch throws. It may throw another exception
  /// instead. If it is null, the exception leaves unchanged.
  std::function<void()> rethrow{};
  /// The longest time that parameters which are about to change wait for other threads that read
  /// them.
  std::chrono::milliseconds patience{60000};
};

/// Counts since construction.
struct PagerCounts {
  int64_t touches = 0;  ///< units pinned by operators
  int64_t gathers = 0;  ///< units that were absent, or were gathered ahead
  int64_t gathered_bytes = 0;
  int64_t early_rows = 0;  ///< rows of weights that were used while others were on their way
};

class Pager {
 public:
  /// Takes over the storages of `parameters` (in the layout's order; each must own a storage of
  /// exactly its elements). It frees their bytes, so the source must already have them. `source`
  /// must outlive the pager.
  Pager(const partition::Layout& layout, std::vector<at::Tensor> parameters, UnitSource& source,
        std::shared_ptr<Ledger> ledger, PagerOptions options);
  /// Leaves the parameters absent; any use of one throws an error that says so.
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  /// Keeps units present while it lives. It can be moved but not copied.
  class Pin {
   public:
    Pin() = default;
    Pin(Pin&& other) noexcept;
    Pin& operator=(Pin&& other) noexcept;
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    ~Pin() { release(); }
    void release();

   private:
    friend class Pager;
    using Units = c10::SmallVector<int64_t, 4>;
    Pin(Pager* pager, Units units, size_t position)
        : pager_(pager), units_(std::move(units)), position_(position) {}
    Pager* pager_ = nullptr;
    Units units_;
    size_t position_ = 0;  // the operator's position in the trace, or Plan::kNever
    std::thread::id thread_ = std::this_thread::get_id();  // the thread that made it
  };

  /// Makes `unit` present, gathering it if it is absent, and keeps it so.
  Pin pin(int64_t unit);
  /// Does the same for the distinct units of one operator. `differentiable` says that gradients are
  /// on, or that the operator runs in a backward pass.
  Pin touch(std::span<const int64_t> units, bool differentiable);
  /// Takes the part of a unit that is here, and returns how many rows of a weight it used.
  using UsePart = std::function<int64_t(const UnitPart& part)>;
  /// Does the same for one unit. If its gather is under way, or begins now, `early` is called
  /// before anybody waits for it, with the part that the source has (UnitSource::here), if it has
  /// one.
  Pin touch(int64_t unit, bool differentiable, const UsePart& early);

  /// Returns rows of the weight that is all of `unit` if the source brings them alone; otherwise an
  /// undefined tensor, and the weight is to be read (UnitSource::look_up). `differentiable` is that
  /// of `touch`.
  at::Tensor look_up(int64_t unit, const at::Tensor& indices, bool differentiable);
  /// Starts the gathers that the other ranks count on. To be called before other collectives.
  void start_owed();

  /// Returns the parameter whose bytes the page has, in its shape; they may be absent.
  const at::Tensor& parameter(const Page& page) const {
    return parameters_[static_cast<size_t>(page.parameter)];
  }
  /// Returns the bytes of a present unit, or null.
  void* data(int64_t unit) const;

  /// Marks a parameter as written through an operator: its unit stays present until `take_dirty`.
  void mark_dirty(const Page& page);
  /// Returns the parameters that were written since the last call. After this call their units stay
  /// present only until `invalidate` or eviction.
  std::vector<int64_t> take_dirty();
  /// Returns the same parameters, which stay marked as written.
  std::vector<int64_t> dirty() const;

  /// Returns whether something keeps the unit present: an operator under way, or a scope.
  bool pinned(int64_t unit) const;
  /// Releases every unit that is not pinned. Its memory is kept for the next gathers.
  void release_all();
  /// After this call, work that this thread enqueues may write the source's bytes: on a device that
  /// work runs after all gathers.
  void settle_gathers();
  /// While a Change lives, the source's bytes may change, on other ranks too, and other threads
  /// that want a unit wait. It begins when no unit is pinned: the constructor waits for operators
  /// and scopes of other threads, which may pin more units until they end. It throws Error, which
  /// names a unit's first parameter, if one of them has not ended after PagerOptions::patience, or
  /// if this thread pins the unit.
  class Change {
   public:
    explicit Change(Pager& pager);
    ~Change();
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

   private:
    Pager& pager_;
    bool outermost_;
  };
  /// Releases every unit, since the source has new bytes. Throws as `Change` does.
  void invalidate();
  /// Ends a step of the trace, and plans it if it is new.
  void end_step();

  /// Returns the plan of the last complete step; null before the first has ended. Valid until the
  /// next end_step or set_budget.
  const Plan* plan() const { return plans_.empty() ? nullptr : plans_.front().get(); }
  /// Returns whether the step under way has followed a plan so far.
  bool following() const { return following_ != nullptr; }
  PagerCounts counts() const;
  /// Returns how many operators of the current step have run so far. Takes no lock, so the source
  /// may ask.
  size_t position() const { return position_.load(std::memory_order_relaxed); }
  void set_budget(int64_t bytes);
  /// Sets how many bytes are gathered ahead of their use (PagerOptions::prefetch_bytes). Known
  /// steps are planned again.
  void set_prefetch(int64_t bytes);
  int64_t prefetch() const { return options_.prefetch_bytes; }
  int64_t budget() const { return options_.budget_bytes; }
  /// Returns the bytes of present units now.
  int64_t live_bytes() const;

  /// Throws Error, which names a parameter whose storage was replaced (set_data, Module::to) since
  /// construction.
  void check_storages() const;

 private:
  enum class Presence : uint8_t {
    absent,
    started,    // being gathered ahead; nobody waits for it yet
    gathering,  // a thread starts it or waits for it
    present
  };
  struct UnitState {
    Presence presence = Presence::absent;
    c10::SmallVector<std::thread::id, 2> pins;  // the threads that made its pins
    int64_t dirty = 0;
    StreamMemory frame;                      // memory of the unit, if the source is not in place
    StreamMark gathered;                     // on a device, the end of the gather
    c10::SmallVector<c10::Stream, 2> users;  // the streams that wait for `gathered` already
    void* data = nullptr;                    // while present
    size_t next_use = Plan::kNever;          // by the plan that the step follows
    std::list<int64_t>::iterator recency;    // valid while present
  };

  Pin touched(std::span<const int64_t> units, bool differentiable, const UsePart& early);
  std::vector<int64_t> gathers_behind(int64_t unit) const;
  int64_t meanwhile_bytes(int64_t unit) const;
  at::Tensor agree(std::unique_lock<std::mutex>& lock, int64_t unit, const at::Tensor& indices,
                   const std::vector<int64_t>& order);
  void add_pin(std::unique_lock<std::mutex>& lock, int64_t unit);
  void drop_pin(UnitState& state, std::thread::id thread);
  void acquire_early(std::unique_lock<std::mutex>& lock, int64_t unit, const UsePart& early);
  void acquire(std::unique_lock<std::mutex>& lock, int64_t unit);
  void start(std::unique_lock<std::mutex>& lock, int64_t unit);
  void start_agreed(std::unique_lock<std::mutex>& lock, int64_t unit);
  void start_owed(std::unique_lock<std::mutex>& lock, int64_t until);
  void gather(std::unique_lock<std::mutex>& lock, int64_t unit);
  void complete(std::unique_lock<std::mutex>& lock, int64_t unit);
  void give_up(int64_t unit);
  void order_after_gather(UnitState& state) const;
  StreamMemory take_frame(int64_t bytes);
  void give_frame(UnitState& state);
  void drop_oldest_frame();
  size_t advance(std::unique_lock<std::mutex>& lock, std::span<const int64_t> units);
  bool choose_plan();
  void forecast(size_t position);
  void tell_source();
  std::unique_ptr<Plan> make(Trace trace) const;
  void make_plans();
  void unpin(std::span<const int64_t> units, size_t position, std::thread::id thread);
  void await_unpinned(std::unique_lock<std::mutex>& lock);
  bool holds(std::thread::id thread) const;
  void make_room(int64_t bytes);
  bool evict_one();
  void evict(int64_t unit);
  void evict_all();
  UnitState& state(int64_t unit) { return units_[static_cast<size_t>(unit)]; }
  const UnitState& state(int64_t unit) const { return units_[static_cast<size_t>(unit)]; }

  const partition::Layout& layout_;
  std::vector<at::Tensor> parameters_;
  UnitSource& source_;
  std::shared_ptr<Ledger> ledger_;
  PagerOptions options_;
  std::vector<c10::Storage> storages_;  // kept even if a parameter's storage is replaced
  std::vector<Page> pages_;
  mutable std::mutex mutex_;
  std::condition_variable gathered_;
  std::condition_variable unpinned_;
  std::condition_variable changed_;
  std::optional<std::thread::id> changes_;  // the thread that has a Change
  std::optional<c10::Stream> side_;         // the stream of gathers; none on the CPU
  std::vector<UnitState> units_;
  std::deque<StreamMemory> free_frames_;  // frames of a device, the oldest first
  int64_t free_bytes_ = 0;                // bytes of `free_frames_`
  std::atomic<bool> unsettled_ = false;   // there were gathers since `settle_gathers`
  StreamMark gathers_;                    // marks the gathers when the side stream is waited for
  std::list<int64_t> recency_;            // least recently used first
  std::vector<int64_t> dirty_;
  int64_t live_ = 0;          // bytes of present and gathering units
  std::deque<int64_t> owed_;  // all ranks gather these next, in this order
  int64_t agreed_ = -1;       // this step's ranks have agreed on a gather of this unit; -1: none
  bool in_step_ = false;
  Trace trace_;                               // the trace of the step under way
  std::atomic<size_t> position_ = 0;          // the number of its operators so far
  std::vector<std::unique_ptr<Plan>> plans_;  // the known steps' plans, the last one first
  const Plan* following_ = nullptr;           // one of `plans_`
  size_t next_gather_ = 0;                    // index into following_->gathers
  size_t next_expected_ = 0;                  // index of the first gather that the source
                                              // does not know
  PagerCounts counts_;
};

}  // namespace zero::paging
