#include "zero/train/tuning.h"

#include <ATen/ceil_div.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/class_names.h"
#include "zero/base/error.h"
#include "zero/models/layers/initial_values.h"
#include "zero/models/lora/quantised_base.h"
#include "zero/train/adapter_files.h"

namespace zero::train {
namespace {

LoraSettings settings_of(const LoraOptions& options) {
  if (!options.adapter.empty()) return read_adapter_config(options.adapter);
  return {.rank = *options.rank,
          .alpha = options.alpha,
          .rslora = options.rslora,
          .dropout = options.dropout,
          .dora = options.dora,
          .targets = NamePattern::parse(options.targets),
          .modules_to_save = NamePattern::parse(options.modules_to_save).names};
}

}  // namespace

std::optional<Lora> choose_trained(LanguageModel& model, const Options& options) {
  auto& module = model.module();
  if (!options.freeze.empty()) {
    freeze(module, NamePattern::parse(options.freeze));
    const auto parameters = module.parameters();
    if (std::none_of(parameters.begin(), parameters.end(),
                     [](const at::Tensor& each) { return each.requires_grad(); })) {
      throw ConfigError(fmt::format(
          "--freeze {} freezes every parameter, so that nothing is left to train. Name fewer, or "
          "train an adapter (--lora-rank).",
          options.freeze));
    }
  }
  if (!options.lora.on()) return std::nullopt;
  auto settings = settings_of(options.lora);
  settings.prefix = model.path_prefix();
  // A new head would stay as it was drawn.
  if (model.config().head() == Head::classes && options.lora.adapter.empty() &&
      settings.modules_to_save.empty())
    settings.modules_to_save = {"classifier", "pooler"};
  auto lora = add_lora(module, settings);
  for (const auto& [name, tied] : model.tied_names()) {
    const auto& saved = lora.saved_parameters;
    if (std::find(saved.begin(), saved.end(), tied) == saved.end()) continue;
    throw ConfigError(fmt::format(
        "LoRA's modules_to_save has '{}', which the model ties to '{}'; other programs would train "
        "a copy of it alone. Leave it out, or untie them (tie_word_embeddings in config.json).",
        tied, name));
  }
  if (options.lora.quantize_base != BaseFormat::as_they_are)
    quantise_frozen(module, options.lora.quantize_base);
  return lora;
}

void choose_head_of_adapter(LanguageModelConfig& sizes, const Options& options) {
  const auto& adapter = options.lora.adapter;
  if (adapter.empty()) return;
  auto labels = read_adapter_labels(adapter);
  if (labels.empty() && sizes.head() != Head::classes) {
    // peft leaves the names to the program that builds its model, which calls them so.
    labels = class_names(read_adapter_classes(adapter));
  }
  if (!labels.empty()) sizes.set_head(Head::classes, std::move(labels));
}

ParameterCounts ParameterCounts::by_memory(int64_t element_bytes) const {
  const int64_t instead = at::ceil_div(packed_bytes, element_bytes);
  return {.all = all - packed + instead, .frozen = frozen - packed + instead};
}

ParameterCounts count_parameters(const torch::nn::Module& model) {
  ParameterCounts counts;
  for (const auto& parameter : model.parameters()) {
    counts.all += parameter.numel();
    if (!parameter.requires_grad()) counts.frozen += parameter.numel();
  }
  const auto by_name = model.named_parameters();
  for (const auto& [name, matrix] : quantised_weights(model)) {
    counts.format = matrix.format;
    counts.packed += c10::multiply_integers(matrix.sizes);
    counts.packed_bytes += by_name[name].numel();
  }
  counts.all += counts.packed - counts.packed_bytes;
  counts.frozen += counts.packed - counts.packed_bytes;
  return counts;
}

ParameterCounts count_parameters(const Options& options, const LanguageModelConfig& sizes) {
  if (options.freeze.empty() && !options.lora.on()) return {.all = sizes.parameter_count()};
  const WithoutValues none;
  const auto model = sizes.build();
  (void)choose_trained(*model, options);
  return count_parameters(model->module());
}

std::string describe_trained(const torch::nn::Module& model, const std::optional<Lora>& lora) {
  const auto counts = count_parameters(model);
  if (counts.frozen == 0) return {};
  auto trained =
      fmt::format("{} of {} parameters are trained", counts.all - counts.frozen, counts.all);
  if (!lora) return trained;
  if (counts.packed > 0) {
    trained += fmt::format(
        ", {} are kept in {} ({:.3f} bits each)", counts.packed, name_of(counts.format),
        8 * static_cast<double>(counts.packed_bytes) / static_cast<double>(counts.packed));
  }
  return fmt::format("LoRA of rank {} in {} layers, {}", lora->settings.rank, lora->layers.size(),
                     trained);
}

}  // namespace zero::train
