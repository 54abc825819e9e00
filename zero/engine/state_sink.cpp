#include "zero/engine/state_sink.h"

#include "zero/engine/flat.h"

namespace zero {

const char* ShardSink::format() const { return kShardedStates; }

std::vector<TensorInfo> ShardSink::tensors() const {
  std::vector<TensorInfo> infos;
  for (int64_t u = 0; u < parts().layout.unit_count(); ++u) {
    for (const auto state : states(u)) infos.push_back(cell_info(parts().table, u, state));
  }
  return infos;
}

std::vector<State> ShardSink::states(int64_t unit) const {
  return owns_ ? cell_states(parts().table.plan(unit)) : std::vector<State>{};
}

at::Tensor ShardSink::cell(int64_t unit, State state) const {
  const auto& table = parts().table;
  return table.plan(unit).is_coded(state) ? table.read_stored(unit, state, table.all(unit))
                                          : table.read(unit, state);
}

void ShardSink::write(SafetensorsWriter& file, int64_t unit, State state,
                      const at::Tensor& cell) const {
  file.write(cell_info(parts().table, unit, state).name, cell);
}

const char* TensorSink::format() const { return kFullStates; }

std::vector<State> TensorSink::states(int64_t unit) const {
  const auto& plan = parts().table.plan(unit);
  std::vector<State> states{plan.trainable ? State::master : State::parameters};
  for (size_t m = 0; m < plan.moments.size(); ++m)
    states.push_back(moment(static_cast<int64_t>(m)));
  return states;
}

std::string TensorSink::key(int64_t unit, State state, int64_t parameter) const {
  const auto& name = parts().model.name(parameter);
  return state < State::first_moment ? name : state_key(parts().table.name(unit, state), name);
}

std::vector<TensorInfo> TensorSink::tensors() const {
  std::vector<TensorInfo> infos;
  for (int64_t p = 0; p < parts().model.size(); ++p) {
    const int64_t u = parts().layout.unit_of(p);
    for (const auto state : states(u))
      infos.push_back({key(u, state, p), at::kFloat, parts().model.parameter(p).sizes().vec()});
  }
  return infos;
}

at::Tensor TensorSink::cell(int64_t unit, State state) const {
  return gather_(unit, parts().table.read(unit, state));
}

void TensorSink::write(SafetensorsWriter& file, int64_t unit, State state,
                       const at::Tensor& cell) const {
  for (const auto& segment : parts().layout.unit(unit).segments) {
    const auto values = cell.narrow(0, segment.offset, segment.numel).to(at::kFloat);
    file.write(key(unit, state, segment.parameter),
               unflattened(values, parts().model.parameter(segment.parameter)));
  }
}

SavedFile::SavedFile(const StateParts& parts, const StateSink& sink, const Progress& progress,
                     const std::filesystem::path& path, bool with_factored) {
  if (with_factored) rest_ = factored_by_key(parts);
  for (const auto& [name, buffer] : parts.model.plain_buffers())
    rest_.emplace_back(buffer_key(name), buffer);
  auto infos = sink.tensors();
  for (const auto& [key, values] : rest_) infos.push_back(info_of(key, values));
  writer_ =
      std::make_unique<SafetensorsWriter>(path, infos, header(parts, progress, sink.format()));
}

void SavedFile::commit() {
  for (const auto& [key, values] : rest_) writer_->write(key, values);
  writer_->commit();
}

void for_each_cell(
    const StateParts& parts, const StateSink& sink,
    const std::function<void(int64_t unit, State state, const at::Tensor& cell)>& write) {
  for (int64_t u = 0; u < parts.layout.unit_count(); ++u) {
    for (const auto state : sink.states(u)) write(u, state, sink.cell(u, state));
  }
}

}  // namespace zero
