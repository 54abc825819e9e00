#include "zero/engine/state_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "zero/base/error.h"

namespace zero {

namespace {

// Returns the sizes and strides of each parameter, as JSON.
nlohmann::json shapes_of(const Model& model) {
  auto list = nlohmann::json::array();
  for (const auto& each : model.parameters())
    list.push_back({each.sizes().vec(), each.strides().vec()});
  return list;
}

}  // namespace

std::map<std::string, std::string> description(const StateParts& parts) {
  return {{"stage", std::to_string(parts.config.stage)},
          {"world_size", std::to_string(parts.layout.shards())},
          {"unit_bytes", std::to_string(parts.config.unit_bytes)},
          {"parameters", nlohmann::json(parts.model.names()).dump()}};
}

std::map<std::string, std::string> header(const StateParts& parts, const Progress& progress) {
  auto header = description(parts);
  header["format"] = kFullStates;
  header["steps"] = std::to_string(progress.steps);
  header["shapes"] = shapes_of(parts.model).dump();
  header["parameter_steps"] = nlohmann::json(progress.parameter_steps).dump();
  if (progress.loss_scale) {
    const auto state = progress.loss_scale->state();
    header["loss_scale"] = nlohmann::json{
        {"scale", state.scale},
        {"clean", state.clean},
        {"hysteresis",
         state.hysteresis}}.dump();
  }
  if (progress.grad_norm) header["grad_norm"] = nlohmann::json(*progress.grad_norm).dump();
  return header;
}

std::string state_key(std::string_view state, std::string_view parameter) {
  return fmt::format("optimizer.{}.{}", state, parameter);
}

std::string buffer_key(std::string_view buffer) { return fmt::format("buffer.{}", buffer); }

std::string shard_name(int rank, int ranks) {
  return fmt::format("rank-{}-of-{}.safetensors", rank, ranks);
}

std::string slice_key(std::string_view state, std::string_view parameter) {
  return fmt::format("{}.{}", state, parameter);
}

std::string kind_of(const StateParts& parts, int64_t parameter) {
  if (!parts.table.trainable(parts.layout.unit_of(parameter))) return "";
  return std::string(optim::name(parts.model.optimizer_of(parameter)));
}

std::string format_of(const UnitPlan& plan, State state) {
  if (!plan.is_coded(state)) {
    const auto dtype = state == State::master ? at::kFloat : plan.dtype_of(state);
    return std::string(safetensors_name(dtype));
  }
  const auto sign = plan.moment_signs[column(state) - column(State::first_moment)];
  return sign == optim::Sign::positive ? "8bit_positive" : "8bit";
}

std::vector<State> cell_states(const UnitPlan& plan) {
  std::vector<State> states{State::parameters};
  if (!plan.trainable) return states;
  if (plan.dtype != at::kFloat && !plan.narrow) states.push_back(State::master);
  for (size_t m = 0; m < plan.moments.size(); ++m)
    states.push_back(moment(static_cast<int64_t>(m)));
  return states;
}

TensorInfo info_of(const std::string& key, const at::Tensor& tensor) {
  return {key, tensor.scalar_type(), tensor.sizes().vec()};
}

std::vector<TensorInfo> factored_infos(const StateParts& parts) {
  std::vector<TensorInfo> all;
  for (int64_t p = 0; p < parts.model.size(); ++p) {
    for (const auto& state : parts.factored.of(p))
      all.push_back({state_key(state.name, parts.model.name(p)), at::kFloat, state.sizes});
  }
  return all;
}

const std::string& StateFile::metadata(const std::string& key) const {
  const auto found = reader_.metadata().find(key);
  if (found == reader_.metadata().end())
    throw CheckpointError(fmt::format(
        "'{}' has no '{}' in its header: it was not written by Engine::save or Engine::save_full.",
        path(), key));
  return found->second;
}

void StateFile::expect(const std::string& key, const std::string& wanted) const {
  const auto& found = metadata(key);
  if (wanted == found) return;
  throw CheckpointError(
      fmt::format("'{}' was saved with {} {}, but this run has {}. Resume with the same, or save "
                  "with Engine::save_full, which loads at any stage and number of ranks.",
                  path(), key, found, wanted));
}

void StateFile::expect_tensor(const TensorInfo& wanted) const {
  if (!reader_.contains(wanted.name))
    throw CheckpointError(
        fmt::format("'{}' has no '{}': it is of another model or optimizer.", path(), wanted.name));
  const auto& info = reader_.info(wanted.name);
  if (info == wanted) return;
  throw CheckpointError(fmt::format("'{}' holds '{}' as {} ({}), but the model needs {} ({}).",
                                    path(), wanted.name, c10::toString(info.dtype),
                                    fmt::join(info.shape, ", "), c10::toString(wanted.dtype),
                                    fmt::join(wanted.shape, ", ")));
}

void StateFile::expect_values(const std::string& name, const at::Tensor& like) const {
  auto wanted = info_of(name, like);
  if (reader_.contains(name)) {
    const auto dtype = reader_.info(name).dtype;
    if (at::isFloatingType(dtype) && at::isFloatingType(wanted.dtype)) wanted.dtype = dtype;
  }
  expect_tensor(wanted);
}

void StateFile::expect_shapes(const Model& model) const {
  const auto found = reader_.metadata().find("shapes");
  if (found == reader_.metadata().end()) return;
  const auto theirs = nlohmann::json::parse(found->second, nullptr, false);
  const auto ours = shapes_of(model);
  for (size_t p = 0; p < ours.size(); ++p) {
    const auto other = theirs.is_array() && p < theirs.size() ? theirs[p] : nlohmann::json();
    if (other == ours[p]) continue;
    const bool pair = other.is_array() && other.size() == 2;
    const size_t differs = pair && other[0] == ours[p][0] ? 1 : 0;
    throw CheckpointError(
        fmt::format("'{}' holds parameter '{}' with {} {}, but the model has it with {}.", path(),
                    model.names()[p], differs == 1 ? "strides" : "shape",
                    pair ? other[differs].dump() : other.dump(), ours[p][differs].dump()));
  }
}

std::optional<LossScaleState> StateFile::loss_scale() const {
  const auto found = reader_.metadata().find("loss_scale");
  if (found == reader_.metadata().end()) return {};
  try {
    const auto json = nlohmann::json::parse(found->second);
    return LossScaleState{.scale = json.at("scale").get<double>(),
                          .clean = json.at("clean").get<int64_t>(),
                          .hysteresis = json.at("hysteresis").get<int64_t>()};
  } catch (const std::exception& error) {
    throw CheckpointError(
        fmt::format("'{}' has a loss scale that cannot be read ({}).", path(), error.what()));
  }
}

std::optional<LossScale> continued_scale(const Config& config,
                                         const std::optional<LossScaleState>& state,
                                         const std::string& path) {
  if (!config.scales_loss()) return {};
  LossScale scale(config.loss_scaling);
  if (!state) return scale;
  try {
    scale.restore(*state);
  } catch (const ConfigError& error) {
    throw CheckpointError(fmt::format("'{}': {}", path, error.what()));
  }
  return scale;
}

Progress StateFile::progress(const StateParts& parts) const {
  Progress progress;
  try {
    progress.steps = std::stoll(metadata("steps"));
    progress.parameter_steps =
        nlohmann::json::parse(metadata("parameter_steps")).get<std::vector<int64_t>>();
    if (const auto norm = reader_.metadata().find("grad_norm"); norm != reader_.metadata().end())
      progress.grad_norm = nlohmann::json::parse(norm->second).get<double>();
  } catch (const CheckpointError&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError(fmt::format(
        "'{}' has a step count or gradient norm that cannot be read ({}).", path(), error.what()));
  }
  const size_t parameters = parts.model.names().size();
  if (progress.parameter_steps.size() != parameters)
    throw CheckpointError(fmt::format("'{}' counts the steps of {} parameters; the model has {}.",
                                      path(), progress.parameter_steps.size(), parameters));
  progress.loss_scale = continued_scale(parts.config, loss_scale(), path());
  return progress;
}

}  // namespace zero
