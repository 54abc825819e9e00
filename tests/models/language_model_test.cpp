#include "zero/models/language/language_model.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <vector>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/models/architectures.h"
#include "zero/models/gpt2/gpt2.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr const char* kTiny =
    R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
        "vocab_size": 50, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})";

TEST(LanguageModels, AreFoundByNameAndByModelType) {
  for (const auto& name : language_model_names()) {
    const auto config = language_model_config(name);
    const auto again = language_model_config_from_json(config->to_json(), name);
    EXPECT_EQ(again->to_json(), config->to_json());
    EXPECT_EQ(again->parameter_count(), config->parameter_count());
  }
  EXPECT_EQ(language_model_config("gpt2")->parameter_count(), 124439808);
  EXPECT_FALSE(language_model_config("gpt2")->takes_vocabulary_of_data());
  EXPECT_TRUE(language_model_config("gpt2-nano")->takes_vocabulary_of_data());
}

// Published files have keys of other programs, and old ones no type.
TEST(LanguageModels, AreReadWithIdleKeysAndByTheirClass) {
  const auto sizes = [](std::string_view begin, std::string_view end) {
    return fmt::format(
        R"({{{}"vocab_size": 40, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 16{}}})",
        begin, end);
  };
  const auto read = [](const std::string& json) {
    return language_model_config_from_json(json, "this.json")->to_json();
  };
  const auto llama = read(sizes(R"("model_type": "llama", )", ""));
  EXPECT_EQ(read(sizes(R"("architectures": ["LlamaForCausalLM"], )",
                       R"(, "is_llama_config": true, "unsloth_version": "2025.1",
                          "transformers.js_config": {"kv_cache_dtype": 1}, "pruned_heads": {})")),
            llama);
  EXPECT_EQ(read(sizes("", R"(, "type_vocab_size": 2, "output_past": true)")),
            read(sizes(R"("model_type": "bert", )", R"(, "type_vocab_size": 2)")));
  EXPECT_THAT([&] { read(sizes("", R"(, "rms_norm_eps": 1e-5)")); },
              ThrowsMessage<ConfigError>(HasSubstr("this.json has no 'model_type'")));
  EXPECT_THAT([&] { read(sizes(R"("model_type": "llama", )", R"(, "rope_interleaved": true)")); },
              ThrowsMessage<ConfigError>(HasSubstr("'rope_interleaved' is true")));
}

TEST(LanguageModels, AreReadFromAFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "sizes.json";
  std::ofstream(path) << kTiny;
  EXPECT_EQ(language_model_config(path)->to_json(),
            language_model_config_from_json(kTiny, "text")->to_json());
  EXPECT_THROW(language_model_config(folder.path().string() + "/"), ConfigError);
}

TEST(LanguageModels, ThatAreNotKnownAreRefusedWithTheNearestAndTheKnownOnes) {
  EXPECT_THAT([] { language_model_config("gpt2-larg"); },
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("Did you mean 'gpt2-large'?"), HasSubstr("gpt2-xl"))));
  EXPECT_THAT([] { language_model_config("./none.json"); },
              ThrowsMessage<ConfigError>(HasSubstr("./none.json cannot be read")));
  const auto of = [](const char* json) {
    return [json] { language_model_config_from_json(json, "this.json"); };
  };
  EXPECT_THAT(of(R"({"model_type": "mamba"})"),
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("this.json"), HasSubstr("\"mamba\""), HasSubstr("\"gpt2\""))));
  EXPECT_THAT(of(R"({"model_type": 3})"), ThrowsMessage<ConfigError>(HasSubstr("is 3")));
  EXPECT_THAT(of("{"), ThrowsMessage<ConfigError>(HasSubstr("this.json is not JSON")));
  EXPECT_THAT(of("[]"), ThrowsMessage<ConfigError>(HasSubstr("must hold a JSON object")));
}

TEST(LanguageModels, ComputeWhatTheirModuleComputes) {
  const auto config = language_model_config_from_json(kTiny, "tiny");
  torch::manual_seed(3);
  const auto model = config->build();
  torch::manual_seed(3);
  Gpt2 direct(Gpt2Config::from_json(kTiny, "tiny"));
  const auto tokens = torch::randint(50, {2, 8}, torch::kLong);
  const auto targets = torch::randint(50, {2, 8}, torch::kLong);
  EXPECT_TRUE(model->loss(tokens, targets).equal(direct->loss(tokens, targets)));
  EXPECT_TRUE(model->logits_last(tokens).equal(direct->logits_last(tokens)));
  const auto layers = model->layers({tokens}, {targets});
  EXPECT_EQ(static_cast<int64_t>(layers.layers.size()), config->layers());
  auto values = layers.inputs().front();
  for (const auto& layer : layers.layers) values = layer(values);
  EXPECT_TRUE(layers.loss(values, 0).equal(direct->loss(tokens, targets)));

  int64_t elements = 0;
  std::vector<std::array<int64_t, 2>> matrices;
  for (const auto& parameter : model->module().parameters()) {
    elements += parameter.numel();
    if (parameter.dim() == 2) matrices.push_back({parameter.size(0), parameter.size(1)});
  }
  EXPECT_EQ(elements, config->parameter_count());
  EXPECT_THAT(config->matrices(), ::testing::UnorderedElementsAreArray(matrices));
  EXPECT_GT(config->activation_bytes(64, 4).layer, config->activation_bytes(64, 2).layer);
}

TEST(LanguageModels, SayWhereTheirTilesLieInWhatOthersRead) {
  const auto config = language_model_config_from_json(kTiny, "tiny");
  const auto model = config->build();
  EXPECT_TRUE(model->export_places().empty());
  std::map<std::string, at::Tensor> whole;
  for (const auto& parameter : model->module().named_parameters())
    whole[parameter.key()] = parameter.value().detach().clone();
  ASSERT_FALSE(tile_linears(model->module(), 100).empty());
  const auto places = model->export_places();
  size_t tiles = 0;
  for (const auto& parameter : model->module().named_parameters()) {
    const auto found = places.find(parameter.key());
    if (found == places.end()) {
      EXPECT_TRUE(whole.at(parameter.key()).equal(parameter.value())) << parameter.key();
      continue;
    }
    ++tiles;
    const auto& place = found->second;
    auto part = whole.at(place.tensor);
    EXPECT_EQ(part.sizes(), at::IntArrayRef(place.sizes));
    const auto value = place.transposed ? parameter.value().t() : parameter.value();
    for (int64_t i = 0; i < value.dim(); ++i)
      part = part.narrow(i, place.offsets[static_cast<size_t>(i)], value.size(i));
    EXPECT_TRUE(part.equal(value)) << parameter.key();
  }
  EXPECT_EQ(tiles, places.size());
}

}  // namespace
}  // namespace zero
