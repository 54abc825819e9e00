#include "zero/data/example.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/data/read_chat_template.h"
#include "zero/data/utf8.h"

namespace zero {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kWanted =
    "The file is to be JSON lines: a whole object on each line, with no array around them";

bool has(const OrderedJson& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && !found->is_null();
}

std::string text_of(const OrderedJson& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) throw DataError(fmt::format("has no field '{}'", key));
  if (!found->is_string()) {
    throw DataError(
        fmt::format("has the '{}' {}; it should be a text", key, excerpt(found->dump())));
  }
  return found->get<std::string>();
}

OrderedJson object_of(std::string_view line) {
  OrderedJson object;
  try {
    parse_json(line);  // what it refuses (keys that are named twice, depth) ordered_json does not
    object = OrderedJson::parse(line);
  } catch (const Error& error) {
    throw DataError(fmt::format("{}. {}", error.what(), kWanted));
  }
  if (!object.is_object())
    throw DataError(fmt::format("is {}, and no object. {}", excerpt(object.dump()), kWanted));
  return object;
}

OrderedJson message(std::string_view role, std::string content) {
  return {{"role", role}, {"content", std::move(content)}};
}

// Throws unless it is a list of messages.
OrderedJson messages_in(const OrderedJson& object, const char* key) {
  const auto& list = object.at(key);
  if (!list.is_array() || list.empty())
    throw DataError(
        fmt::format("has the '{}' {}; it should be a list of messages", key, excerpt(list.dump())));
  for (size_t i = 0; i < list.size(); ++i) {
    const auto& each = list[i];
    const bool good = each.is_object() && each.contains("role") && each.at("role").is_string() &&
                      (each.contains("content") || each.contains("tool_calls"));
    if (!good) {
      throw DataError(fmt::format(
          "has the message {} (number {}); it should be an object with a role and a content",
          excerpt(each.dump()), i + 1));
    }
  }
  return list;
}

Example of_conversation(const OrderedJson& messages, const OrderedJson& object,
                        const std::optional<ChatTemplate>& chat_template) {
  if (!chat_template) {
    throw DataError(
        "is a conversation, and the tokenizer has no chat template (chat_template.jinja, or "
        "chat_template in tokenizer_config.json)");
  }
  const auto tools = object.find("tools");
  Example example{chat_template->of_values().marked_text(
                      messages, tools == object.end() ? OrderedJson() : *tools),
                  true};
  if (example.text.answers.empty())
    throw DataError("is a conversation in which the assistant says nothing");
  return example;
}

Example of_prompt(const std::string& prompt, const std::string& completion) {
  if (completion.empty()) throw DataError("has an empty answer");
  return {{prompt + completion, {{prompt.size(), prompt.size() + completion.size()}}}, false};
}

Example of_alpaca(const OrderedJson& object, const std::optional<ChatTemplate>& chat_template) {
  const auto instruction = text_of(object, "instruction");
  const auto input = has(object, "input") ? text_of(object, "input") : std::string();
  const auto output = text_of(object, "output");
  const auto question = input.empty() ? instruction : instruction + "\n" + input;
  if (!chat_template && !has(object, "system") && !has(object, "history"))
    return of_prompt(question + "\n", output);
  auto messages = OrderedJson::array();
  if (has(object, "system")) {
    if (auto system = text_of(object, "system"); !system.empty())
      messages.push_back(message("system", std::move(system)));
  }
  for (const auto& turn : has(object, "history") ? object.at("history") : OrderedJson::array()) {
    if (!turn.is_array() || turn.size() != 2 || !turn[0].is_string() || !turn[1].is_string())
      throw DataError(fmt::format("has the turn {} in its 'history'", excerpt(turn.dump())));
    messages.push_back(message("user", turn[0].get<std::string>()));
    messages.push_back(message("assistant", turn[1].get<std::string>()));
  }
  messages.push_back(message("user", question));
  messages.push_back(message("assistant", output));
  return of_conversation(messages, object, chat_template);
}

