#include "zero/data/chat_template.h"

#include <fmt/format.h>

#include <system_error>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/data/read_chat_template.h"

namespace zero {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

// Returns the template in a tokenizer_config.json: a text, or a list of {name, template}.
std::optional<std::string> template_in(const nlohmann::json& config, const fs::path& path) {
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return {};
  if (found->is_string()) return found->get<std::string>();
  for (const auto& each : found->is_array() ? *found : nlohmann::json::array()) {
    if (each.is_object() && each.value("name", nlohmann::json()) == "default" &&
        each.contains("template") && each.at("template").is_string())
      return each.at("template").get<std::string>();
  }
  throw DataError(fmt::format(
      "The chat_template of {} is neither a text nor a list with one called \"default\".",
      path.string()));
}

bool is_answer(const OrderedJson& message) { return message.value("role", "") == "assistant"; }

jinja::Template read_template(std::string_view text, const std::string& source) {
  try {
    return jinja::Template(text);
  } catch (const Error& error) {
    throw DataError(
        fmt::format("The chat template of {} cannot be used: {}.", source, error.what()));
  }
}

// `what` says whose text it is.
OrderedJson values_of(std::string_view json, std::string_view what, const std::string& source) {
  try {
    parse_json(json);  // what it refuses (keys that are named twice, depth) ordered_json does not
    return OrderedJson::parse(json);
  } catch (const Error& error) {
    throw DataError(fmt::format("The {} for the chat template of {} cannot be read: the text {}.",
                                what, source, error.what()));
  }
}

OrderedJson variables_of(std::string_view json, const std::string& source) {
  auto variables = values_of(json, "variables", source);
  if (variables.is_object()) return variables;
  throw DataError(
      fmt::format("The variables for the chat template of {} are {}; they should be an object.",
                  source, excerpt(json)));
}

}  // namespace

nlohmann::json read_object(const fs::path& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return nlohmann::json::object();
  try {
    auto json = parse_json(read_file(path, &fail<DataError>));
    if (json.is_object()) return json;
    throw Error("is no object");
  } catch (const DataError&) {
    throw;
  } catch (const Error& fault) {
    throw DataError(fmt::format("{} cannot be read: it {}.", path.string(), fault.what()));
  }
}

std::string special_token(const fs::path& folder, const char* name) {
  for (const char* file : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const auto config = read_object(folder / file);
    const auto found = config.find(name);
    if (found == config.end()) continue;
    if (found->is_string()) return found->get<std::string>();
    if (found->is_object() && found->contains("content") && found->at("content").is_string())
      return found->at("content").get<std::string>();
  }
  return {};
}

std::optional<ChatTemplate> ChatTemplate::load(const fs::path& folder) {
  std::optional<std::string> text;
  auto source = folder / "chat_template.jinja";
  std::error_code error;
  if (fs::exists(source, error)) {
    text = read_file(source, &fail<DataError>);
  } else {
    source = folder / "tokenizer_config.json";
    text = template_in(read_object(source), source);
  }
  if (!text) return {};
  OrderedJson variables = OrderedJson::object();
  for (const char* name : {"bos_token", "eos_token", "pad_token", "unk_token"}) {
    if (const auto token = special_token(folder, name); !token.empty()) variables[name] = token;
  }
  return ChatTemplate(*text, source.string(), variables.dump());
}

ChatTemplate::ChatTemplate(std::string_view text, std::string source, std::string_view variables) {
  auto values = variables_of(variables, source);
  of_values_ = std::make_shared<const OfValues>(text, std::move(source), values);
}

std::string ChatTemplate::text(std::string_view messages, bool add_generation_prompt,
                               std::string_view tools) const {
  const auto& source = of_values_->source();
  return of_values_->text(values_of(messages, "messages", source), add_generation_prompt,
                          values_of(tools, "tools", source));
}

MarkedText ChatTemplate::marked_text(std::string_view messages, std::string_view tools) const {
  const auto& source = of_values_->source();
  return of_values_->marked_text(values_of(messages, "messages", source),
                                 values_of(tools, "tools", source));
}

ChatTemplate::OfValues::OfValues(std::string_view text, std::string source,
                                 const OrderedJson& variables)
    : source_(std::move(source)),
      template_(read_template(text, source_)),
      variables_(*jinja::Value::from_json(variables).dict()) {}

jinja::Rendered ChatTemplate::OfValues::render(const OrderedJson& messages,
                                               bool add_generation_prompt,
                                               const OrderedJson& tools) const {
  try {
    auto variables = variables_;
    variables.emplace_back("messages", jinja::Value::from_json(messages));
    variables.emplace_back("tools", jinja::Value::from_json(tools));
    variables.emplace_back("documents", nullptr);
    variables.emplace_back("add_generation_prompt", add_generation_prompt);
    return template_.render(variables);
  } catch (const Error& error) {
    throw DataError(
        fmt::format("The chat template of {} fails on these messages: {}.", source_, error.what()));
  }
}

std::string ChatTemplate::OfValues::text(const OrderedJson& messages, bool add_generation_prompt,
                                         const OrderedJson& tools) const {
  return render(messages, add_generation_prompt, tools).text;
}

MarkedText ChatTemplate::OfValues::marked_text(const OrderedJson& messages,
                                               const OrderedJson& tools) const {
  auto rendered = render(messages, false, tools);
  MarkedText marked{std::move(rendered.text), std::move(rendered.generated)};
  if (template_.marks_generation()) return marked;
  auto before = OrderedJson::array();
  for (const auto& message : messages) {
    if (!is_answer(message)) {
      before.push_back(message);
      continue;
    }
    const auto prompt = text(before, true, tools);
    before.push_back(message);
    const auto answered =
        before.size() == messages.size() ? marked.text : text(before, false, tools);
    if (!answered.starts_with(prompt) || !marked.text.starts_with(answered)) {
      throw DataError(fmt::format(
          "The chat template of {} writes message {} otherwise when it is the last one, so the "
          "answer cannot be found in the text. Give a template with {{% generation %}}, or one "
          "answer a line.",
          source_, before.size()));
    }
    marked.answers.emplace_back(prompt.size(), answered.size());
  }
  return marked;
}

}  // namespace zero
