// The last stage of a tokenizer: the pieces of tokens to text.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zero::tokenizers {

/// Takes the pieces of tokens and gives texts that, joined, are the text. Any number of threads.
using Decoder = std::function<std::vector<std::string>(std::vector<std::string>)>;

/// Makes the decoder that `json` describes; null puts a blank between pieces. Throws Error for one
/// that is not computed.
Decoder make_decoder(const nlohmann::json& json);

}  // namespace zero::tokenizers
