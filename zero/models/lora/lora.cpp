#include "zero/models/lora/lora.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <regex>
#include <set>
#include <unordered_map>
#include <utility>

#include "zero/base/error.h"
#include "zero/models/layers/low_rank.h"
#include "zero/models/layers/projection.h"
#include "zero/models/layers/replace_linears.h"

namespace zero {
namespace {

namespace nn = torch::nn;

constexpr std::string_view kAllLinear = "all-linear";
// The layers that peft takes where nothing is said, in the models that libzero has.
constexpr std::array kUsual{"q_proj", "v_proj", "c_attn", "query", "value"};

std::regex compiled(const std::string& expression) {
  try {
    return std::regex(expression, std::regex::ECMAScript);
  } catch (const std::regex_error& error) {
    throw ConfigError(fmt::format(
        "The pattern '{}' of names is no regular expression of ECMAScript: {}. Give names that are "
        "separated by commas, or another expression.",
        expression, error.what()));
  }
}

bool ends_with_name(std::string_view path, std::string_view name) {
  return path == name ||
         (path.ends_with(name) && path.substr(0, path.size() - name.size()).ends_with('.'));
}

/// Tells which paths a pattern names, and remembers the names that were found.
class Matcher {
 public:
  Matcher(NamePattern pattern, std::string prefix)
      : pattern_(std::move(pattern)), prefix_(std::move(prefix)) {
    if (!pattern_.expression.empty()) expression_ = compiled(pattern_.expression);
  }

  bool matches(const std::string& path) {
    if (path.empty()) return false;
    const auto published = prefix_ + path;
    if (!pattern_.expression.empty()) {
      const bool fits =
          std::regex_match(path, expression_) || std::regex_match(published, expression_);
      found_ = found_ || fits;
      return fits;
    }
    bool fits = false;
    for (const auto& name : pattern_.names) {
      if (!ends_with_name(published, name)) continue;
      seen_.insert(name);
      fits = true;
    }
    return fits;
  }

  /// Returns what of the pattern nothing has matched.
  std::vector<std::string> missing() const {
    if (!pattern_.expression.empty())
      return found_ ? std::vector<std::string>() : std::vector{pattern_.expression};
    std::vector<std::string> names;
    for (const auto& name : pattern_.names) {
      if (!seen_.contains(name)) names.push_back(name);
    }
    return names;
  }

 private:
  NamePattern pattern_;
  std::string prefix_;
  std::regex expression_;
  std::set<std::string> seen_;
  bool found_ = false;
};

/// A module in the tree, once for each of its places.
struct Found {
  std::string path;
  nn::Module* module = nullptr;
  nn::Module* parent = nullptr;
  std::string name;  // in the parent
};

/// Lists the modules below `module`, parents first. Linear layers have nothing below.
void list(nn::Module& module, const std::string& path, std::vector<Found>& all) {
  for (const auto& child : module.named_children()) {
    auto child_path = path.empty() ? child.key() : path + "." + child.key();
    all.push_back({child_path, child.value().get(), &module, child.key()});
    if (dynamic_cast<Adaptable*>(child.value().get()) == nullptr)
      list(*child.value(), child_path, all);
  }
}

/// Returns what may have been meant by a name: paths, and their last parts.
std::vector<std::string> names_of(const std::vector<Found>& modules) {
  std::set<std::string> names;
  for (const auto& module : modules) names.insert({module.path, module.name});
  return {names.begin(), names.end()};
}

NamePattern usual_targets(const std::vector<Found>& modules) {
  NamePattern pattern;
  for (const char* name : kUsual) {
    const bool is_there = std::any_of(modules.begin(), modules.end(),
                                      [&](const Found& module) { return module.name == name; });
    if (is_there) pattern.names.emplace_back(name);
  }
  if (pattern.empty()) {
    throw ConfigError(
        fmt::format("LoRA was asked for without targets, and the model has no module called {}. "
                    "Name the linear "
                    "layers.",
                    fmt::join(kUsual, ", ")));
  }
  return pattern;
}

bool is_linear(const Found& found) {
  return dynamic_cast<Adaptable*>(found.module) != nullptr ||
         dynamic_cast<nn::LinearImpl*>(found.module) != nullptr;
}

/// Counts the modules at and below `module` that hold each parameter.
void count_holders(const nn::Module& module, std::set<const nn::Module*>& visited,
                   std::unordered_map<const c10::TensorImpl*, int64_t>& counts) {
  if (!visited.insert(&module).second) return;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false))
    ++counts[parameter.value().unsafeGetTensorImpl()];
  for (const auto& child : module.children()) count_holders(*child, visited, counts);
}

