// The first stage of a tokenizer changes text.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace zero::tokenizers {

/// Takes and gives UTF-8. Any number of threads may use it at once.
using Normalizer = std::function<std::string(std::string)>;

/// Makes the normalizer that `json` describes; null changes nothing. Throws Error for one that is
/// not computed.
Normalizer make_normalizer(const nlohmann::json& json);

}  // namespace zero::tokenizers
