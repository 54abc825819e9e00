// Stage 3 with units that are gathered over the ranks as the pager asks for them.
//
// Note [Quantised weights]
// Where units cross between hosts quantised (ZeRO++'s qwZ), operators read the values that the
// messages carry, on the owner too, so that all ranks compute with the same weights. The owner
// stores them whole: master weights, and the slice that the next gather quantises anew. So errors
// of the quantisation do not add up. `full` gives the stored values.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "zero/engine/disk_slices.h"
#include "zero/engine/parameter_source.h"
#include "zero/engine/slice_source.h"

namespace zero {

class SlicedUnits final : public PagedSource {
 public:
  /// As PagedSource; `disk` is for slices that lie there.
  SlicedUnits(const partition::Layout& layout, StateTable& table, const Placement& placement,
              std::function<void()> touched, BufferedSlices::Options disk);

  paging::UnitSource* start(LateUpdates& updates) override;
  void publish(int64_t /*unit*/) override { published_.record(table().device()); }
  void settle() override;
  void forget() override;

  void gather(int64_t unit, void* destination) override;
  void finish(int64_t unit) override;
  bool expect(int64_t unit) override;

 private:
  SliceSource& slices(int64_t unit) const { return *slices_[static_cast<size_t>(unit)]; }
  void release(int64_t unit);

  BufferedSlices::Options disk_;
  StreamMark published_;                               // behind the writes of the parameters of now
  std::vector<comm::Work> gathers_;                    // by unit
  std::vector<std::unique_ptr<SliceSource>> sources_;  // one for each tier that a slice lies on
  std::vector<SliceSource*> slices_;                   // by unit
  bool reads_ahead_ = false;
};

}  // namespace zero
