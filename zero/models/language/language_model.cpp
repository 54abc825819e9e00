#include "zero/models/language/language_model.h"

#include <fmt/format.h>

#include "zero/base/error.h"

namespace zero {

void LanguageModelConfig::set_head(Head wanted, std::vector<std::string> /*labels*/) {
  if (wanted == head()) return;
  throw ConfigError(fmt::format(
      "The model ({}) predicts the next token of a text, and has no head for {}. Give a model of "
      "the model_type bert.",
      description(), wanted == Head::classes ? "classes" : "masked tokens"));
}

at::Tensor LanguageModel::logits_next(const at::Tensor& tokens, KeyValueCache& cache) {
  return logits_next_of({tokens}, {&cache}).front();
}

}  // namespace zero
