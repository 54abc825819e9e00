#include "zero/engine/state_source.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "zero/base/error.h"
#include "zero/engine/flat.h"

namespace zero {

using partition::Range;

namespace {

// A source of whole tensors, by parameter.
class TensorSource final : public StateSource {
 public:
  TensorSource(const StateParts& parts, const std::filesystem::path& path)
      : parts_(parts), file_(path), names_(parts.model.names()) {
    find_states();
  }

  Progress progress() const override { return file_.progress(parts_); }

  bool has(int64_t /*parameter*/, State /*moment*/) const override { return true; }

  // The file has the elements of a tensor in row-major order, which may differ from the storage's.
  at::Tensor read(int64_t parameter, State state, Range elements) const override {
    const auto& like = parts_.model.parameter(parameter);
    const auto& name = names_[static_cast<size_t>(parameter)];
    const auto key =
        state < State::first_moment
            ? name
            : state_key(parts_.table.name(parts_.layout.unit_of(parameter), state), name);
    if (like.is_contiguous())
      return file_.reader().read(key, elements.begin, elements.size()).to(at::kFloat);
    return flattened(file_.reader().read(key), like, at::kFloat)
        .narrow(0, elements.begin, elements.size());
  }

  at::Tensor factored(int64_t parameter, std::string_view state) const override {
    const auto& name = names_[static_cast<size_t>(parameter)];
    return file_.reader().read(state_key(state, name));
  }

  at::Tensor buffer(size_t index) const override { return file_.reader().read(buffers_[index]); }

 private:
  void find_states() {
    file_.expect("format", kFullStates);
    for (int64_t p = 0; p < parts_.model.size(); ++p) {
      const auto& name = parts_.model.name(p);
      const auto shape = parts_.model.parameter(p).sizes().vec();
      file_.expect_tensor({name, at::kFloat, shape});
      for (const auto state : parts_.table.plan(parts_.layout.unit_of(p)).moments)
        file_.expect_tensor({state_key(state, name), at::kFloat, shape});
    }
    for (const auto& info : factored_infos(parts_)) file_.expect_tensor(info);
    for (const auto& [name, buffer] : parts_.model.plain_buffers()) {
      buffers_.push_back(buffer_key(name));
      file_.expect_values(buffers_.back(), buffer);
    }
    file_.expect("parameters", description(parts_).at("parameters"));
  }

  StateParts parts_;
  StateFile file_;
  std::vector<std::string> names_;    // the parameters' names in the file
  std::vector<std::string> buffers_;  // keys of buffers; empty if the file has none
};

// A piece has whole blocks of 8-bit codes, and takes little memory.
constexpr int64_t kPiece = int64_t{1} << 22;
static_assert(kPiece % optim::kCodedBlock == 0);

using Read = std::function<at::Tensor(int64_t parameter, Range elements)>;
using Write = void (StateTable::*)(int64_t, State, Range, const at::Tensor&);

// Writes a state of a unit, one piece after the other, by `write`.
void restore_state(const StateParts& parts, int64_t unit, State state, const Read& read,
                   Write write) {
  auto& table = parts.table;
  const auto& plan = table.plan(unit);
  for (const auto& segment : parts.layout.unit(unit).segments) {
    const auto mine = partition::intersect(segment.range(), plan.owned);
    for (int64_t begin = mine.begin; begin < mine.end; begin += kPiece) {
      Range piece{begin, std::min(begin + kPiece, mine.end)};
      const auto values =
          read(segment.parameter, {piece.begin - segment.offset, piece.end - segment.offset});
      if (plan.is_coded(state) && values.scalar_type() == at::kByte)
        piece.end = piece.begin + at::round_up(piece.size(), optim::kCodedBlock);
      (table.*write)(unit, state, {piece.begin - plan.owned.begin, piece.end - plan.owned.begin},
                     values);
    }
  }
}

}  // namespace

std::unique_ptr<StateSource> open_tensors(const StateParts& parts,
                                          const std::filesystem::path& path) {
  return std::make_unique<TensorSource>(parts, path);
}

void restore(const StateParts& parts, const StateSource& source, bool delayed) {
  const auto& [layout, table, model, factored, config] = parts;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    const auto& plan = table.plan(u);
    const bool both = delayed && plan.trainable;
    const auto in_force = [&](int64_t p, Range elements) { return source.in_force(p, elements); };
    if (both) restore_state(parts, u, State::parameters, in_force, &StateTable::write);
    const auto put = [&](State state) {
      const auto read = [&](int64_t p, Range elements) {
        return state < State::first_moment || source.has(p, state)
                   ? source.read(p, state, elements)
                   : at::zeros({elements.size()}, at::kFloat);
      };
      restore_state(parts, u, state, read, both ? &StateTable::write_new : &StateTable::write);
    };
    put(State::parameters);
    if (plan.own_master()) put(State::master);
    for (size_t m = 0; m < plan.moments.size(); ++m) put(moment(static_cast<int64_t>(m)));
  }
  for (int64_t p = 0; p < model.size(); ++p) {
    for (const auto& [name, sizes, values] : factored.of(p)) {
      if (!values.defined()) continue;  // another rank has it
      if (const auto saved = source.factored(p, name); saved.defined()) {
        values.copy_(saved);
      } else {
        values.zero_();
      }
    }
  }
  for (size_t i = 0; i < model.buffers().size(); ++i) {
    if (const auto saved = source.buffer(i); saved.defined()) model.set_buffer(i, saved);
  }
}

}  // namespace zero
