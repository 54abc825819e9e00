// The template by which a model's conversations become text.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zero {

/// A text, and which parts of it the model is to say, as begins and ends in bytes.
struct MarkedText {
  std::string text;
  std::vector<std::pair<size_t, size_t>> answers;
};

/// Any number of threads may use it at once. Copies share what was read. Messages and variables are
/// JSON texts.
class ChatTemplate {
 public:
  /// Returns the template of a model's folder: chat_template.jinja, or the chat_template of
  /// tokenizer_config.json (of several, that called "default"). Nothing where there is none.
  /// DataError, with the file and the line, for a template that libzero cannot read.
  static std::optional<ChatTemplate> load(const std::filesystem::path& folder);

  /// `source` is for messages of errors, `variables` an object of what the template may use besides
  /// (bos_token ...). Throws DataError for a template that libzero cannot read.
  ChatTemplate(std::string_view text, std::string source, std::string_view variables = "{}");

  /// Returns the text of `messages`, an array of objects with role and content:
  ///
  ///   chat.text(R"([{"role": "user", "content": "Who are you?"}])", true);
  ///
  /// Throws DataError where the template fails, and for what is not JSON.
  std::string text(std::string_view messages, bool add_generation_prompt,
                   std::string_view tools = "null") const;
  /// Returns the same with its answers: what {% generation %} marks, or, in a template without
  /// that, what each message of the assistant adds behind the prompt for it. Throws DataError where
  /// these cannot be told apart, since the template writes an answer otherwise once others follow.
  MarkedText marked_text(std::string_view messages, std::string_view tools = "null") const;

  /// Takes values of JSON (read_chat_template.h).
  class OfValues;
  const OfValues& of_values() const { return *of_values_; }

 private:
  std::shared_ptr<const OfValues> of_values_;
};

/// Returns the text of a special token in a tokenizer_config.json or a special_tokens_map.json,
/// such as "eos_token": a string, or an object with "content". Empty where there is none.
std::string special_token(const std::filesystem::path& folder, const char* name);

}  // namespace zero
