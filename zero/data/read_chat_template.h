// Chat templates over values of JSON, and the files beside a tokenizer. The public header
// (chat_template.h) takes texts, so that programs need no library for JSON.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "zero/data/chat_template.h"
#include "zero/data/jinja/template.h"

namespace zero {

/// As ChatTemplate.
class ChatTemplate::OfValues {
 public:
  OfValues(std::string_view text, std::string source, const nlohmann::ordered_json& variables);
  std::string text(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                   const nlohmann::ordered_json& tools = nullptr) const;
  MarkedText marked_text(const nlohmann::ordered_json& messages,
                         const nlohmann::ordered_json& tools = nullptr) const;
  const std::string& source() const { return source_; }

 private:
  jinja::Rendered render(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                         const nlohmann::ordered_json& tools) const;

  std::string source_;
  jinja::Template template_;
  jinja::Dict variables_;
};

/// Returns the object in a JSON file; an empty one if there is no file. Throws DataError for
/// anything else.
nlohmann::json read_object(const std::filesystem::path& path);

}  // namespace zero
