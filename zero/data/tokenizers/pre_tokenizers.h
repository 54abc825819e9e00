// The second stage of a tokenizer cuts text into words.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zero::tokenizers {

struct Word {
  std::string text;
  bool first = false;  ///< it begins where the whole text does
};
using Words = std::vector<Word>;

/// Cuts words further. Any number of threads may use it at once.
using PreTokenizer = std::function<Words(Words)>;

/// Makes the pre-tokenizer that `json` describes; null cuts nothing. Throws Error for one that is
/// not computed.
PreTokenizer make_pre_tokenizer(const nlohmann::json& json);

}  // namespace zero::tokenizers