Example of_sharegpt(const OrderedJson& object, const std::optional<ChatTemplate>& chat_template) {
  static const std::map<std::string, std::string, std::less<>> roles{
      {"human", "user"},    {"user", "user"},
      {"gpt", "assistant"}, {"assistant", "assistant"},
      {"system", "system"}, {"observation", "tool"},
      {"tool", "tool"}};
  const auto& turns = object.at("conversations");
  if (!turns.is_array() || turns.empty())
    throw DataError(fmt::format("has the 'conversations' {}; it should be a list of turns",
                                excerpt(turns.dump())));
  auto messages = OrderedJson::array();
  if (has(object, "system")) {
    if (auto system = text_of(object, "system"); !system.empty())
      messages.push_back(message("system", std::move(system)));
  }
  for (const auto& turn : turns) {
    if (!turn.is_object()) throw DataError(fmt::format("has the turn {}", excerpt(turn.dump())));
    const auto from = text_of(turn, "from");
    const auto role = roles.find(from);
    if (role == roles.end()) {
      throw DataError(fmt::format(
          "has a turn from {}; human, gpt, system and observation are known", in_quotes(from)));
    }
    messages.push_back(message(role->second, text_of(turn, "value")));
  }
  return of_conversation(messages, object, chat_template);
}

Example of_prompt_and_completion(const OrderedJson& object,
                                 const std::optional<ChatTemplate>& chat_template) {
  if (!object.contains("completion")) throw DataError("has no field 'completion'");
  if (!object.at("prompt").is_array())
    return of_prompt(text_of(object, "prompt"), text_of(object, "completion"));
  auto messages = messages_in(object, "prompt");
  const size_t asked = messages.size();
  for (const auto& each : messages_in(object, "completion")) messages.push_back(each);
  auto example = of_conversation(messages, object, chat_template);
  // Answers within the prompt are not learned.
  const auto answers_asked =
      std::count_if(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(asked),
                    [](const OrderedJson& each) { return each.value("role", "") == "assistant"; });
  auto& answers = example.text.answers;
  answers.erase(answers.begin(),
                answers.begin() + std::min<std::ptrdiff_t>(
                                      answers_asked, static_cast<std::ptrdiff_t>(answers.size())));
  if (answers.empty()) throw DataError("has a completion without an answer of the assistant");
  return example;
}

}  // namespace

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

std::string sentence_about_line(std::string_view fault) {
  if (fault.ends_with('.')) fault.remove_suffix(1);
  const bool sentence =
      !fault.empty() && std::isupper(static_cast<unsigned char>(fault.front())) != 0;
  return fmt::format("{}{}.", sentence ? "" : "it ", fault);
}

Example read_example(std::string_view line, const std::optional<ChatTemplate>& chat_template) {
  const auto object = object_of(line);
  if (has(object, "messages"))
    return of_conversation(messages_in(object, "messages"), object, chat_template);
  if (has(object, "conversations")) return of_sharegpt(object, chat_template);
  if (has(object, "prompt")) return of_prompt_and_completion(object, chat_template);
  if (has(object, "instruction")) return of_alpaca(object, chat_template);
  if (has(object, "text")) {
    auto text = text_of(object, "text");
    const size_t size = text.size();
    return {{std::move(text), {{0, size}}}, false};
  }
  throw DataError("has none of the fields text, prompt, messages, instruction and conversations");
}

LabelledText read_labelled(std::string_view line) {
  const auto object = object_of(line);
  LabelledText example{.text = text_of(object, "text")};
  if (has(object, "text_pair")) example.pair = text_of(object, "text_pair");
  const auto label = object.find("label");
  if (label == object.end()) throw DataError("has no field 'label'");
  constexpr uint64_t kMost = 1 << 20;
  if (label->is_string() && !label->get<std::string>().empty()) {
    example.label.name = label->get<std::string>();
  } else if (label->is_number_unsigned() && label->get<uint64_t>() < kMost) {
    example.label.number = label->get<int64_t>();
  } else {
    throw DataError(fmt::format("has the 'label' {}; it should be a name, or a number from 0 to {}",
                                excerpt(label->dump()), kMost - 1));
  }
  return example;
}

}  // namespace zero
