#include "zero/engine/state_sink.h"

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "zero/base/error.h"
#include "zero/checkpoint/in_force.h"
#include "zero/comm/agreement.h"
#include "zero/engine/flat.h"

namespace zero {

using partition::Range;

Manifest describe(const StateParts& parts, const Progress& progress, bool in_force) {
  const auto& [layout, table, model, factored, config] = parts;
  Manifest manifest;
  manifest.stage = config.stage;
  manifest.configuration = config.dump();
  manifest.steps = progress.steps;
  if (progress.loss_scale) manifest.loss_scale = progress.loss_scale->state();
  manifest.grad_norm = progress.grad_norm;
  for (int64_t p = 0; p < model.size(); ++p) {
    const auto& plan = table.plan(layout.unit_of(p));
    auto names = model.names_of(p);
    Manifest::Parameter parameter{
        .name = names.front(),
        .other_names = {names.begin() + 1, names.end()},
        .shape = model.parameter(p).sizes().vec(),
        .strides = model.parameter(p).strides().vec(),
        .optimizer = kind_of(parts, p),
        .group = static_cast<int64_t>(model.parameter_group_of()[static_cast<size_t>(p)]),
        .steps = progress.of(p),
        .states = {},
        .factored = {}};
    for (const auto state : cell_states(plan)) {
      parameter.states.push_back(
          {std::string(table.name(layout.unit_of(p), state)), format_of(plan, state)});
    }
    if (in_force && plan.trainable)
      parameter.states.push_back({kInForce, format_of(plan, State::parameters)});
    for (const auto& state : factored.of(p))
      parameter.factored.emplace_back(state.name, state.sizes);
    manifest.parameters.push_back(std::move(parameter));
  }
  for (const auto& [name, buffer] : model.plain_buffers())
    manifest.buffers.push_back(info_of(name, buffer));
  return manifest;
}

namespace {

std::vector<State> full_states(const UnitPlan& plan) {
  std::vector<State> states{plan.trainable ? State::master : State::parameters};
  for (size_t m = 0; m < plan.moments.size(); ++m)
    states.push_back(moment(static_cast<int64_t>(m)));
  return states;
}

std::string tensor_key(const StateParts& parts, State state, int64_t parameter) {
  const auto& name = parts.model.name(parameter);
  const int64_t u = parts.layout.unit_of(parameter);
  return state < State::first_moment ? name : state_key(parts.table.name(u, state), name);
}

}  // namespace

void save_tensors(const StateParts& parts, const Progress& progress, comm::Group& group,
                  const GatherUnit& gather, const std::filesystem::path& path) {
  const auto& layout = parts.layout;
  const auto& table = parts.table;
  const auto& model = parts.model;
  constexpr const char* kLabel = "Engine::save_full";
  std::unique_ptr<SafetensorsWriter> file;  // on rank 0 only
  comm::agree<CheckpointError>(group, kLabel, [&] {
    if (group.rank() != 0) return;
    std::vector<TensorInfo> infos;
    for (int64_t p = 0; p < model.size(); ++p) {
      for (const auto state : full_states(table.plan(layout.unit_of(p))))
        infos.push_back(
            {tensor_key(parts, state, p), at::kFloat, model.parameter(p).sizes().vec()});
    }
    for (const auto& info : factored_infos(parts)) infos.push_back(info);
    for (const auto& [name, buffer] : model.plain_buffers())
      infos.push_back(info_of(buffer_key(name), buffer));
    file = std::make_unique<SafetensorsWriter>(path, infos, header(parts, progress));
  });
  // Rank 0 may fail to write in the middle. It still takes part in the gathers, and all ranks learn
  // of the failure at the end.
  std::string failure;
  const auto attempt = [&](const std::function<void()>& write) {
    if (!file || !failure.empty()) return;
    try {
      write();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  };
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    for (const auto state : full_states(table.plan(u))) {
      const auto cell = gather(u, table.read_new(u, state));
      attempt([&] {
        for (const auto& segment : layout.unit(u).segments) {
          const auto values = cell.narrow(0, segment.offset, segment.numel).to(at::kFloat);
          file->write(tensor_key(parts, state, segment.parameter),
                      unflattened(values, model.parameter(segment.parameter)));
        }
      });
    }
  }
  for (int64_t p = 0; p < model.size(); ++p) {
    for (const auto& state : parts.factored.of(p)) {
      const auto values = parts.factored.read(p, state);
      attempt([&] { file->write(state_key(state.name, model.name(p)), values); });
    }
  }
  comm::agree<CheckpointError>(group, kLabel, [&] {
    attempt([&] {
      for (const auto& [name, buffer] : model.plain_buffers())
        file->write(buffer_key(name), buffer);
      file->commit();
    });
    if (!failure.empty()) throw CheckpointError(failure);
  });
}

}  // namespace zero
