#include "zero/engine/slice_file.h"

#include <ATen/ceil_div.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <map>
#include <utility>

#include "zero/checkpoint/in_force.h"
#include "zero/engine/unit_plan.h"
#include "zero/optim/state_format.h"
#include "zero/partition/layout.h"

namespace zero {
namespace {

at::ScalarType stored_dtype(const UnitPlan& plan, State state) {
  return state == State::master ? at::kFloat : plan.dtype_of(state);
}

int64_t whole_blocks(const UnitPlan& plan, State state, int64_t elements) {
  return plan.is_coded(state) ? at::round_up(elements, optim::kCodedBlock) : elements;
}

}  // namespace

SliceFile::SliceFile(const StateParts& parts, int rank, int ranks, Contents contents)
    : parts_(parts) {
  entry_.name = shard_name(rank, ranks);
  if (contents.owned) add_slices(contents.in_force);
  for (int64_t p = 0; p < parts.model.size(); ++p) add_factored(p, rank, contents.owned);
  for (const auto& [name, buffer] : parts.model.plain_buffers()) add(buffer_key(name), buffer);
}

// Adds a parameter's factored states, if it is this rank that saves them.
void SliceFile::add_factored(int64_t parameter, int rank, bool owned) {
  const auto& states = parts_.factored.of(parameter);
  if (states.empty() || !states.front().values.defined()) return;
  const bool everywhere = parts_.factored.everywhere(parameter);
  if (everywhere ? rank != 0 : !owned) return;
  for (const auto& state : states)
    add(slice_key(state.name, parts_.model.name(parameter)), state.values);
  if (!everywhere) entry_.factored.push_back(parameter);
}

void SliceFile::create(const std::filesystem::path& folder) {
  file_ = std::make_unique<SafetensorsWriter>(
      folder / entry_.name, std::move(infos_),
      std::map<std::string, std::string>{
          {"format", fmt::format("{} {}", Manifest::kFormat, Manifest::kVersion)}});
  std::map<std::string, Piece> by_key;
  for (auto& piece : pieces_) by_key.emplace(piece.key, std::move(piece));
  pieces_.clear();
  for (const auto& info : file_->order()) pieces_.push_back(std::move(by_key.at(info.name)));
}

// Adds all states of what this rank owns of each parameter.
void SliceFile::add_slices(bool in_force) {
  const auto& [layout, table, model, factored, config] = parts_;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    const auto& plan = table.plan(u);
    const bool both = in_force && plan.trainable;
    std::vector<Manifest::Slice> mine;
    for (const auto& segment : layout.unit(u).segments) {
      const auto part = partition::intersect(segment.range(), plan.owned);
      if (!part.empty())
        mine.push_back({segment.parameter, part.begin - segment.offset, part.end - segment.offset});
    }
    const auto add_state = [&](std::string_view name, State state, const Piece& piece) {
      for (const auto& [parameter, begin, end] : mine) {
        const int64_t first = layout.segment_of(parameter).offset - plan.owned.begin;
        const int64_t entries = plan.entries(state, whole_blocks(plan, state, end - begin));
        auto part = piece;
        part.unit = u;
        part.state = state;
        part.owned = {first + begin, first + end};
        add(slice_key(name, model.name(parameter)), stored_dtype(plan, state), {entries},
            std::move(part));
      }
    };
    // Nobody writes to parameters on a disk but through the table.
    const bool shown = plan.parameters_at != Tier::disk;
    for (const auto state : cell_states(plan)) {
      // The upper halves of split master weights are the parameters.
      const bool exposed =
          shown && (state == State::parameters || (state == State::master && plan.split));
      add_state(table.name(u, state), state, {.key = {}, .in_force = !both, .exposed = exposed});
    }
    if (both) add_state(kInForce, State::parameters, {.key = {}, .exposed = shown});
    entry_.slices.insert(entry_.slices.end(), mine.begin(), mine.end());
  }
}

void SliceFile::add(std::string key, const at::Tensor& whole) {
  add(std::move(key), whole.scalar_type(), whole.sizes().vec(), {.key = {}, .whole = whole});
}

void SliceFile::add(std::string key, at::ScalarType dtype, std::vector<int64_t> shape,
                    Piece piece) {
  piece.bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : shape) piece.bytes *= size;
  piece.key = key;
  pieces_.push_back(std::move(piece));
  infos_.push_back({std::move(key), dtype, std::move(shape)});
}

at::Tensor SliceFile::values(const Piece& piece) const {
  if (piece.unit < 0) return piece.whole;
  const auto& plan = parts_.table.plan(piece.unit);
  auto owned = piece.owned;
  if (!plan.is_coded(piece.state)) {
    return piece.in_force ? parts_.table.read(piece.unit, piece.state, owned)
                          : parts_.table.read_new(piece.unit, piece.state, owned);
  }
  owned.end = owned.begin + whole_blocks(plan, piece.state, owned.size());
  return parts_.table.read_stored(piece.unit, piece.state, owned);
}

Manifest::File SliceFile::commit() {
  file_->commit();
  entry_.sums = file_->sums();
  return std::move(entry_);
}

}  // namespace zero
