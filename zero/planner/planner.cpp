#include "zero/planner/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <variant>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/models/architectures.h"
#include "zero/planner/candidates.h"
#include "zero/planner/sentences.h"

namespace zero::plan {

Tracer tracer(const LanguageModelConfig& model, int64_t sequence) {
  return [&model, sequence](int64_t batch, int64_t recompute, const TraceOptions& options) {
    return trace(model, batch, sequence, recompute, options);
  };
}

void ask_of_depths(Question& question, const LanguageModelConfig& model) {
  const auto text = model.to_json();
  const auto key = parse_json(text).contains("n_layer") ? "n_layer" : "num_hidden_layers";
  question.of_layers = [text, key, sequence = question.sequence](int64_t layers) -> Tracer {
    auto json = parse_json(text);
    json[key] = layers;
    json.erase("layer_types");
    const std::shared_ptr sizes = language_model_config_from_json(json.dump(), "the model");
    return [sizes, sequence](int64_t batch, int64_t recompute, const TraceOptions& options) {
      return trace(*sizes, batch, sequence, recompute, options);
    };
  };
}

std::string Candidate::words() const {
  std::string all = fmt::format("stage {}", config.stage);
  const auto place = [](OffloadDevice device) {
    return device == OffloadDevice::cpu ? "host" : "disk";
  };
  const auto optimizer = config.offload_optimizer.device;
  const auto parameters = config.offload_param.device;
  if (parameters != OffloadDevice::none) {
    all += fmt::format(", all states on the {}", place(parameters));
  } else if (optimizer != OffloadDevice::none) {
    all += fmt::format(", optimizer on the {}", place(optimizer));
  }
  if (config.optimizer_states == optim::StateFormat::eight_bit) all += ", 8-bit states";
  if (config.quantised.any()) {
    all += ", ZeRO++";
  } else if (config.hpz_partition_size > 1) {
    all += ", hpZ";
  }
  if (config.mics_shard_size > 0) all += fmt::format(", MiCS {}", config.mics_shard_size);
  if (recompute > 0) all += ", recomputed";
  if (config.update_in_backward) all += ", updated in backward";
  if (config.offload_optimizer.delayed_update_after > 0) all += ", delayed updates";
  return all +
         fmt::format(", micro-batch {} x {}", micro_batch, config.gradient_accumulation_steps);
}

const Candidate& Answer::best() const {
  if (candidates.empty()) throw Error("The plan has no candidates: there was nothing to try.");
  return candidates.front();
}

Updates updates_named(std::string_view name) {
  if (name == "in-backward") return Updates::in_backward;
  if (name == "delayed") return Updates::delayed;
  throw ConfigError(
      fmt::format("'{}' is no time of updates to try; there are in-backward and delayed.", name));
}

Answer plan(const Question& question) {
  check(question.cluster);
  Traces traces(question);
  Table table(question, traces);
  table.answer(std::numeric_limits<size_t>::max());
  Answer answer;
  const auto& first = table.all.front();
  const auto& trace = table.traces.of(first.config, first.micro_batch, first.recompute);
  answer.bounds = trace.bounds;
  answer.parameters = trace.parameters();
  for (const auto& parameter : trace.model.parameters)
    answer.trained += parameter.trainable ? parameter.numel() : 0;
  answer.candidates = table.all;
  answer.zero_or_not = zero_or_not(answer, question);
  if (answer.best().fits()) {
    answer.binds = binds(answer.best());
    answer.helps = helps(table, answer.best());
  } else {
    answer.binds = nearest_lacks(answer.best());
  }
  answer.largest_model = largest_model(question, table.make(Way{}, 1, 1, 0), answer.parameters);
  answer.fewest_devices = fewest_devices(question, traces, answer.candidates);
  return answer;
}

Candidate evaluate(const Question& question, const Config& config, int64_t micro_batch,
                   int64_t recompute) {
  check(question.cluster);
  Traces traces(question);
  Table table(question, traces);
  auto candidate = table.make(config, micro_batch, recompute);
  table.time_in_parts(candidate);
  return candidate;
}

std::vector<Cluster> scaled(const Cluster& cluster, int64_t first, int64_t last) {
  if (first < 1 || last > kMostRanks) {
    throw ConfigError(fmt::format("Plans from {} to {} ranks are asked for; give 1 to {} ranks.",
                                  first, last, kMostRanks));
  }
  std::vector<Cluster> all;
  for (int64_t ranks = first; ranks <= last; ranks *= 2) {
    auto asked = cluster;
    asked.per_host = std::min(ranks, cluster.per_host);
    if (ranks % asked.per_host != 0) {
      throw ConfigError(
          fmt::format("{} ranks do not fill hosts of {} devices. Give a multiple of {}, or another "
                      "number of devices of a host.",
                      ranks, cluster.per_host, cluster.per_host));
    }
    asked.hosts = ranks / asked.per_host;
    check(asked);
    all.push_back(std::move(asked));
  }
  return all;
}

std::vector<ScalePoint> scale(const Question& question, int64_t first, int64_t last) {
  const int64_t of_rank = std::max<int64_t>(1, question.global_batch / question.cluster.ranks());
  std::vector<ScalePoint> points;
  Traces traces(question);
  for (auto& cluster : scaled(question.cluster, first, last)) {
    auto asked = question;
    asked.cluster = std::move(cluster);
    asked.global_batch = of_rank * asked.cluster.ranks();
    Table table(asked, traces);
    table.answer(1);
    ScalePoint point{.ranks = asked.cluster.ranks(), .best = table.all.front()};
    point.fits = point.best.fits();
    const auto reference = std::ranges::find_if(points, &ScalePoint::fits);
    const double mine = point.best.tokens_per_second / static_cast<double>(point.ranks);
    point.efficiency =
        !point.fits ? 0
        : reference == points.end()
            ? 1
            : mine / (reference->best.tokens_per_second / static_cast<double>(reference->ranks));
    points.push_back(std::move(point));
  }
  return points;
}

std::string ds_config(const Candidate& candidate, const std::string& nvme_path) {
  using Json = nlohmann::ordered_json;
  const auto& config = candidate.config;
  const auto place = [&](OffloadDevice device) {
    Json section = {{"device", device == OffloadDevice::cpu ? "cpu" : "nvme"}};
    if (device == OffloadDevice::nvme) section["nvme_path"] = nvme_path;
    return section;
  };
  Json zero = {{"stage", config.stage}};
  if (config.offload_optimizer.device != OffloadDevice::none)
    zero["offload_optimizer"] = place(config.offload_optimizer.device);
  if (config.offload_param.device != OffloadDevice::none)
    zero["offload_param"] = place(config.offload_param.device);
  if (const int64_t after = config.offload_optimizer.delayed_update_after; after > 0)
    zero["offload_optimizer"]["delayed_update_after"] = after;
  if (config.hpz_partition_size > 1) zero["zero_hpz_partition_size"] = config.hpz_partition_size;
  if (config.mics_shard_size > 0) zero["mics_shard_size"] = config.mics_shard_size;
  if (config.quantised.weights) zero["zero_quantized_weights"] = true;
  if (config.quantised.gradients) zero["zero_quantized_gradients"] = true;
  Json file = {{"train_batch_size",
                candidate.micro_batch * config.gradient_accumulation_steps * candidate.ranks},
               {"train_micro_batch_size_per_gpu", candidate.micro_batch},
               {"gradient_accumulation_steps", config.gradient_accumulation_steps},
               {"zero_optimization", zero}};
  if (config.bf16) file["bf16"] = {{"enabled", true}};
  if (config.fp16) file["fp16"] = {{"enabled", true}};
  if (config.autocast.enabled) {
    const bool half = config.autocast.dtype == AutocastDtype::fp16;
    file["torch_autocast"] = {{"enabled", true}, {"dtype", half ? "float16" : "bfloat16"}};
  }
  if (config.optimizer_states == optim::StateFormat::eight_bit)
    file["data_types"] = {{"optimizer_state_dtype", "8bit"}};
  if (config.update_in_backward) {
    file["update_in_backward"] = true;
    file["gradient_clipping"] = 0;
  }
  if (config.optimizer && !std::holds_alternative<AdamW>(*config.optimizer))
    file["optimizer"] = Json::parse(dump(*config.optimizer));
  if (candidate.recompute > 0) file["activation_checkpointing"] = {{"every", candidate.recompute}};
  return file.dump(2) + "\n";
}

}  // namespace zero::plan
