#include "zero/checkpoint/foreign/checkpoint_view.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/readers.h"
#include "zero/checkpoint/manifest.h"
#include "zero/config/config.h"

namespace zero::foreign {

using nlohmann::json;

int64_t LazyTensor::numel() const {
  int64_t numel = 1;
  for (const auto size : shape) {
    if (size < 0 || __builtin_mul_overflow(numel, size, &numel))
      throw CheckpointError(fmt::format("a tensor has the shape [{}]", fmt::join(shape, ",")));
  }
  return numel;
}

int64_t CheckpointView::add_group(const Optimizer& optimizer) {
  groups.push_back(dump(optimizer));
  return static_cast<int64_t>(groups.size()) - 1;
}

const std::map<std::string, std::string>& CheckpointView::attached_of(int rank) const {
  const auto from = static_cast<size_t>(rank) % (other_ranks.size() + 1);
  return from == 0 ? attached : other_ranks[from - 1].attached;
}

const std::map<std::string, LazyTensor>& CheckpointView::buffers_of(int rank) const {
  const auto from = static_cast<size_t>(rank) % (other_ranks.size() + 1);
  return from == 0 ? buffers : other_ranks[from - 1].buffers;
}

LazyTensor CheckpointView::for_use(const Parameter& parameter, bool widest) const {
  const auto& trained = parameter.weights();
  auto made = widest ? trained : parameter.states.at("parameter");
  if (parameter.optimizer.empty() || parameter.steps == 0) return made;
  const auto optimizer =
      *Config::parse(
           fmt::format("{{\"optimizer\": {}}}", groups.at(static_cast<size_t>(parameter.group))), 1)
           .optimizer;
  const auto k = optim::evaluated(optimizer);
  if (!k) return made;
  const auto other = parameter.states.find(std::string(optim::state_names(optimizer).front()));
  if (other == parameter.states.end()) return made;
  made.read = [k = *k, dtype = made.dtype, trained, other = other->second] {
    const auto y = trained.read().to(at::kFloat);
    return y.add((other.read().to(at::kFloat) - y).mul_(k)).to(dtype);
  };
  return made;
}

namespace {

CheckpointView view_of_any(const std::filesystem::path& path, bool weights_only) {
  if (!std::filesystem::exists(path))
    throw CheckpointError(fmt::format("'{}' does not exist.", path.string()));
  if (has_manifest(path)) return view_own(path);
  if (is_deepspeed(path)) return view_deepspeed(path, weights_only);
  if (is_distributed(path)) return view_distributed(path);
  return view_weights(path);
}

}  // namespace

CheckpointView view_checkpoint(const std::filesystem::path& path, bool weights_only) {
  auto view = view_of_any(path, weights_only);
  if (!weights_only) return view;
  for (auto& each : view.parameters) each.states = {{"parameter", view.for_use(each, true)}};
  view.steps = 0;
  view.loss_scale.reset();
  view.grad_norm.reset();
  view.groups.clear();
  for (auto& each : view.parameters) {
    each.optimizer.clear();
    each.group = 0;
    each.steps = 0;
  }
  return view;
}

LazyTensor join(std::vector<Part> parts, std::vector<int64_t> shape) {
  LazyTensor whole{parts.empty() ? at::kFloat : parts.front().tensor.dtype, std::move(shape), {}};
  int64_t found = 0;
  for (const auto& part : parts) {
    found += part.count;
    if (part.tensor.dtype != whole.dtype || part.begin < 0 ||
        part.count > part.tensor.numel() - part.begin)
      throw CheckpointError(
          fmt::format("'{}' has a part of a tensor with another dtype or fewer "
                      "elements than the others say",
                      part.tensor.file->string()));
  }
  if (found != whole.numel())
    throw CheckpointError(fmt::format("the ranks' parts have {} elements of a tensor of [{}]",
                                      found, fmt::join(whole.shape, ",")));
  whole.read = [parts = std::move(parts), shape = whole.shape, dtype = whole.dtype, numel = found] {
    auto values = at::empty({numel}, dtype);
    int64_t at = 0;
    for (const auto& part : parts) {
      values.narrow(0, at, part.count).copy_(part.tensor.read(part.begin, part.count));
      at += part.count;
    }
    return values.view(shape);
  };
  return whole;
}

LazyTensor lazy(const StoredTensor& tensor) {
  constexpr int64_t kSmall = 1 << 20;
  if (tensor.numel() > std::max(tensor.storage_size, kSmall))
    throw CheckpointError(
        fmt::format("'{}' holds {} elements and shows them as a tensor of {}: "
                    "expanded tensors are not taken over",
                    tensor.file->string(), tensor.storage_size, tensor.numel()));
  return {tensor.dtype, tensor.sizes, [tensor] { return tensor.read().contiguous(); }};
}

std::string listed(const std::vector<std::string>& names, const std::string& why) {
  constexpr size_t kShown = 5;
  const std::vector<std::string> shown(
      names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kShown)));
  return fmt::format(
      "{}{}: {}", fmt::join(shown, ", "),
      names.size() > kShown ? fmt::format(" and {} more", names.size() - kShown) : "", why);
}

