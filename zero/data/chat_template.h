// The template by which a model's conversations become text.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/data/jinja/template.h"

namespace zero {

/// A text, and which parts of it the model is to say, as begins and ends in bytes.
struct MarkedText {
  std::string text;
  std::vector<std::pair<size_t, size_t>> answers;
};

/// Any number of threads may use it at once.
class ChatTemplate {
 public:
  /// Returns the template of a model's folder: chat_template.jinja, or the chat_template of
  /// tokenizer_config.json (of several, that called "default"). Nothing where there is none.
  /// DataError, with the file and the line, for a template that libzero cannot read.
  static std::optional<ChatTemplate> load(const std::filesystem::path& folder);

  /// `source` is for messages, `variables` what the template may use besides (bos_token ...).
  ChatTemplate(std::string_view text, std::string source, const nlohmann::ordered_json& variables);

  /// Returns the text of `messages`, an array of objects with role and content. Throws DataError
  /// where the template fails.
  std::string text(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                   const nlohmann::ordered_json& tools = nullptr) const;
  /// Returns the same with its answers: what {% generation %} marks, or, in a template without
  /// that, what each message of the assistant adds behind the prompt for it. Throws DataError where
  /// these cannot be told apart, since the template writes an answer otherwise once others follow.
  MarkedText marked_text(const nlohmann::ordered_json& messages,
                         const nlohmann::ordered_json& tools = nullptr) const;

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

/// Returns the text of a special token in a tokenizer_config.json or a special_tokens_map.json,
/// such as "eos_token": a string, or an object with "content". Empty where there is none.
std::string special_token(const std::filesystem::path& folder, const char* name);

}  // namespace zero
