// A model of the fixtures that is fine-tuned by LoRA, for the tests of it.
#pragma once

#include <torch/utils.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/models/fixtures.h"
#include "zero/engine/engine.h"
#include "zero/engine/pretrained.h"
#include "zero/models/architectures.h"
#include "zero/models/layers/initial_values.h"
#include "zero/models/layers/tiled_linear.h"
#include "zero/models/lora/lora.h"
#include "zero/models/lora/quantised_base.h"
#include "zero/train/adapter_files.h"

namespace zero::fixtures {

inline Config config(int stage, bool bf16 = false) {
  Config result;
  result.stage = stage;
  result.bf16 = bf16;
  result.unit_bytes = 4096;
  result.max_live_parameters = 0;
  return result;
}

/// A model with an adapter, whose engine has read the weights beneath.
struct Tuned {
  Tuned(const std::string& folder, const LoraSettings& settings, Config config,
        std::shared_ptr<comm::Group> group, int64_t tile_elements = 0,
        BaseFormat base = BaseFormat::as_they_are) {
    {
      const WithoutValues none;
      model = language_model_config(folder)->build();
    }
    tile_linears(model->module(), tile_elements);
    {
      // Ranks that are threads share the generator.
      static std::mutex one_at_a_time;
      const std::lock_guard lock(one_at_a_time);
      torch::manual_seed(5);
      lora = add_lora(model->module(), settings);
    }
    if (base != BaseFormat::as_they_are) quantise_frozen(model->module(), base);
    auto tensors = named_tensors(model->module());
    tensors.values_follow = true;
    engine = std::make_unique<Engine>(
        std::move(tensors),
        std::vector{ParameterGroup{.optimizer = AdamW{.lr = 1e-2}, .rest = true}},
        std::move(config), std::move(group));
    load_pretrained(*engine, folder,
                    {.places = model->export_places(),
                     .tied = model->tied_names(),
                     .packed = quantised_weights(model->module()),
                     .added = added_parameters(lora)});
  }
  /// Sets all B, so that the adapter changes what the model computes.
  void draw() {
    for (const auto& layer : lora.layers) {
      const int64_t rank = lora.settings.rank;
      engine->set_parameter(layer.b(),
                            torch::arange(layer.out * rank).sin().view({layer.out, rank}) * 0.1);
    }
  }
  float step(const Variant& data) {
    const auto loss = model->loss(data.tokens, data.targets);
    engine->backward(loss);
    engine->step();
    return loss.item<float>();
  }
  at::Tensor logits(const Variant& data) {
    const at::NoGradGuard no_grad;
    model->module().eval();  // the fixture of GPT-2 has dropout
    return model->logits_last(data.tokens).to(at::kFloat);
  }
  void export_merged(const std::string& folder) {
    save_pretrained(*engine, folder,
                    {.places = model->export_places(),
                     .packed = quantised_weights(model->module()),
                     .merged = merged_products(lora),
                     .config_json = model->config().to_json()});
  }

  std::unique_ptr<LanguageModel> model;
  Lora lora;
  std::unique_ptr<Engine> engine;
};

}  // namespace zero::fixtures
