// The rows of the section `optimizer`. Those of its `params` are in the folder optimizers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string>

#include "zero/base/error.h"
#include "zero/config/fields.h"
#include "zero/optim/algorithm.h"

namespace zero::fields {

namespace {

/// The values of the section itself.
struct Section {
  std::string type = "AdamW";
  Json params = Json::object();
};

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

/// Returns every name of every optimizer.
std::vector<std::string> known_names() {
  std::vector<std::string> names;
  optim::for_each_algorithm([&](const auto& kind) {
    using T = std::remove_cvref_t<decltype(kind)>;
    for (const auto& each : optimizer_section<T>().names) names.emplace_back(each.name);
  });
  return names;
}

[[noreturn]] void refuse_type(const std::string& type) {
  if (lower(type).starts_with("mu") && lower(type) != "muon") {
    throw ConfigError(fmt::format(
        "optimizer.type is \"{}\", whose rates depend on a parametrisation (muP) that the model "
        "itself must have. Use \"{}\" with a parameter group for each rate (zero::ParameterGroup).",
        type, lower(type) == "musgd" ? "SGD" : "AdamW"));
  }
  const auto names = known_names();
  throw ConfigError(fmt::format(
      "optimizer.type is {}; it must be one of {}, in any case.{} Any torch::optim::Optimizer runs "
      "sharded in zero::ZeroRedundancyOptimizer.",
      show(type), fmt::join(names, ", "), type.size() < 64 ? did_you_mean(type, names) : ""));
}

template <class T>
T read_as(const OptimizerName<T>& name, const Json& params, Report& report) {
  auto optimizer = name.defaults;
  read(optimizer, hyper_parameters<T>(), params, "optimizer.params.", report);
  if (name.settle != nullptr) name.settle(optimizer);
  if (name.approximation) {
    report.add({.key = "optimizer.type",
                .effect = Effect::acts,
                .text = fmt::format(
                    "libzero runs the exact {}, which {} approximates; nothing is compressed, and "
                    "its compression keys have no effect. zero_quantized_gradients sends gradients "
                    "between hosts in fewer bits.",
                    optim::name(optimizer), name.name)});
  }
  return optimizer;
}

}  // namespace

Optimizer read_optimizer(const Json& section, Report& report) {
  static const std::vector<Field<Section>> rows{
      field<Section>("type", {.sentence = ""}, &Section::type),
      accepted<Section, bool>("legacy_fusion", {.sentence = "Accepted, without effect",
                                                .details = "It is of DeepSpeed's fp16 optimizer.",
                                                .holds = {false}}),
      {Spec{"params", {.sentence = ""}, Kind::section},
       [](Section& read_into, const Json& value) { read_into.params = value; }}};
  Section named;
  read(named, rows, section, "optimizer.", report);
  std::optional<Optimizer> found;
  optim::for_each_algorithm([&](const auto& kind) {
    using T = std::remove_cvref_t<decltype(kind)>;
    for (const auto& name : optimizer_section<T>().names) {
      if (lower(name.name) == lower(named.type)) found = read_as<T>(name, named.params, report);
    }
  });
  if (!found) refuse_type(named.type);
  return *found;
}

bool stands_for_parameter(std::string_view option, std::string_view key) {
  // --beta1 and --beta2 set parts of a value, which have no keys of their own.
  if (key == "betas" && (option == "--beta1" || option == "--beta2")) return true;
  return [&]<class... Chosen>(const std::variant<Chosen...>*) {
    const auto among = [&](const auto& rows) {
      for (const auto& row : rows) {
        if (row.about.option == option && row.key == key) return true;
      }
      return false;
    };
    return (among(hyper_parameters<Chosen>()) || ...);
  }(static_cast<const Optimizer*>(nullptr));
}

Json write_optimizer(const Optimizer& optimizer) {
  return std::visit(
      [&](const auto& chosen) {
        using Chosen = std::remove_cvref_t<decltype(chosen)>;
        return Json{{"type", std::string(optim::name(optimizer))},
                    {"params", write(chosen, hyper_parameters<Chosen>())}};
      },
      optimizer);
}

}  // namespace zero::fields
