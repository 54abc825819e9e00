// A line of JSON as a text to train on.
//
// Note [Lines of JSON]
// {"text": T}: all of T is learned.
// {"prompt": P, "completion": C}: texts, or lists of messages; C is learned.
// {"messages": [{"role": R, "content": T}, ...]}: a conversation; what the assistant says is
// learned.
// {"instruction": I, "input": X, "output": O, "system": S, "history": [[question, answer], ...]}
// (alpaca): a conversation whose question is I and X in lines; input, system and history may be
// absent. Without a chat template the prompt is I and X, each with a line end.
// {"conversations": [{"from": "human" or "gpt", "value": T}, ...], "system": S} (sharegpt): a
// conversation.
// "tools" beside a conversation goes to its template.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "zero/data/chat_template.h"
#include "zero/data/labelled_text.h"

namespace zero {

struct Example {
  MarkedText text;
  /// A template has written the text, with its special tokens: the tokenizer adds none.
  bool by_template = false;
};

/// Returns whether a line has white space alone: such lines are left out.
bool is_blank(std::string_view line);

/// Throws DataError, whose message begins as "has no field ..." (the caller says which line), for
/// text that is not JSON, a line of another form, a field of the wrong kind, a conversation without
/// an answer, or one for which there is no template.
Example read_example(std::string_view line, const std::optional<ChatTemplate>& chat_template);

/// Returns the sentence about a line that the message of such a DataError makes: "it has no field
/// 'text'.", or the message itself, where that is a sentence (a chat template's).
std::string sentence_about_line(std::string_view fault);

/// Reads {"text": T, "text_pair": P, "label": L}, where P may be absent, and L is a number from 0
/// on or a name. Throws DataError as read_example.
LabelledText read_labelled(std::string_view line);

}  // namespace zero
