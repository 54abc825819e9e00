// Parameters: one flat array a unit on every rank (stages 0 to 2), or one slice a unit (stage 3),
// on the device, in host memory or on disk.
//
// Note [Parameters on the host]
// A slice in host memory goes up to the device for each gather, to its place in the full unit,
// where the group gathers the others'. A window that the ranks of a host share is memory of the
// host: a device cannot read units in place there, so there is none.
//
// Note [Parameters on disk]
// A slice on disk comes through two levels (ZeRO-Infinity, 2104.07857, section 6.1): every rank
// reads its own slice, 1/N of the unit, so the disks of all hosts work for each unit; then the
// group gathers. The pager names the gathers to come (`expect`), so that the reads run ahead of the
// gathers, and the gathers ahead of the operators. A rank that is alone reads straight to where the
// unit is wanted.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/state_stream.h"
#include "zero/paging/pager.h"
#include "zero/partition/formulas.h"
#include "zero/partition/layout.h"
#include "zero/store/tier.h"

namespace zero {

class ParameterStore final : public paging::UnitSource {
 public:
  struct Options {
    partition::Placement placement;
    int64_t live_bytes = 0;      ///< of gathered units, stage 3
    int64_t prefetch_bytes = 0;  ///< of those, gathered ahead of their use
    bool one_sided = true;
    /// Where each unit's slice lies, if not all on the device; stage 3.
    std::vector<Tier> tiers;
    /// Where those on disk lie, as array 0. Outlives this.
    StateStream* disk = nullptr;
    /// Where set, called before a slice on disk is read for a gather: completes its update. To be
    /// asked `beforehand`, it does not wait, and says whether the slice may be read.
    std::function<bool(int64_t unit, bool beforehand)> complete = {};
    /// The way to those on the host. Outlives this.
    HostLink* host = nullptr;
    /// Bytes of slices that are read ahead of their gather; a larger one is read ahead alone.
    int64_t read_ahead_bytes = 0;
    /// Bytes of an ordinary unit's slice at most.
    int64_t slice_bytes = 0;
  };

  /// Collective. `dtypes` has one dtype a unit.
  ParameterStore(const partition::Layout& layout, std::vector<at::ScalarType> dtypes,
                 comm::Group& group, Options options);
  ~ParameterStore() override;

  /// Takes the values of parameter `index` (in the unit's dtype); the tensor's own memory is given
  /// up.
  void take(int64_t index, const at::Tensor& parameter);
  /// Makes what was taken visible to all; at stage 3 the parameters are paged from here on.
  /// Collective.
  void start(const std::vector<at::Tensor>& parameters);

  /// The elements of a unit that this rank updates (all of them at stage 0, its slice from stage 1
  /// on), in the parameter's dtype. In memory, to be written between the peers'
  /// agreement that nobody reads them and `publish`; a copy where they lie on disk.
  at::Tensor owned(int64_t unit) const;
  /// Writes the owned part of a parameter's full values (storage order), under the same condition.
  void write(int64_t index, const at::Tensor& values);
  /// The same for all owned elements of a unit.
  void replace(int64_t unit, const at::Tensor& values);
  at::ScalarType dtype(int64_t unit) const { return dtypes_[static_cast<size_t>(unit)]; }
  Tier tier(int64_t unit) const {
    return options_.tiers.empty() ? Tier::device : options_.tiers[static_cast<size_t>(unit)];
  }
  bool on_disk(int64_t unit) const { return tier(unit) == Tier::disk; }

  /// `owned(unit)` has new values. Stage 0: nothing to do. Stages 1 and 2: the all-gather of the
  /// unit starts. Stage 3: readers may gather.
  void publish(int64_t unit);
  /// Waits for the all-gathers that `publish` started.
  void finish_publish();

  /// The full unit, in its dtype: valid until the parameters change. At stage 3 gathers it.
  /// Collective where gathers are matched.
  at::Tensor full(int64_t unit);

  /// Null where parameters are replicated.
  paging::Pager* pager() { return pager_.get(); }

  void gather(int64_t unit, void* destination) override;
  void finish(int64_t unit) override;
  bool expect(int64_t unit) override;
  bool in_place() const override { return window_ != nullptr; }
  void* view(int64_t unit) override;
  /// The parameters change: forgets what was written to gathered units, and what was read ahead.
  void forget();

 private:
  partition::Range owned_range(int64_t unit) const;

  // A unit on its way.
  struct Fetch {
    at::Tensor slice;  // where it comes from a disk, for the group to gather
    store::Transfer read;
    comm::Work work;
  };

  at::Tensor take_buffer(int64_t bytes);
  void start_read(int64_t unit);
  void drop(int64_t unit);
  void leave_ahead(int64_t unit);

  const partition::Layout& layout_;
  std::vector<at::ScalarType> dtypes_;
  comm::Group& group_;
  Options options_;
  std::unique_ptr<comm::Window> window_;  // stage 3 on one host: all slices of a unit side by side
  at::Tensor view_;                       // of the window
  std::vector<int64_t> window_offset_;    // bytes, by unit
  std::vector<uint64_t> epoch_;           // by unit, the same on all ranks
  std::vector<at::Tensor> units_;         // replicated arrays
  std::vector<at::Tensor> owned_;         // undefined on disk
  std::vector<std::string> labels_;       // of units, for errors
  std::vector<comm::Work> publishing_;
  std::mutex mutex_;                 // of what follows: gathers of several units may run at once
  std::vector<Fetch> fetches_;       // by unit
  std::list<int64_t> ahead_;         // units that are read and not gathered yet, oldest first
  int64_t ahead_bytes_ = 0;          // of those
  std::vector<at::Tensor> buffers_;  // for slices; nobody uses them now
  std::unique_ptr<paging::Pager> pager_;
};

}  // namespace zero
