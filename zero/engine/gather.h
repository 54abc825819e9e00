// The first flow: parameters from the table to where operators read them. Whole arrays on every
// rank (stages 0 to 2), whose owners publish what they updated; or slices (stage 3), which are
// gathered by the pager's plan, from the device, the host or a disk.
//
// Note [Parameters on the host]
// A slice in host memory goes up to the device for each gather, to its place in the full unit,
// where the group gathers the others'. The copy is enqueued before the gather; `settle` waits for
// it, before the slice is written. A window that the ranks of a host share is memory of the host: a
// device cannot read units in place there, so there is none.
//
// Note [Parameters on disk]
// A slice on disk comes through two levels (ZeRO-Infinity, 2104.07857, section 6.1): every rank
// reads its own slice, 1/N of the unit, so the disks of all hosts work for each unit; then the
// group gathers. The pager names the gathers to come (`expect`), so that the reads run ahead of the
// gathers, and the gathers ahead of the operators. A rank that is alone reads straight to where the
// unit is wanted, where that is memory of the host; a device gets what was read as in Note
// [Parameters on the host].
//
// Note [Quantised weights]
// Where units cross between hosts quantised (ZeRO++'s qwZ), what operators read is what the
// messages say, on the owner too, so that all ranks compute with the same weights. What the owner
// keeps stays whole: master weights, and the slice that the next gather quantises anew; so errors
// of the quantisation do not add up. `full` gives what is kept.
//
// Note [Kept on a host]
// ZeRO++'s hpZ (2306.10209, section 3.2): on several hosts each keeps all parameters from one
// update to the next. Its ranks do not keep a second partition to gather from, as there: the host
// has one array, which they read in place (comm::Window). So parameters cross between hosts once a
// step, however many micro-batches it has, and nothing is gathered inside. A unit that crosses
// quantised lies in the array as the messages say it; its slices are kept apart.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/comm/group.h"
#include "zero/device/stream.h"
#include "zero/engine/placement.h"
#include "zero/engine/state_table.h"
#include "zero/paging/pager.h"
#include "zero/partition/layout.h"

namespace zero {

class GatherFlow final : public paging::UnitSource {
 public:
  struct Options {
    int64_t live_bytes = 0;      ///< of gathered units, stage 3
    int64_t prefetch_bytes = 0;  ///< of those, gathered ahead of their use
    /// Bytes of slices that are read ahead of their gather; a larger one is read ahead alone.
    int64_t read_ahead_bytes = 0;
    /// Bytes of an ordinary unit's slice at most.
    int64_t slice_bytes = 0;
    /// Called before a slice on disk is read for a gather: completes its update. To be asked
    /// `beforehand`, it does not wait, and says whether the slice may be read.
    std::function<bool(int64_t unit, bool beforehand)> complete;
    /// As PagerOptions::rethrow.
    std::function<void()> rethrow{};
    /// Called on the thread of an operator that is about to use a unit, with the pager's lock held.
    std::function<void()> touched{};
  };

  /// `table` outlives this.
  GatherFlow(const partition::Layout& layout, StateTable& table, const Placement& placement,
             Options options);
  /// Collective where units are read in place, except while an exception unwinds.
  ~GatherFlow() override;

  /// Takes the values of parameter `index` (in the unit's dtype); the tensor's own memory is given
  /// up.
  void take(int64_t index, const at::Tensor& parameter);
  /// Makes what was taken visible to all; at stage 3 the parameters are paged from here on.
  /// Collective.
  void start(const std::vector<at::Tensor>& parameters);

  /// The owned parameters of `unit` have new values. Stage 0: nothing to do. Stages 1 and 2: the
  /// all-gather of the unit starts. Stage 3: readers may gather.
  void publish(int64_t unit);
  /// Waits for the all-gathers that `publish` started. Stage 3: they may go on beside the passes
  /// that need them.
  void finish_publish();
  /// Waits until none of this rank's slices is on its way any more: they may be written.
  void settle();

  /// The full unit, in its dtype: valid until the parameters change. At stage 3 gathers it, exact
  /// (never quantised). Collective where gathers are matched.
  at::Tensor full(int64_t unit);

  /// Null where parameters are replicated.
  paging::Pager* pager() { return pager_.get(); }

  void gather(int64_t unit, void* destination) override;
  void finish(int64_t unit) override;
  bool expect(int64_t unit) override;
  void touched(int64_t unit) override {
    group_.activity()->use(labels_[static_cast<size_t>(unit)]);
    if (options_.touched) options_.touched();
  }
  bool in_place() const override { return table_.window() != nullptr; }
  void* view(int64_t unit) override;
  /// The parameters change: forgets what was written to gathered units, and what was read ahead.
  void forget();

 private:
  // For slices that come from a disk.
  struct Buffer {
    at::Tensor memory;
    StreamMark sent;  // to the device, of the last one that it had
  };
  // A unit on its way.
  struct Fetch {
    Buffer buffer;  // where its slice comes from a disk
    store::Transfer read;
    comm::Work work;
  };

  bool on_disk(int64_t unit) const { return table_.transfer_bytes(unit, State::parameters) > 0; }
  // Slices are read to buffers, and not to where units are wanted.
  bool reads_to_buffers() const { return group_.size() > 1 || !table_.device().is_cpu(); }
  // The number of a unit's slice among its arrays on disk.
  int64_t place(int64_t unit) const { return *table_.place_on_disk(unit, State::parameters); }
  bool in_window(int64_t unit) const;
  std::pair<int64_t, int64_t> units_on_pages_of(int64_t unit) const;
  Buffer take_buffer(int64_t bytes);
  void start_read(int64_t unit);
  void drop(int64_t unit);
  void leave_ahead(int64_t unit);

  const partition::Layout& layout_;
  StateTable& table_;
  Placement placement_;
  comm::Group& group_;
  Options options_;
  bool reads_disk_ = false;          // some unit's parameters lie there
  StreamMark published_;             // on a device: the parameters as they are now
  at::Tensor view_;                  // of the window
  std::vector<at::Tensor> places_;   // of units in it
  std::vector<uint64_t> epoch_;      // by unit, the same on all ranks
  std::vector<std::string> labels_;  // of units, for errors
  std::vector<comm::Work> publishing_;
  std::mutex mutex_;             // of what follows: gathers of several units may run at once
  std::vector<Fetch> fetches_;   // by unit
  std::list<int64_t> ahead_;     // units that are read and not gathered yet, oldest first
  int64_t ahead_bytes_ = 0;      // of those
  std::vector<Buffer> buffers_;  // for slices; nobody uses them now
  StreamMark sent_up_;           // of slices in the host's memory
  std::unique_ptr<paging::Pager> pager_;
};

}  // namespace zero
