// Parameters: one flat array a unit on every rank (stages 0 to 2), or one slice a unit (stage 3).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/comm/group.h"
#include "zero/paging/pager.h"
#include "zero/partition/formulas.h"
#include "zero/partition/layout.h"

namespace zero {

class ParameterStore final : public paging::UnitSource {
 public:
  struct Options {
    partition::Placement placement;
    int64_t live_bytes = 0;      ///< of gathered units, stage 3
    int64_t prefetch_bytes = 0;  ///< of those, gathered ahead of their use
    bool one_sided = true;
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

  /// The elements of a unit that this rank updates: all of them at stage 0, its slice from stage 1
  /// on.
  partition::Range owned_range(int64_t unit) const;
  /// Those elements, in the parameter's dtype, to be written between the peers' agreement that
  /// nobody reads them and `publish`.
  const at::Tensor& owned(int64_t unit) const { return owned_[static_cast<size_t>(unit)]; }
  at::ScalarType dtype(int64_t unit) const { return dtypes_[static_cast<size_t>(unit)]; }

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

  comm::Work gather(int64_t unit, void* destination) override;
  bool in_place() const override { return window_ != nullptr; }
  void* view(int64_t unit) override;
  /// Forgets what was written to gathered units.
  void discard_writes();

 private:
  const partition::Layout& layout_;
  std::vector<at::ScalarType> dtypes_;
  comm::Group& group_;
  Options options_;
  std::unique_ptr<comm::Window> window_;  // stage 3 on one host: all slices of a unit side by side
  at::Tensor view_;                       // of the window
  std::vector<int64_t> window_offset_;    // bytes, by unit
  std::vector<uint64_t> epoch_;           // by unit, the same on all ranks
  std::vector<at::Tensor> units_;         // replicated arrays
  std::vector<at::Tensor> owned_;
  std::vector<std::string> labels_;  // of units, for errors
  std::vector<comm::Work> publishing_;
  std::unique_ptr<paging::Pager> pager_;
};

}  // namespace zero
