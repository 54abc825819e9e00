#include "zero/models/bert/bert_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/models/language/config_checks.h"
#include "zero/models/language/config_reader.h"
#include "zero/models/layers/activation.h"

namespace zero {
namespace {

constexpr std::string_view kClassifier = "BertForSequenceClassification";

Head head_of(const ConfigReader& read) {
  if (!read.has("architectures")) return Head::masked_token;
  const auto& list = read.object().at("architectures");
  const bool classifies = list.is_array() && std::ranges::any_of(list, [](const auto& each) {
                            return each == std::string(kClassifier);
                          });
  return classifies ? Head::classes : Head::masked_token;
}

/// The names of id2label by their numbers; without it those of num_labels, or two.
std::vector<std::string> labels_of(const ConfigReader& read) {
  if (!read.has("id2label")) {
    const auto count = read.get<int64_t>("num_labels", 2);
    check_size("BERT", "num_labels", count, 1 << 20);
    return class_names(count);
  }
  const auto& object = read.object().at("id2label");
  const auto refuse = [&] {
    throw ConfigError(fmt::format(
        "{}: key 'id2label' is {}, which is no object of the numbers from 0 on and names.",
        read.source(), excerpt(object.dump())));
  };
  if (!object.is_object() || object.empty()) refuse();
  std::vector<std::string> labels;
  for (size_t i = 0; i < object.size(); ++i) {
    const auto found = object.find(std::to_string(i));
    if (found == object.end() || !found->is_string()) refuse();
    labels.push_back(found->get<std::string>());
  }
  return labels;
}

}  // namespace

void BertConfig::validate() const {
  check_sizes("BERT", {{"vocab_size", vocab_size, LargestSizes::vocabulary},
                       {"max_position_embeddings", context, LargestSizes::context},
                       {"hidden_size", width, LargestSizes::width},
                       {"intermediate_size", inner, LargestSizes::inner},
                       {"num_hidden_layers", layers, LargestSizes::layers},
                       {"num_attention_heads", heads, LargestSizes::heads},
                       {"type_vocab_size", types, LargestSizes::vocabulary}});
  if (width % heads != 0) {
    throw ConfigError(
        fmt::format("BERT's hidden_size of {} is not a multiple of its num_attention_heads of {}.",
                    width, heads));
  }
  check_probability("BERT", "hidden_dropout_prob", hidden_dropout);
  check_probability("BERT", "attention_probs_dropout_prob", attention_dropout);
  if (classifier_dropout >= 0) check_probability("BERT", "classifier_dropout", classifier_dropout);
  const auto& known = activation_names();
  if (std::find(known.begin(), known.end(), activation) == known.end()) {
    throw ConfigError(fmt::format("BERT's hidden_act is '{}', and only {} are supported.",
                                  activation, fmt::join(known, ", ")));
  }
  if (!(norm_eps > 0))
    throw ConfigError(fmt::format("BERT's layer_norm_eps is {}; it must be positive.", norm_eps));
  if (!(initializer_range >= 0)) {
    throw ConfigError(
        fmt::format("BERT's initializer_range is {}; it must not be negative.", initializer_range));
  }
  if (padding >= vocab_size) {
    throw ConfigError(
        fmt::format("BERT's pad_token_id is {}, which its vocabulary of {} tokens does not have.",
                    padding, vocab_size));
  }
  if (head == Head::classes && labels.size() < 2) {
    throw ConfigError(fmt::format(
        "BERT's id2label has {} classes; a classification has at least two, and the regression "
        "that transformers makes of one is not computed.",
        labels.size()));
  }
  if (std::set(labels.begin(), labels.end()).size() != labels.size())
    throw ConfigError("BERT's id2label has one name for two classes.");
}

std::vector<std::array<int64_t, 2>> BertConfig::matrices() const {
  std::vector<std::array<int64_t, 2>> all{{vocab_size, width}, {context, width}, {types, width}};
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int i = 0; i < 4; ++i) all.push_back({width, width});
    all.insert(all.end(), {{inner, width}, {width, inner}});
  }
  all.push_back({width, width});  // of the pooler, or of the transform before the tokens
  if (head == Head::classes) all.push_back({static_cast<int64_t>(labels.size()), width});
  return all;
}

