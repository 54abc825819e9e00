#include "zero/train/options.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "zero/base/error.h"

namespace zero::train {
namespace {

using Json = nlohmann::ordered_json;

void require(bool holds, std::string_view key, const auto& value, std::string_view wanted) {
  if (holds) return;
  throw ConfigError(fmt::format("The option '{}' is {}; it should be {}.", key, value, wanted));
}

template <class Value>
constexpr std::string_view type_name() {
  if constexpr (std::is_same_v<Value, bool>) return "true or false";
  if constexpr (std::is_integral_v<Value>) return "a whole number";
  if constexpr (std::is_floating_point_v<Value>) return "a number";
  return "a string";
}

template <class Value>
bool fits(const Json& json) {
  if constexpr (std::is_same_v<Value, bool>) return json.is_boolean();
  if constexpr (std::is_integral_v<Value>) return json.is_number_integer();
  if constexpr (std::is_floating_point_v<Value>) return json.is_number();
  return json.is_string();
}

}  // namespace

optim::Decay decay_from(std::string_view name) {
  if (name == "constant") return optim::Decay::constant;
  if (name == "linear") return optim::Decay::linear;
  if (name == "cosine") return optim::Decay::cosine;
  throw ConfigError(
      fmt::format("The schedule is '{}'; it should be constant, linear or cosine.{}", name,
                  did_you_mean(name, std::vector<std::string>{"constant", "linear", "cosine"})));
}

void Options::validate() const {
  require(!data.empty(), "data", "empty",
          "a text or token file, or a folder made by `zero data prepare`");
  require(!out.empty(), "out", "empty", "a folder");
  require(vocab_size >= 0, "vocab_size", vocab_size, "at least 0");
  require(seq >= 1, "seq", seq, "at least 1");
  require(steps >= 1, "steps", steps, "at least 1");
  require(std::isfinite(min_lr), "min_lr", min_lr, "a number");
  require(warmup <= steps, "warmup", warmup, fmt::format("at most the number of steps, {}", steps));
  decay_from(schedule);
  require(dropout < 1, "dropout", dropout, "below 1");
  require(threads >= 0, "threads", threads, "at least 0");
  require(eval_every >= 0, "eval_every", eval_every, "at least 0");
  require(eval_tokens >= 0, "eval_tokens", eval_tokens, "at least 0");
  require(log_every >= 1, "log_every", log_every, "at least 1");
  require(save_every >= 0, "save_every", save_every, "at least 0");
  require(sample_tokens >= 0, "sample_tokens", sample_tokens, "at least 0");
  require(!prompt.empty() || sample_tokens == 0, "prompt", "empty",
          "a text to continue, or 'sample_tokens' 0");
  require(temperature >= 0 && std::isfinite(temperature), "temperature", temperature, "at least 0");
  require(top_k >= 0, "top_k", top_k, "at least 0");
  require(!(overwrite && resume), "overwrite", "given together with resume", "one of the two");
}

void refuse_eval_batches() {
  throw ConfigError(
      "The option 'eval_batches' is replaced by 'eval_tokens' (--eval-tokens): the tokens of a "
      "validation, which no longer depend on the ranks and the micro-batch; 0: no validation.");
}

void read_options(Options& options, std::string_view json, std::string_view origin) {
  Json file;
  try {
    file = Json::parse(json, nullptr, true, true);
  } catch (const Json::exception& error) {
    throw ConfigError(fmt::format("{} is not JSON: {}.", origin, error.what()));
  }
  if (!file.is_object() || !file.contains("train")) return;
  const auto& section = file["train"];
  if (!section.is_object()) {
    throw ConfigError(
        fmt::format("{}: 'train' should be an object, not {}.", origin, section.dump()));
  }
  std::vector<std::string> known;
  for_each_field(options, [&](std::string_view key, auto& member, std::string_view) {
    known.emplace_back(key);
    const auto found = section.find(key);
    if (found == section.end()) return;
    using Value = std::remove_cvref_t<decltype(member)>;
    if (!fits<Value>(*found)) {
      throw ConfigError(fmt::format("{}: 'train.{}' is {}; it should be {}.", origin, key,
                                    found->dump(), type_name<Value>()));
    }
    member = found->template get<Value>();
  });
  for (const auto& [key, value] : section.items()) {
    if (key == "eval_batches") refuse_eval_batches();
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    throw ConfigError(
        fmt::format("{}: 'train' has no key '{}'.{}", origin, key, did_you_mean(key, known)));
  }
}

std::string dump(const Options& options) {
  Json section = Json::object();
  for_each_field(options, [&](std::string_view key, const auto& member, std::string_view) {
    section[key] = member;
  });
  return section.dump(2);
}

}  // namespace zero::train
