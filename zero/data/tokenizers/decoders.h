// The last stage of a tokenizer turns the pieces of tokens into text.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zero::tokenizers {

/// Takes the pieces of tokens and gives texts that, joined, are the text. Any number of threads may
/// use it at once.
using Decoder = std::function<std::vector<std::string>(std::vector<std::string>)>;

/// Makes the decoder that `json` describes; null puts a blank between pieces. Throws Error for one
/// that is not computed.
Decoder make_decoder(const nlohmann::json& json);

}  // namespace zero::tokenizers