int64_t BertConfig::parameter_count() const {
  const int64_t layer = 4 * width + inner + width + 4 * width;  // biases, and two norms
  int64_t count = layers * layer + 2 * width;
  count +=
      head == Head::classes ? width + static_cast<int64_t>(labels.size()) : 3 * width + vocab_size;
  for (const auto [rows, columns] : matrices()) count += rows * columns;
  return count;
}

BertConfig BertConfig::from_json(std::string_view json, std::string_view source) {
  const ConfigReader read(json, source);
  std::set<std::string_view> known;
  // Models of several languages have keys of a pooler that no class computes.
  known.insert({"model_type", "position_embedding_type", "directionality", "pooler_fc_size",
                "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
                "pooler_type", "tie_word_embeddings"});
  const auto get = [&]<typename T>(const char* key, T fallback) {
    known.insert(key);
    return read.get<T>(key, fallback);
  };
  read.require<std::string>("model_type", "bert");
  read.require<std::string>("position_embedding_type", "absolute");
  read.require<std::string>("problem_type", "single_label_classification");

  BertConfig config;
  config.head = head_of(read);
  config.labels = labels_of(read);
  config.vocab_size = get("vocab_size", config.vocab_size);
  config.context = get("max_position_embeddings", config.context);
  config.width = get("hidden_size", config.width);
  config.inner = get("intermediate_size", config.inner);
  config.layers = get("num_hidden_layers", config.layers);
  config.heads = get("num_attention_heads", config.heads);
  config.types = get("type_vocab_size", config.types);
  config.activation = activation_called(get("hidden_act", config.activation));
  config.norm_eps = get("layer_norm_eps", config.norm_eps);
  config.hidden_dropout = get("hidden_dropout_prob", config.hidden_dropout);
  config.attention_dropout = get("attention_probs_dropout_prob", config.attention_dropout);
  if (read.has("classifier_dropout")) {
    config.classifier_dropout = get("classifier_dropout", config.classifier_dropout);
    check_probability("BERT", "classifier_dropout", config.classifier_dropout);
  }
  config.initializer_range = get("initializer_range", config.initializer_range);
  if (read.object().contains("pad_token_id"))
    config.padding = read.has("pad_token_id") ? read.get("pad_token_id", config.padding) : -1;
  if (config.head == Head::masked_token) read.require("tie_word_embeddings", true);
  read.refuse_others(known);
  read.validate(config);
  return config;
}

std::string BertConfig::to_json() const {
  using Json = nlohmann::ordered_json;
  Json object{{"model_type", "bert"},
              {"architectures", {head == Head::classes ? kClassifier : "BertForMaskedLM"}},
              {"vocab_size", vocab_size},
              {"max_position_embeddings", context},
              {"hidden_size", width},
              {"intermediate_size", inner},
              {"num_hidden_layers", layers},
              {"num_attention_heads", heads},
              {"type_vocab_size", types},
              {"hidden_act", activation},
              {"layer_norm_eps", norm_eps},
              {"hidden_dropout_prob", hidden_dropout},
              {"attention_probs_dropout_prob", attention_dropout},
              {"classifier_dropout", classifier_dropout < 0 ? Json() : Json(classifier_dropout)},
              {"initializer_range", initializer_range},
              {"pad_token_id", padding < 0 ? Json() : Json(padding)}};
  auto names = Json::object();
  auto numbers = Json::object();
  for (size_t i = 0; i < labels.size(); ++i) {
    names[std::to_string(i)] = labels[i];
    numbers[labels[i]] = i;
  }
  object["id2label"] = std::move(names);
  object["label2id"] = std::move(numbers);
  return object.dump(2) + "\n";
}

}  // namespace zero