std::vector<Found> targets_of(const nn::Module& root, const std::vector<Found>& modules,
                              const LoraSettings& settings) {
  const auto pattern = settings.targets.empty() ? usual_targets(modules) : settings.targets;
  Matcher matcher(pattern, settings.prefix);
  Matcher saved({.names = settings.modules_to_save}, settings.prefix);
  std::string saved_path;  // of the saved module that was met last; those below follow it
  std::vector<Found> targets;
  for (const auto& found : modules) {
    bool is_saved = !saved_path.empty() && found.path.starts_with(saved_path);
    if (saved.matches(found.path) && !is_saved) {
      saved_path = found.path + ".";
      is_saved = true;
    }
    const bool wanted =
        pattern.all_linear ? is_linear(found) && !is_saved : matcher.matches(found.path);
    if (!wanted) continue;
    if (dynamic_cast<EmbeddingTableImpl*>(found.module) != nullptr) {
      throw ConfigError(fmt::format(
          "LoRA's target '{}' is a table of embeddings or an output projection, which gets no "
          "low-rank product here. Leave it out of the targets, or train it whole "
          "(--lora-modules-to-save, modules_to_save).",
          found.path));
    }
    if (!is_linear(found)) {
      throw ConfigError(
          fmt::format("LoRA's target '{}' is no linear layer, but a {}. Name linear layers.",
                      found.path, c10::demangle(typeid(*found.module).name())));
    }
    const auto* own = dynamic_cast<Adaptable*>(found.module);
    if (settings.dora && own != nullptr && own->adapted_weights().front().name != "weight") {
      throw ConfigError(fmt::format(
          "DoRA's target '{}' is in tiles, which do not have whole rows. Leave the tiles out "
          "(--tile-elements).",
          found.path));
    }
    targets.push_back(found);
  }
  const auto missing = matcher.missing();
  if (!missing.empty() && !pattern.expression.empty()) {
    const auto linear = std::find_if(modules.begin(), modules.end(), is_linear);
    throw ConfigError(fmt::format(
        "LoRA's targets are the regular expression '{}', which fits no module's whole path{}. Give "
        "another, or a list of names, which are the ends of paths (target_modules: [\"q_proj\"]).",
        pattern.expression,
        linear == modules.end() ? "" : fmt::format(" ('{}')", settings.prefix + linear->path)));
  }
  const bool some_fit = settings.names_may_miss && !targets.empty();
  if (!missing.empty() && !pattern.all_linear && !some_fit) {
    throw ConfigError(fmt::format("LoRA's target '{}' fits no module of the model.{}",
                                  missing.front(),
                                  did_you_mean(missing.front(), names_of(modules))));
  }
  if (targets.empty()) throw ConfigError("LoRA was asked for, but the model has no linear layer.");
  std::set<const nn::Module*> visited;
  std::unordered_map<const c10::TensorImpl*, int64_t> counts;
  count_holders(root, visited, counts);
  for (const auto& target : targets) {
    for (const auto& parameter : target.module->named_parameters()) {
      const auto& name = parameter.key();
      if (counts[parameter.value().unsafeGetTensorImpl()] < 2 || name.ends_with("bias")) continue;
      throw ConfigError(fmt::format(
          "LoRA's target '{}' shares its weight with another module, so that a merged weight would "
          "change that too. Leave it out of the targets.",
          target.path));
    }
  }
  return targets;
}

std::vector<std::string> parameters_of(const std::vector<Found>& modules,
                                       const LoraSettings& settings,
                                       const std::vector<Found>& targets) {
  Matcher matcher({.names = settings.modules_to_save}, settings.prefix);
  std::vector<std::string> names;
  for (const auto& found : modules) {
    if (!matcher.matches(found.path)) continue;
    for (const auto& target : targets) {
      if (target.path == found.path || target.path.starts_with(found.path + ".")) {
        throw ConfigError(fmt::format(
            "'{}' is among LoRA's modules_to_save, but '{}' is a target. A module is either.",
            found.path, target.path));
      }
    }
    for (const auto& parameter : found.module->named_parameters()) {
      auto name = found.path + "." + parameter.key();
      // A module and one below it may both be named.
      if (std::find(names.begin(), names.end(), name) == names.end())
        names.push_back(std::move(name));
    }
  }
  const bool some_fit = settings.names_may_miss && !names.empty();
  if (const auto missing = matcher.missing(); !missing.empty() && !some_fit) {
    throw ConfigError(
        fmt::format("'{}' of LoRA's modules_to_save fits no module of the model.{} (A tied output "
                    "projection is "
                    "no module of its own.)",
                    missing.front(), did_you_mean(missing.front(), names_of(modules))));
  }
  return names;
}

/// Replaces the targets that are torch::nn::Linear.
void replace(std::vector<Found>& targets) {
  std::vector<LinearPlace> places;
  for (const auto& target : targets) {
    if (auto* layer = dynamic_cast<nn::LinearImpl*>(target.module))
      places.push_back({target.parent, target.name, target.path, layer});
  }
  check_replaceable(places, "given LoRA",
                    "make it a zero::Projection(zero::ProjectionOptions{.in = ..., .out = ...})");
  if (places.empty()) return;
  replace_linears(
      places, [](const nn::LinearImpl& layer) { return std::make_shared<ProjectionImpl>(layer); });
  for (auto& target : targets) target.module = target.parent->named_children()[target.name].get();
}

}  // namespace

