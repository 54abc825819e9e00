#include "zero/engine/state_source.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/engine/flat.h"

namespace zero {

using partition::Range;

namespace {

class ShardSource final : public StateSource {
 public:
  ShardSource(const StateParts& parts, const std::filesystem::path& states,
              const std::filesystem::path& own, const std::filesystem::path& first)
      : parts_(parts) {
    if (!std::filesystem::exists(states)) {
      throw CheckpointError(
          fmt::format("'{}' does not exist. Engine::load resumes at the number of ranks that "
                      "saved; Engine::save_full and load_full change it.",
                      states.string()));
    }
    states_ = std::make_unique<StateFile>(states);
    with_buffers_ = std::make_unique<StateFile>(own);
    const auto buffers = parts.model.plain_buffers();
    for (const auto& [name, buffer] : buffers) buffers_.push_back(buffer_key(name));
    if (!buffers_.empty() && !with_buffers_->reader().contains(buffers_.front()))
      with_buffers_ = std::make_unique<StateFile>(first);
    states_->expect_format(kShardedStates);
    for (const auto& [key, value] : description(parts)) states_->expect(key, value);
    states_->expect_shapes(parts.model);
    for (int64_t u = 0; u < parts.layout.unit_count(); ++u) {
      for (const auto state : cell_states(parts.table.plan(u)))
        states_->expect_tensor(cell_info(parts.table, u, state));
    }
    for (const auto& [key, values] : factored_by_key(parts))
      states_->expect_tensor(info_of(key, values));
    for (size_t i = 0; i < buffers.size(); ++i)
      with_buffers_->expect_values(buffers_[i], buffers[i].second);
  }

  Progress progress() const override { return states_->progress(parts_); }

  bool has_codes() const override { return true; }

  bool has(int64_t unit, State state) const override {
    const auto states = cell_states(parts_.table.plan(unit));
    return std::find(states.begin(), states.end(), state) != states.end();
  }

  at::Tensor read(int64_t parameter, State state, Range elements) const override {
    const int64_t u = parts_.layout.unit_of(parameter);
    const auto& plan = parts_.table.plan(u);
    // Elements of the parameter become elements of the cell, and these its entries.
    const int64_t first = parts_.layout.segment_of(parameter).offset - plan.owned.begin;
    const int64_t begin = plan.entries(state, first + elements.begin);
    return states_->reader().read(cell_info(parts_.table, u, state).name, begin,
                                  plan.entries(state, first + elements.end) - begin);
  }

  at::Tensor factored(const std::string& key) const override { return states_->reader().read(key); }

  at::Tensor buffer(size_t index) const override {
    return with_buffers_->reader().read(buffers_[index]);
  }

 private:
  StateParts parts_;
  std::unique_ptr<StateFile> states_;
  std::unique_ptr<StateFile> with_buffers_;
  std::vector<std::string> buffers_;  // their keys
};

// Whole tensors, by parameter.
class TensorSource final : public StateSource {
 public:
  TensorSource(const StateParts& parts, const std::filesystem::path& path, bool has_states)
      : parts_(parts), file_(path), has_states_(has_states) {
    if (has_states) {
      find_states();
    } else {
      find_weights();
    }
  }

  bool has_codes() const override { return false; }

  Progress progress() const override {
    if (has_states_) return file_.progress(parts_);
    Progress none;
    none.parameter_steps.assign(names_.size(), 0);
    if (parts_.config.scales_loss()) none.loss_scale.emplace(parts_.config.loss_scaling);
    return none;
  }

  bool has(int64_t /*unit*/, State state) const override {
    return state == State::parameters || (has_states_ && state >= State::first_moment);
  }

  // The file has the elements of a tensor in row-major order, which need not be that of the
  // storage.
  at::Tensor read(int64_t parameter, State state, Range elements) const override {
    const auto& like = parts_.model.parameter(parameter);
    const auto& name = names_[static_cast<size_t>(parameter)];
    const auto key =
        state == State::parameters
            ? name
            : state_key(parts_.table.name(parts_.layout.unit_of(parameter), state), name);
    if (like.is_contiguous())
      return file_.reader().read(key, elements.begin, elements.size()).to(at::kFloat);
    return flattened(file_.reader().read(key), like, at::kFloat)
        .narrow(0, elements.begin, elements.size());
  }

  at::Tensor factored(const std::string& key) const override {
    return has_states_ ? file_.reader().read(key) : at::Tensor();
  }

  at::Tensor buffer(size_t index) const override {
    const auto& key = buffers_[index];
    return key.empty() ? at::Tensor() : file_.reader().read(key);
  }

