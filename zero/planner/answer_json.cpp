#include "zero/planner/answer_json.h"

#include <nlohmann/json.hpp>

namespace zero::plan {
namespace {

using Ordered = nlohmann::ordered_json;

Ordered json_of(const Candidate& c) {
  Ordered memory = Ordered::object();
  for (size_t i = 0; i < kCategories; ++i)
    memory[std::string(name(static_cast<Category>(i)))] = c.memory.peaks[i];
  Ordered json = {
      {"configuration", c.words()},
      {"fits", c.fits()},
      {"micro_batch", c.micro_batch},
      {"accumulation", c.config.gradient_accumulation_steps},
      {"stage", c.config.stage},
      {"recomputed", c.recompute > 0},
      {"device_bytes", c.memory.device},
      {"host_bytes", c.memory.host},
      {"disk_bytes", c.memory.disk},
      {"memory", memory},
      {"lacks", {{"device", c.device_lacks}, {"host", c.host_lacks}, {"disk", c.disk_lacks}}}};
  if (c.fits()) {
    json["step_seconds"] = {{"total", c.time.seconds},   {"compute", c.time.compute},
                            {"gather", c.time.gather},   {"reduce", c.time.reduce},
                            {"offload", c.time.offload}, {"update", c.time.update},
                            {"disk", c.time.disk}};
    json["tokens_per_second"] = c.tokens_per_second;
    json["mfu"] = c.mfu;
  }
  json["ds_config"] = Ordered::parse(ds_config(c));
  return json;
}

Ordered json_of(const Training& training) {
  Ordered json = {{"tokens", training.tokens},
                  {"seconds", training.seconds()},
                  {"device_hours", training.device_hours()},
                  {"goodput", training.goodput}};
  if (training.price > 0) json["cost"] = training.cost();
  return json;
}

}  // namespace

std::string to_json(const Candidate& candidate) { return json_of(candidate).dump(); }

std::string to_json(const Training& training) { return json_of(training).dump(); }

std::string to_json(const ScalePoint& point, const std::optional<Training>& training) {
  auto json = json_of(point.best);
  json["ranks"] = point.ranks;
  if (training) json["training"] = json_of(*training);
  return json.dump();
}

std::string to_json(const Answer& answer) {
  Ordered candidates = Ordered::array();
  for (const auto& candidate : answer.candidates) candidates.push_back(json_of(candidate));
  Ordered bounds = Ordered::array();
  for (const auto& bound : answer.bounds) {
    bounds.push_back({{"operator", bound.name},
                      {"module", bound.module},
                      {"bytes", bound.bytes},
                      {"why", bound.why}});
  }
  return Ordered{{"candidates", candidates},
                 {"parameters", answer.parameters},
                 {"trained", answer.trained},
                 {"zero_or_not", answer.zero_or_not},
                 {"binds", answer.binds},
                 {"helps", answer.helps},
                 {"largest_model", answer.largest_model},
                 {"fewest_devices", answer.fewest_devices},
                 {"bounds", bounds}}
      .dump();
}

}  // namespace zero::plan
