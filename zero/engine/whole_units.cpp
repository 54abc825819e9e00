// Parameters that every rank has whole (stages 0 to 2).
#include "zero/engine/flat.h"
#include "zero/engine/parameter_source.h"

namespace zero {

namespace {

class WholeUnits final : public ParameterSource {
 public:
  explicit WholeUnits(const SourceParts& parts)
      : table_(parts.table), gathers_(parts.placement.sharded.optimizer) {}

  // The tensor keeps its identity. Its storage points into the unit from now on, which lives as
  // long as anything that uses the storage.
  void take(int64_t index, const at::Tensor& parameter, bool has_values) override {
    const auto& unit = table_.whole(table_.layout().unit_of(index));
    const auto& segment = table_.layout().segment_of(index);
    auto place = unit.narrow(0, segment.offset, segment.numel);
    if (has_values) place.copy_(flat_view(parameter));
    check_memory_of(parameter);
    void* data = place.numel() > 0 ? place.data_ptr() : nullptr;
    parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(
        data, new at::Tensor(unit), [](void* held) { delete static_cast<at::Tensor*>(held); },
        parameter.device()));
  }

  paging::UnitSource* start(PendingUpdates& /*updates*/) override { return nullptr; }

  // Each rank updates a slice of the unit at stages 1 and 2, and all of it at stage 0.
  void publish(int64_t unit) override {
    if (!gathers_) return;
    publishing_.push_back(
        table_.group().all_gather(table_.whole(unit), table_.memory(unit, State::parameters),
                                  table_.label(unit), table_.plan(unit).parameter_link.wire()));
  }

  void finish_publish() override {
    for (auto& work : publishing_) work.wait();
    publishing_.clear();
  }

  at::Tensor full(int64_t unit) override { return table_.whole(unit); }

 private:
  StateTable& table_;
  bool gathers_;
  std::vector<comm::Work> publishing_;
};

}  // namespace

std::unique_ptr<ParameterSource> whole_units(const SourceParts& parts) {
  return std::make_unique<WholeUnits>(parts);
}

}  // namespace zero
