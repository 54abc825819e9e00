// Reads files that Engine::save wrote before checkpoints had a manifest: "libzero sharded states
// 1". The file of a rank has the elements that the rank owned, by unit, so it loads only at the
// same stage, ranks and unit size.
#include <ATen/ceil_div.h>
#include <fmt/format.h>

#include <memory>
#include <vector>

#include "zero/base/error.h"
#include "zero/engine/state_source.h"

namespace zero {

using partition::Range;

namespace {

TensorInfo cell_info(const StateTable& table, int64_t unit, State state) {
  const auto& plan = table.plan(unit);
  return {fmt::format("unit.{}.{}", unit, table.name(unit, state)),
          state == State::master ? at::kFloat : plan.dtype_of(state),
          {plan.entries(state, plan.owned.size())}};
}

class ShardSource final : public StateSource {
 public:
  ShardSource(const StateParts& parts, const std::filesystem::path& states,
              const std::filesystem::path& own, const std::filesystem::path& first)
      : parts_(parts) {
    if (!std::filesystem::exists(states)) {
      throw CheckpointError(
          fmt::format("'{}' does not exist, nor is there a manifest.json: an earlier version saved "
                      "at another number of ranks, or this is no checkpoint. What earlier versions "
                      "saved loads at the ranks that saved it; save it anew there.",
                      states.string()));
    }
    states_ = std::make_unique<StateFile>(states);
    with_buffers_ = std::make_unique<StateFile>(own);
    const auto buffers = parts.model.plain_buffers();
    for (const auto& [name, buffer] : buffers) buffers_.push_back(buffer_key(name));
    if (!buffers_.empty() && !with_buffers_->reader().contains(buffers_.front()))
      with_buffers_ = std::make_unique<StateFile>(first);
    states_->expect("format", "libzero sharded states 1");
    for (const auto& [key, value] : description(parts)) states_->expect(key, value);
    states_->expect_shapes(parts.model);
    for (int64_t u = 0; u < parts.layout.unit_count(); ++u) {
      for (const auto state : cell_states(parts.table.plan(u)))
        states_->expect_tensor(cell_info(parts.table, u, state));
    }
    for (const auto& info : factored_infos(parts)) states_->expect_tensor(info);
    for (size_t i = 0; i < buffers.size(); ++i)
      with_buffers_->expect_values(buffers_[i], buffers[i].second);
  }

  Progress progress() const override { return states_->progress(parts_); }

  bool has(int64_t /*parameter*/, State /*moment*/) const override { return true; }

  at::Tensor read(int64_t parameter, State state, Range elements) const override {
    const int64_t u = parts_.layout.unit_of(parameter);
    const auto& plan = parts_.table.plan(u);
    if (state == State::master && (plan.dtype == at::kFloat || plan.narrow))
      state = State::parameters;
    // These turn elements of the parameter into elements of the cell, and those into its entries.
    const int64_t first = parts_.layout.segment_of(parameter).offset - plan.owned.begin;
    if (plan.is_coded(state))
      elements.end = elements.begin + at::round_up(elements.size(), optim::kCodedBlock);
    const int64_t begin = plan.entries(state, first + elements.begin);
    return states_->reader().read(cell_info(parts_.table, u, state).name, begin,
                                  plan.entries(state, first + elements.end) - begin);
  }

  at::Tensor factored(int64_t parameter, std::string_view state) const override {
    return states_->reader().read(state_key(state, parts_.model.name(parameter)));
  }

  at::Tensor buffer(size_t index) const override {
    return with_buffers_->reader().read(buffers_[index]);
  }

 private:
  StateParts parts_;
  std::unique_ptr<StateFile> states_;
  std::unique_ptr<StateFile> with_buffers_;
  std::vector<std::string> buffers_;  // their keys
};

}  // namespace

std::unique_ptr<StateSource> open_shards(const StateParts& parts,
                                         const std::filesystem::path& folder, int owner, int rank,
                                         int ranks) {
  const auto file = [&](int of) { return folder / shard_name(of, ranks); };
  return std::make_unique<ShardSource>(parts, file(owner), file(rank), file(0));
}

}  // namespace zero