namespace {

double number_of(const json& group, const char* key, double otherwise) {
  const auto found = group.find(key);
  return found != group.end() && found->is_number() ? found->get<double>() : otherwise;
}

bool flag_of(const json& group, const char* key, bool otherwise) {
  const auto found = group.find(key);
  return found != group.end() && found->is_boolean() ? found->get<bool>() : otherwise;
}

template <class WithBetas>
WithBetas with_betas(const json& group) {
  WithBetas made;
  made.weight_decay = number_of(group, "weight_decay", 0);
  if (const auto betas = group.find("betas");
      betas != group.end() && betas->is_array() && betas->size() == 2 && (*betas)[0].is_number()) {
    made.beta1 = (*betas)[0].get<double>();
    made.beta2 = (*betas)[1].get<double>();
  }
  if constexpr (requires { made.eps; }) made.eps = number_of(group, "eps", made.eps);
  if constexpr (requires { made.bias_correction; })
    made.bias_correction = flag_of(group, "bias_correction", true);
  return made;
}

Optimizer without_rate(const json& group, const std::set<std::string>& states) {
  const double decay = number_of(group, "weight_decay", 0);
  if (states.contains("z")) {
    auto schedule_free = with_betas<ScheduleFreeAdamW>(group);
    schedule_free.warmup_steps = static_cast<int64_t>(number_of(group, "warmup_steps", 0));
    return schedule_free;
  }
  if (states.contains("exp_avg_sq")) {
    if (group.contains("max_coeff")) {
      auto lamb = with_betas<Lamb>(group);
      lamb.min_coeff = number_of(group, "min_coeff", lamb.min_coeff);
      lamb.max_coeff = number_of(group, "max_coeff", lamb.max_coeff);
      return lamb;
    }
    auto adam = with_betas<AdamW>(group);
    adam.decoupled = flag_of(group, "decoupled_weight_decay", true);
    return adam;
  }
  if (states.contains("exp_avg")) return with_betas<Lion>(group);
  if (states.contains("sum")) {
    return Adagrad{.lr_decay = number_of(group, "lr_decay", 0),
                   .weight_decay = decay,
                   .initial_accumulator_value = number_of(group, "initial_accumulator_value", 0),
                   .eps = number_of(group, "eps", 1e-10)};
  }
  if (flag_of(group, "use_muon", false))
    return Muon{.momentum = number_of(group, "momentum", 0.95), .weight_decay = decay};
  const double momentum = number_of(group, "momentum", states.empty() ? 0 : 0.9);
  return Sgd{.momentum = momentum,
             .dampening = number_of(group, "dampening", 0),
             .weight_decay = decay,
             .nesterov = flag_of(group, "nesterov", false)};
}

}  // namespace

Optimizer optimizer_of(const json& group, const std::set<std::string>& states) {
  auto optimizer = without_rate(group, states);
  std::visit([&](auto& each) { each.lr = number_of(group, "lr", each.lr); }, optimizer);
  return optimizer;
}

bool is_state(std::string_view name) {
  constexpr std::array kStates{"exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "z"};
  return std::find(kStates.begin(), kStates.end(), name) != kStates.end();
}

std::vector<int64_t> row_major(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d > 0; --d) {
    strides[d - 1] = stride;
    stride *= std::max<int64_t>(shape[d - 1], 1);
  }
  return strides;
}

}  // namespace zero::foreign
