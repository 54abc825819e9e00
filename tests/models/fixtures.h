// The small models that transformers saved in tests/models/fixtures, and what it computed with
// them.
#pragma once

#include <fmt/format.h>

#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/safetensors.h"

namespace zero::fixtures {

inline std::filesystem::path folder(const std::string& model) {
  return std::filesystem::path(ZERO_SOURCE) / "tests/models/fixtures" / model;
}

inline std::vector<std::string> models() {
  return {"llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma", "gemma3"};
}

inline nlohmann::json config(const std::string& model) {
  std::ifstream file(folder(model) / "config.json");
  return nlohmann::json::parse(std::string(std::istreambuf_iterator<char>(file), {}));
}

/// A config.json with what transformers computed.
struct Variant {
  std::string name;
  std::string config;
  at::Tensor tokens;
  at::Tensor targets;  ///< each the next token; the last is ignored
  at::Tensor logits;
  at::Tensor logits_bf16;
  double loss = 0;
  at::Tensor gradients;  ///< (parameters by name, 2): norm, and product with sin(1), sin(2), ...
};

inline std::vector<Variant> variants(const std::string& model) {
  const SafetensorsReader expected(folder(model) / "expected.safetensors");
  const auto tokens = expected.read("tokens");
  const auto targets = tokens.roll(-1, 1);
  targets.select(1, -1).fill_(-100);
  std::vector<Variant> all;
  for (const auto& [name, changes] : expected.metadata()) {
    auto object = config(model);
    object.update(nlohmann::json::parse(changes));
    all.push_back({fmt::format("{} {}", model, name), object.dump(), tokens, targets,
                   expected.read(name + ".logits"), expected.read(name + ".logits_bf16"),
                   expected.read(name + ".loss").item<double>(),
                   expected.read(name + ".gradients")});
  }
  return all;
}

}  // namespace zero::fixtures
