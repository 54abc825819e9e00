#include "zero/engine/state_sink.h"

#include "zero/engine/flat.h"

namespace zero {

namespace {

class ShardSink final : public StateSink {
 public:
  ShardSink(const StateParts& parts, bool owns) : StateSink(parts), owns_(owns) {}

  const char* format() const override { return kShardedStates; }

  std::vector<TensorInfo> tensors() const override {
    std::vector<TensorInfo> infos;
    for (int64_t u = 0; u < parts().layout.unit_count(); ++u) {
      for (const auto state : states(u)) infos.push_back(cell_info(parts().table, u, state));
    }
    return infos;
  }

  std::vector<State> states(int64_t unit) const override {
    return owns_ ? cell_states(parts().table.plan(unit)) : std::vector<State>{};
  }

  at::Tensor cell(int64_t unit, State state) const override {
    const auto& table = parts().table;
    return table.plan(unit).is_coded(state) ? table.read_stored(unit, state, table.all(unit))
                                            : table.read(unit, state);
  }

  void write(SafetensorsWriter& file, int64_t unit, State state,
             const at::Tensor& cell) const override {
    file.write(cell_info(parts().table, unit, state).name, cell);
  }

 private:
  bool owns_;
};

class TensorSink final : public StateSink {
 public:
  TensorSink(const StateParts& parts, GatherUnit gather)
      : StateSink(parts), gather_(std::move(gather)) {}

  const char* format() const override { return kFullStates; }

  std::vector<TensorInfo> tensors() const override {
    std::vector<TensorInfo> infos;
    for (int64_t p = 0; p < parts().model.size(); ++p) {
      const int64_t u = parts().layout.unit_of(p);
      for (const auto state : states(u))
        infos.push_back({key(u, state, p), at::kFloat, parts().model.parameter(p).sizes().vec()});
    }
    return infos;
  }

  std::vector<State> states(int64_t unit) const override {
    const auto& plan = parts().table.plan(unit);
    std::vector<State> states{plan.trainable ? State::master : State::parameters};
    for (size_t m = 0; m < plan.moments.size(); ++m)
      states.push_back(moment(static_cast<int64_t>(m)));
    return states;
  }

  at::Tensor cell(int64_t unit, State state) const override {
    return gather_(unit, parts().table.read(unit, state));
  }

  void write(SafetensorsWriter& file, int64_t unit, State state,
             const at::Tensor& cell) const override {
    for (const auto& segment : parts().layout.unit(unit).segments) {
      const auto values = cell.narrow(0, segment.offset, segment.numel).to(at::kFloat);
      file.write(key(unit, state, segment.parameter),
                 unflattened(values, parts().model.parameter(segment.parameter)));
    }
  }

 private:
  std::string key(int64_t unit, State state, int64_t parameter) const {
    const auto& name = parts().model.name(parameter);
    return state < State::first_moment ? name : state_key(parts().table.name(unit, state), name);
  }

  GatherUnit gather_;
};

}  // namespace

std::unique_ptr<StateSink> shard_sink(const StateParts& parts, bool owns) {
  return std::make_unique<ShardSink>(parts, owns);
}

std::unique_ptr<StateSink> tensor_sink(const StateParts& parts, GatherUnit gather) {
  return std::make_unique<TensorSink>(parts, std::move(gather));
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