NamePattern NamePattern::parse(std::string_view text) {
  if (text == kAllLinear) return {.all_linear = true};
  if (text.find_first_of("()[]{}|*+?^$\\") != std::string_view::npos) {
    NamePattern pattern{.expression = std::string(text)};
    (void)compiled(pattern.expression);
    return pattern;
  }
  NamePattern pattern;
  while (!text.empty()) {
    const auto comma = text.find(',');
    auto name = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    while (name.starts_with(' ')) name.remove_prefix(1);
    while (name.ends_with(' ')) name.remove_suffix(1);
    if (!name.empty()) pattern.names.emplace_back(name);
  }
  return pattern;
}

std::string NamePattern::text() const {
  if (all_linear) return std::string(kAllLinear);
  return expression.empty() ? fmt::format("{}", fmt::join(names, ",")) : expression;
}

double LoraSettings::scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (rslora ? std::sqrt(r) : r);
}

void LoraSettings::validate() const {
  if (rank < 1)
    throw ConfigError(fmt::format("The rank of LoRA is {}; it must be positive.", rank));
  if (!(alpha > 0 && std::isfinite(alpha)))
    throw ConfigError(fmt::format("The alpha of LoRA is {}; it must be positive.", alpha));
  if (!(dropout >= 0 && dropout < 1)) {
    throw ConfigError(
        fmt::format("The dropout of LoRA is {}; it must be at least 0 and less than 1.", dropout));
  }
}

int64_t Lora::elements() const {
  int64_t sum = 0;
  for (const auto& layer : layers)
    sum += settings.rank * (layer.in + layer.out) + (settings.dora ? layer.out : 0);
  return sum;
}

std::vector<std::string> Lora::added(const LoraLayer& layer) const {
  std::vector names{layer.a(), layer.b()};
  if (settings.dora) names.push_back(layer.magnitude());
  return names;
}

Lora add_lora(torch::nn::Module& root, const LoraSettings& settings) {
  settings.validate();
  for (const auto& parameter : root.named_parameters()) {
    if (parameter.key().find(".lora_A.") == std::string::npos) continue;
    throw ConfigError(
        fmt::format("The model has LoRA already: '{}'. A layer has one adapter.", parameter.key()));
  }
  std::vector<Found> modules;
  list(root, "", modules);
  auto targets = targets_of(root, modules, settings);
  Lora lora{.settings = settings,
            .layers = {},
            .saved_parameters = parameters_of(modules, settings, targets)};
  if (lora.settings.targets.empty()) lora.settings.targets = usual_targets(modules);
  replace(targets);

  for (auto& parameter : root.parameters()) parameter.set_requires_grad(false);
  const auto by_name = root.named_parameters();
  for (const auto& name : lora.saved_parameters) {
    const auto& parameter = by_name[name];
    parameter.set_requires_grad(true);
  }
  std::set<const nn::Module*> done;  // a layer may have several places
  for (const auto& target : targets) {
    if (!done.insert(target.module).second) continue;
    auto& layer = dynamic_cast<Adaptable&>(*target.module);
    layer.adapt({.rank = settings.rank,
                 .scale = settings.scale(),
                 .dropout = settings.dropout,
                 .magnitude = settings.dora});
    lora.in_out = lora.in_out || layer.in_out();
    LoraLayer added{target.path, layer.in_features(), layer.out_features(), {}};
    for (const auto& part : layer.adapted_weights()) {
      added.weights.push_back(
          {target.path + "." + part.name, part.out_begin, part.in_begin, part.in_out});
    }
    lora.layers.push_back(std::move(added));
  }
  return lora;
}

int64_t freeze(torch::nn::Module& root, const NamePattern& pattern) {
  if (pattern.all_linear) {
    throw ConfigError(
        "Parameters are frozen by their names; 'all-linear' is for LoRA's targets alone.");
  }
  Matcher matcher(pattern, "");
  int64_t count = 0;
  for (const auto& parameter : root.named_parameters()) {
    const auto& name = parameter.key();
    bool fits = matcher.matches(name);
    for (auto dot = name.rfind('.'); !fits && dot != std::string::npos && dot > 0;
         dot = name.rfind('.', dot - 1))
      fits = matcher.matches(name.substr(0, dot));
    if (!fits) continue;
    auto tensor = parameter.value();
    tensor.set_requires_grad(false);
    ++count;
  }
  if (const auto missing = matcher.missing(); !missing.empty()) {
    std::vector<std::string> names;
    for (const auto& parameter : root.named_parameters()) names.push_back(parameter.key());
    throw ConfigError(fmt::format("No parameter of the model fits '{}', which was to be frozen.{}",
                                  missing.front(), did_you_mean(missing.front(), names)));
  }
  return count;
}

}  // namespace zero
