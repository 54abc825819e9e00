// Parameters that every rank has whole (stages 0 to 2).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "zero/engine/parameter_source.h"

namespace zero {

class WholeUnits final : public ParameterSource {
 public:
  /// `layout` and `table` outlive this.
  WholeUnits(const partition::Layout& layout, StateTable& table, const Placement& placement);

  /// The tensor keeps its identity; its storage points into the unit from now on.
  void take(int64_t index, const at::Tensor& parameter) override;
  paging::UnitSource* start(LateUpdates& /*updates*/) override { return nullptr; }
  /// Starts the all-gather of the unit, where each rank updates a slice of it (stages 1 and 2).
  void publish(int64_t unit) override;
  void finish_publish() override;
  at::Tensor full(int64_t unit) override { return table_.whole(unit); }

 private:
  const partition::Layout& layout_;
  StateTable& table_;
  comm::Group& group_;
  bool gathers_;
  std::vector<std::string> labels_;  // by unit
  std::vector<comm::Work> publishing_;
};

}  // namespace zero
