// Stage 3 with units that are gathered over the ranks as the pager asks for them.
//
// Note [Quantised weights]
// If units cross between hosts quantised (ZeRO++'s qwZ), operators read the values that the
// messages carry, even on the owner, so that all ranks compute with the same weights. The owner
// stores the exact values: master weights, and the slice that the next gather quantises anew. So
// errors of the quantisation do not add up. `full` gives the stored values.
#include <array>

#include "zero/device/memory.h"
#include "zero/device/stream.h"
#include "zero/engine/parameter_source.h"
#include "zero/engine/row_look_ups.h"

namespace zero {

namespace {

class SlicedUnits final : public PagedSource {
 public:
  SlicedUnits(const SourceParts& parts, DiskReads reads)
      : PagedSource(parts),
        reads_(reads),
        gathers_(static_cast<size_t>(layout().unit_count())),
        look_ups_(parts.table) {}

  paging::UnitSource* start(PendingUpdates& updates) override {
    updates_ = &updates;
    sources_ = {memory_slices(table()), disk_slices(table(), updates, reads_)};
    for (int64_t u = 0; u < layout().unit_count(); ++u) {
      const bool on_disk = table().transfer_bytes(u, State::parameters) > 0;
      any_on_disk_ = any_on_disk_ || on_disk;
      slices_.push_back(sources_[on_disk ? 1 : 0].get());
    }
    return this;
  }

  void publish(int64_t /*unit*/) override { published_.record(table().device()); }

  void settle() override {
    for (const auto& source : sources_) {
      if (source) source->settle();
    }
  }

  void forget() override {
    for (const auto& source : sources_) {
      if (source) source->forget();
    }
  }

  void prepare(int64_t unit) override { updates_->complete_before_read(unit); }

  void gather(int64_t unit, void* destination) override {
    const auto& plan = table().plan(unit);
    const int64_t numel = layout().slice_numel(unit);
    published_.wait();
    const auto output =
        tensor_at(destination, layout().unit(unit).numel, plan.dtype, table().device());
    at::Tensor slice;
    try {
      slice = slices(unit).bring(unit, output.narrow(0, numel * group().rank(), numel));
    } catch (...) {
      slices(unit).release(unit);
      throw;
    }
    if (!slice.defined()) return;
    gathers_[static_cast<size_t>(unit)] =
        group().all_gather(output, slice, label(unit), plan.parameter_link.wire());
  }

  void finish(int64_t unit) override {
    try {
      slices(unit).finish(unit);
      gathers_[static_cast<size_t>(unit)].wait();
    } catch (...) {
      release(unit);
      throw;
    }
    release(unit);
  }

  Asks asks(int64_t unit) const override { return look_ups_.asks(unit); }
  at::Tensor look_up(int64_t unit, const LookUp& mine) override {
    return look_ups_.look_up(unit, mine, [&] { updates_->complete_before_read(unit); });
  }
  void expect_look_ups(const std::vector<ExpectedLookUp>& expected) override {
    look_ups_.expect(expected);
  }
  std::vector<RowMessages> looked_up() const override { return look_ups_.of_last_step(); }

  // This rank's slice, where the gather sends it from memory, and to the others as it is.
  paging::UnitPart here(int64_t unit) override {
    const auto& plan = table().plan(unit);
    if (!table().device().is_cpu() || &slices(unit) != sources_[0].get() || plan.comes_up() ||
        plan.parameter_link.quantised())
      return {};
    return {layout().slice(unit, group().rank()), table().memory(unit, State::parameters)};
  }

  bool expect(int64_t unit) override { return any_on_disk_ && slices(unit).read_ahead(unit); }

 private:
  SliceSource& slices(int64_t unit) const { return *slices_[static_cast<size_t>(unit)]; }
  void release(int64_t unit) {
    gathers_[static_cast<size_t>(unit)] = {};
    slices(unit).release(unit);
  }

  DiskReads reads_;
  PendingUpdates* updates_ = nullptr;
  StreamMark published_;             // marks the end of the last writes to the parameters
  std::vector<comm::Work> gathers_;  // by unit
  RowLookUps look_ups_;
  std::array<std::unique_ptr<SliceSource>, 2> sources_;  // in memory and on the disk
  std::vector<SliceSource*> slices_;                     // by unit
  bool any_on_disk_ = false;
};

}  // namespace

std::unique_ptr<ParameterSource> sliced_units(const SourceParts& parts, DiskReads reads) {
  return std::make_unique<SlicedUnits>(parts, reads);
}

}  // namespace zero