 private:
  void find_states() {
    file_.expect_format(kFullStates);
    names_ = parts_.model.names();
    for (int64_t p = 0; p < parts_.model.size(); ++p) {
      const auto& name = parts_.model.name(p);
      const auto shape = parts_.model.parameter(p).sizes().vec();
      file_.expect_tensor({name, at::kFloat, shape});
      for (const auto state : parts_.table.plan(parts_.layout.unit_of(p)).moments)
        file_.expect_tensor({state_key(state, name), at::kFloat, shape});
    }
    for (const auto& [key, values] : factored_by_key(parts_))
      file_.expect_tensor(info_of(key, values));
    for (const auto& [name, buffer] : parts_.model.plain_buffers()) {
      buffers_.push_back(buffer_key(name));
      file_.expect_values(buffers_.back(), buffer);
    }
    file_.expect("parameters", description(parts_).at("parameters"));
  }

  // A tied parameter has several names, and the file may have any of them. Files of other programs
  // have buffers by their plain names.
  void find_weights() {
    const auto& model = parts_.model;
    for (int64_t p = 0; p < model.size(); ++p) {
      const auto names = model.names_of(p);
      const auto found = std::find_if(names.begin(), names.end(), [&](const auto& name) {
        return file_.reader().contains(name);
      });
      names_.push_back(found == names.end() ? names.front() : *found);
      file_.expect_values(names_.back(), model.parameter(p));
    }
    for (const auto& [name, buffer] : model.plain_buffers()) {
      buffers_.emplace_back();
      for (const auto& key : {buffer_key(name), name}) {
        if (!file_.reader().contains(key)) continue;
        file_.expect_values(key, buffer);
        buffers_.back() = key;
        break;
      }
    }
  }

  StateParts parts_;
  StateFile file_;
  bool has_states_;                   // of optimizers
  std::vector<std::string> names_;    // of parameters in the file
  std::vector<std::string> buffers_;  // the same of buffers; empty where the file has none
};

// Returns a cell as `source` gives it, put together from the parameters' parts. Padding is zero.
at::Tensor read_cell(const StateParts& parts, const StateSource& source, int64_t unit,
                     State state) {
  const auto& plan = parts.table.plan(unit);
  const bool codes = source.has_codes() && plan.is_coded(state);
  const auto entries = [&](int64_t elements) {
    return codes ? plan.entries(state, elements) : elements;
  };
  at::Tensor cell;
  for (const auto& segment : parts.layout.unit(unit).segments) {
    auto mine = partition::intersect(segment.range(), plan.owned);
    if (mine.empty() || !source.has(unit, state)) continue;
    if (codes) mine.end = mine.begin + at::round_up(mine.size(), optim::kCodedBlock);
    const auto part = source.read(segment.parameter, state,
                                  {mine.begin - segment.offset, mine.end - segment.offset});
    if (!cell.defined()) cell = at::zeros({entries(plan.owned.size())}, part.scalar_type());
    cell.narrow(0, entries(mine.begin - plan.owned.begin), part.numel()).copy_(part);
  }
  return cell.defined() ? cell : at::zeros({plan.owned.size()}, at::kFloat);
}

void restore_unit(const StateParts& parts, const StateSource& source, int64_t unit) {
  auto& table = parts.table;
  const auto& plan = table.plan(unit);
  const bool has_master = source.has(unit, State::master);
  const auto parameters = read_cell(parts, source, unit, State::parameters);
  table.write(unit, State::parameters, table.all(unit), parameters);
  if (has_master || plan.own_master())
    table.write(unit, State::master, table.all(unit),
                has_master ? read_cell(parts, source, unit, State::master) : parameters);
  for (size_t m = 0; m < plan.moments.size(); ++m) {
    const auto state = moment(static_cast<int64_t>(m));
    table.write(unit, state, table.all(unit), read_cell(parts, source, unit, state));
  }
}

}  // namespace

std::unique_ptr<StateSource> open_shards(const StateParts& parts,
                                         const std::filesystem::path& states,
                                         const std::filesystem::path& own,
                                         const std::filesystem::path& first) {
  return std::make_unique<ShardSource>(parts, states, own, first);
}

std::unique_ptr<StateSource> open_tensors(const StateParts& parts,
                                          const std::filesystem::path& path) {
  return std::make_unique<TensorSource>(parts, path, true);
}

std::unique_ptr<StateSource> open_weights(const StateParts& parts,
                                          const std::filesystem::path& path) {
  return std::make_unique<TensorSource>(parts, path, false);
}

void restore(const StateParts& parts, const StateSource& source) {
  for (int64_t u = 0; u < parts.layout.unit_count(); ++u) restore_unit(parts, source, u);
  for (const auto& [key, values] : factored_by_key(parts)) {
    const auto saved = source.factored(key);
    if (saved.defined()) {
      values.copy_(saved);
    } else {
      values.zero_();
    }
  }
  for (size_t i = 0; i < parts.model.buffers().size(); ++i) {
    if (const auto saved = source.buffer(i); saved.defined()) parts.model.set_buffer(i, saved);
  }
}

}  // namespace zero
