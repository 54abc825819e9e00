// The pager: keeps units present while operators use them, within a budget of live bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zero/base/ledger.h"
#include "zero/paging/page.h"
#include "zero/paging/trace.h"
#include "zero/partition/layout.h"

namespace zero::paging {

/// Where the bytes of a unit come from.
class UnitSource {
 public:
  virtual ~UnitSource() = default;
  /// Fills `destination` (unit(index).bytes()) with the full unit. Blocks. Called without the
  /// pager's lock, by one thread at a time for a given unit, by several for different ones.
  virtual void gather(int64_t unit, void* destination) = 0;
};

struct PagerOptions {
  /// Gathered bytes above which units that no operator uses are released, least recently used
  /// first. 0 releases a unit as soon as the operator that used it returns. Pinned units may exceed
  /// it.
  int64_t budget_bytes = 0;
  Category category = Category::gathered_units;
};

/// Counts since construction.
struct PagerCounts {
  int64_t touches = 0;  ///< units pinned by operators
  int64_t gathers = 0;  ///< of them, found absent
  int64_t gathered_bytes = 0;
};

class Pager {
 public:
  /// Takes over the storages of `parameters` (in the layout's order; each must own a storage of
  /// exactly its elements): their bytes are freed, so the source must already have them. `source`
  /// must outlive the pager.
  Pager(const partition::Layout& layout, std::vector<at::Tensor> parameters, UnitSource& source,
        std::shared_ptr<Ledger> ledger, PagerOptions options);
  /// Leaves the parameters absent; any use of one throws an error that says so.
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  /// Keeps a unit present. Move-only.
  class Pin {
   public:
    Pin() = default;
    Pin(Pager* pager, int64_t unit) : pager_(pager), unit_(unit) {}
    Pin(Pin&& other) noexcept;
    Pin& operator=(Pin&& other) noexcept;
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    ~Pin() { release(); }
    void release();

   private:
    Pager* pager_ = nullptr;
    int64_t unit_ = 0;
  };

  /// Makes `unit` present, gathering it if it is absent, and keeps it so. `touch` (what operators
  /// do) also records the trace.
  Pin pin(int64_t unit);
  Pin touch(int64_t unit);

  /// The bytes of a present unit, or null.
  void* data(int64_t unit) const;

  /// Marks a parameter as written through an operator: its unit stays present until `take_dirty`.
  void mark_dirty(const Page& page);
  /// The parameters written since the last call. Their units are present until `invalidate` or
  /// eviction after this call.
  std::vector<int64_t> take_dirty();

  /// Releases every unit that is not pinned. Its memory is kept for the next gathers.
  void release_all();
  /// The source has new bytes: like release_all, but throws Error naming a unit's first parameter
  /// if one is pinned.
  void invalidate();
  /// Ends a step of the trace.
  void end_step();

  const Trace& trace() const { return trace_; }
  PagerCounts counts() const;
  void set_budget(int64_t bytes);
  int64_t budget() const { return options_.budget_bytes; }
  /// Bytes of present units now.
  int64_t live_bytes() const;

  /// Throws Error naming a parameter whose storage was replaced (set_data, Module::to) since
  /// construction.
  void check_storages() const;

 private:
  enum class Presence : uint8_t { absent, gathering, present };
  struct UnitState {
    Presence presence = Presence::absent;
    int64_t pins = 0;
    int64_t dirty = 0;
    at::Tensor frame;
    std::list<int64_t>::iterator recency;  // valid while present
  };

  void acquire(std::unique_lock<std::mutex>& lock, int64_t unit);
  void unpin(int64_t unit);
  at::Tensor take_frame(int64_t bytes);
  void make_room(int64_t bytes);
  bool evict_one();
  void evict(int64_t unit);
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
  std::vector<UnitState> units_;
  std::list<int64_t> recency_;                      // least recently used first
  std::multimap<int64_t, at::Tensor> free_frames_;  // by bytes
  std::vector<int64_t> dirty_;
  int64_t live_ = 0;  // bytes of present and gathering units
  int64_t free_ = 0;  // bytes of free_frames_
  Trace trace_;
  PagerCounts counts_;
};

}  // namespace zero::paging
