#include "apps/zero/origins.h"

#include <string_view>
#include <utility>

#include "zero/config/settings.h"
#include "zero/train/report_file.h"

namespace zero::app {
namespace {

using fields::Json;

bool stands(const Json& file, const std::string& key) {
  const auto* value = fields::look_up(file, key);
  return value != nullptr && !fields::is_default(*value);
}

/// Adds the origins of the values of `object` that are no defaults, as an object of the same form.
Json origins_of(const Json& object, const std::string& path, const Origins& origins) {
  Json all = Json::object();
  for (const auto& [key, value] : object.items()) {
    if (value.is_object() && !value.empty()) {
      auto inside = origins_of(value, path + key + ".", origins);
      if (!inside.empty()) all[key] = std::move(inside);
    } else if (const auto origin = origins.of(path + key); origin != "default") {
      all[key] = origin;
    }
  }
  return all;
}

class OriginsMonitor final : public train::Monitor {
 public:
  OriginsMonitor(std::string log, Origins origins)
      : log_(std::move(log)), origins_(std::move(origins)) {}

  void begin(const train::RunInfo& info) override {
    auto config = Json::parse(info.config_json);
    from_ = origins_of(config.at("engine"), "", origins_);
    auto train = origins_of(config.at("train"), "train.", origins_);
    if (!train.empty()) from_["train"] = std::move(train);
  }
  // The log's own monitor begins after this one, and replaces an earlier log.
  void step(const train::StepReport&) override {
    if (std::exchange(written_, true)) return;
    const Json line{{"event", "origins"}, {"from", from_}};
    train::ReportFile(log_, "the log")
        .write(line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  }

 private:
  std::string log_;
  Origins origins_;
  Json from_;
  bool written_ = false;
};

}  // namespace

Origins::Origins(Json file, const CommandLine& line, Json saved)
    : file_(std::move(file)), line_(line), saved_(std::move(saved)) {
  if (!saved_.is_null()) defaults_ = Json::parse(Settings{}.dump());
  for (const auto& [row, value] : line.values) fields::put(given_, row->key, value);
}

std::string Origins::of(const std::string& key) const {
  const auto* given = fields::look_up(given_, key);
  if (given != nullptr || said(key)) return "command line";
  if (stands(file_, key)) return "file";
  const bool batch =
      key == "train_micro_batch_size_per_gpu" || key == "gradient_accumulation_steps";
  if (batch && stands(file_, "train_batch_size")) return "file, by train_batch_size";
  // A checkpoint has every setting.
  const auto* saved = fields::look_up(saved_, key);
  const auto* usual = fields::look_up(defaults_, key);
  const bool differs = saved != nullptr && (usual == nullptr || *saved != *usual);
  return differs ? "checkpoint" : "default";
}

/// Returns whether an option of the optimizer gives the key.
bool Origins::said(const std::string& key) const {
  constexpr std::string_view kParams = "optimizer.params.";
  if (!key.starts_with(kParams)) return false;
  for (const auto& [option, value] : line_.hyper_parameters) {
    if (fields::stands_for_parameter(option, std::string_view(key).substr(kParams.size())))
      return true;
  }
  return false;
}

std::unique_ptr<train::Monitor> origins_monitor(const std::string& log, const Origins& origins) {
  return std::make_unique<OriginsMonitor>(log, origins);
}

}  // namespace zero::app
