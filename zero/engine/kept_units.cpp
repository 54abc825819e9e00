// Stage 3 with units that are gathered inside a host alone, over devices that keep all parameters.
//
// Note [Kept on devices]
// This is ZeRO++'s hpZ (2306.10209, section 3.2) as in the paper, for devices, which share no
// memory (on the CPU: Note [Kept on a host] in window_units.cpp). Each of several hosts keeps all
// parameters from one update to the next, each of its R devices an equal part of every unit:
// device r keeps the slices of the ranks (h, r) of all hosts h, side by side. To publish a unit the
// ranks at one place of all hosts gather their slices into that part, so parameters cross between
// hosts once a step, while the next forward pass runs, which waits only for a unit that has not
// arrived. To gather a unit the ranks of a host gather, for each h, the slices of the ranks of h,
// which lie side by side in the unit: as many gathers as there are hosts, and no copy.
// A rank's own slice lies in the part too, unless the unit crosses between hosts quantised: then
// the part has the values of the messages, as all hosts have, and the exact slice has memory of its
// own.
#include <exception>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/device/memory.h"
#include "zero/device/stream.h"
#include "zero/engine/parameter_source.h"

namespace zero {

namespace {

class KeptUnits final : public PagedSource {
 public:
  explicit KeptUnits(const SourceParts& parts)
      : PagedSource(parts),
        host_(*parts.placement.host),
        same_place_(*parts.placement.same_place),
        publishing_(static_cast<size_t>(layout().unit_count())),
        gathers_(static_cast<size_t>(layout().unit_count())) {}
  // Published slices still arrive in the table's memory. While an error unwinds this does not wait,
  // since some ranks may never come.
  ~KeptUnits() override {
    if (std::uncaught_exceptions() > 0) return;
    try {
      KeptUnits::settle();
    } catch (const CommError&) {  // a peer is gone
    }
  }

  paging::UnitSource* start(PendingUpdates& /*updates*/) override { return this; }

  void publish(int64_t unit) override {
    publishing_[static_cast<size_t>(unit)] =
        same_place_.all_gather(table().kept(unit), table().memory(unit, State::parameters),
                               label(unit), table().plan(unit).parameter_link.wire());
  }

  void settle() override {
    for (auto& work : publishing_) std::exchange(work, {}).wait();
    published_.record(table().device());
  }

  void gather(int64_t unit, void* destination) override {
    published_.wait();
    std::exchange(publishing_[static_cast<size_t>(unit)], {}).wait();
    const auto output = tensor_at(destination, layout().unit(unit).numel, table().plan(unit).dtype,
                                  table().device());
    const int64_t slice = layout().slice_numel(unit);
    const int64_t of_host = slice * host_.size();
    auto& works = gathers_[static_cast<size_t>(unit)];
    try {
      for (int64_t h = 0; h < same_place_.size(); ++h) {
        works.push_back(host_.all_gather(output.narrow(0, of_host * h, of_host),
                                         table().kept(unit).narrow(0, slice * h, slice),
                                         label(unit)));
      }
    } catch (...) {
      works.clear();
      throw;
    }
  }

  void finish(int64_t unit) override {
    for (auto& work : std::exchange(gathers_[static_cast<size_t>(unit)], {})) work.wait();
  }

 private:
  comm::Group& host_;
  comm::Group& same_place_;
  StreamMark published_;                          // marks the end of what `settle` waited for
  std::vector<comm::Work> publishing_;            // by unit
  std::vector<std::vector<comm::Work>> gathers_;  // by unit
};

}  // namespace

std::unique_ptr<ParameterSource> kept_units(const SourceParts& parts) {
  return std::make_unique<KeptUnits>(parts);
}

}  // namespace zero
