#include "zero/data/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"

namespace zero {
namespace {

using nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::ThrowsMessage;

std::string rendered(std::string_view text, const ordered_json& variables = {}) {
  const auto values = jinja::Value::from_json(variables);
  return jinja::Template(text)
      .render(values.dict() == nullptr ? jinja::Dict() : *values.dict())
      .text;
}

// The expected texts are those of Jinja 3.1 with trim_blocks and lstrip_blocks.
TEST(Jinja, StatementsAndExpressionsAreThoseOfJinja) {
  const ordered_json v{{"a", {3, 1, 2}},
                       {"s", "  Hi there "},
                       {"n", nullptr},
                       {"d", {{"x", 1}, {"y", {{"z", "deep"}}}}},
                       {"t", true}};
  const std::pair<const char*, const char*> cases[] = {
      {"{{ 1 + 2 * 3 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 }}",
       "7 3 -4 2 3.5 8"},
      {"{{ 'a' ~ 1 ~ none }}|{{ 'a' + \"b\" }}|{{ [1] + [2] }}", "a1None|ab|[1, 2]"},
      {"{{ a[0] }}{{ a[-1] }}{{ a[1:] }}{{ a[::-1] }}{{ s[2:4] }}{{ a[:-1] }}",
       "32[1, 2][2, 1, 3]Hi[3, 1]"},
      {"{{ d.y.z }}{{ d['x'] }}{{ d.q is defined }}{{ d.q }}", "deep1False"},
      {"{{ 'yes' if a|length > 2 and not n else 'no' }}{{ 'x' if n }}", "yes"},
      {"{{ 1 < 2 <= 2 }}{{ 2 in a }}{{ 9 not in a }}{{ 'Hi' in s }}{{ 1 == 1.0 }}",
       "TrueTrueTrueTrueTrue"},
      {"{% for x in a if x > 1 %}{{ loop.index }}{{ x }}{{ ',' if not loop.last }}{% else %}-"
       "{% endfor %}",
       "13,22"},
      {"{% for k, x in d.items() %}{{ k }}{% endfor %}{% for x in [] %}{% else %}none{% endfor %}",
       "xynone"},
      {"{% for x in range(5) %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}"
       "{% endif %}{{ x }}{% endfor %}",
       "02"},
      {"{% set q = 1 %}{% for x in a %}{% set q = x %}{% endfor %}{{ q }}", "1"},
      {"{% set ns = namespace(c=0) %}{% for x in a %}{% set ns.c = ns.c + x %}{% endfor %}{{ ns.c "
       "}}",
       "6"},
      {"{% set b %}[{{ a|join('-') }}]{% endset %}{{ b|upper }}{{ b|length }}", "[3-1-2]7"},
      {"{% macro m(x, y=2) %}<{{ x }}{{ y }}>{% endmacro %}{{ m(1) }}{{ m(y=5, x=4) }}",
       "<12><45>"},
      {"{{ s|trim }}|{{ s.strip().split(' ')|last }}|{{ 'a-b'.replace('-', '+') }}",
       "Hi there|there|a+b"},
      {"{{ d|tojson }}{{ {'é': [1.5, true]}|tojson }}",
       "{\"x\": 1, \"y\": {\"z\": \"deep\"}}{\"é\": [1.5, true]}"},
      {"{{ {'a': [1]}|tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ]\n}"},
      {"{{ n is none }}{{ s is string }}{{ d is mapping }}{{ a is sequence }}{{ t is true }}"
       "{{ q is not defined }}",
       "TrueTrueTrueTrueTrueTrue"},
      {"{{ n or 'x' }}{{ q|default('y') }}{{ ''|default('z', true) }}", "xyz"},
      {"{{ [{'r': 1, 'v': 'a'}, {'r': 2, 'v': 'b'}]|selectattr('r', 'equalto', "
       "2)|map(attribute='v')|list }}",
       "['b']"},
      {"  {% if t %}\n  in\n  {% endif %}\nout\n", "  in\nout"},
      {"a  {{- 1 -}}  b {%- if t -%}  c  {%- endif %} d", "a1bc d"},
      {"{# note #}x{% if t +%}\ny{% endif %}", "x\ny"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(rendered(text, v), expected) << text;
}

TEST(Jinja, WhatIsNotSupportedIsNamedWithItsLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"\n{% include 'x' %}", "line 2: the statement 'include' is not supported"},
      {"a\n\n{{ x|nofilter }}", "line 3: the filter 'nofilter' is not supported"},
      {"{{ x is notest }}", "line 1: the test 'notest' is not supported"},
      {"{% if x %}", "'endif' is missing"},
      {"{{ x", "a tag does not end"},
      {"{{ 'x }}", "a string does not end"},
      {"{{ 1 + }}", "line 1: '' is not expected here"},
      {"{% break %}", "'break' outside of a loop"},
      {"{{ x ? 1 }}", "'?' has no meaning in a tag"},
      {"{% for x in y recursive %}", "a recursive loop is not supported"},
  };
  for (const auto& [text, message] : cases) {
    EXPECT_THAT([&] { jinja::Template whole(text); }, ThrowsMessage<Error>(HasSubstr(message)))
        << text;
  }
  for (const auto& [repeated, behind] : {std::pair("not ", ""), std::pair("(", ")")}) {
    std::string text = "x";
    for (int i = 0; i < 5000; ++i) text = repeated + text + behind;
    EXPECT_THAT([&] { jinja::Template whole("{{ " + text + " }}"); },
                ThrowsMessage<Error>(HasSubstr("too deeply")));
  }
}

TEST(Jinja, WhatFailsIsNamedWithItsLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"\n{{ raise_exception('no ' ~ 1) }}", "line 2: the template says: no 1"},
      {"{{ q.x }}", "line 1: 'x' of an undefined value is read"},
      {"{{ 1 / 0 }}", "line 1: a division by zero"},
      {"{{ 'a' + 1 }}", "the operator '+' between a string and an integer"},
      {"{{ 'a'.title() }}", "the method 'title' of a string is not supported"},
      {"{{ q() }}", "an undefined value is called"},
      {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deeply"},
      {"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
       "does not come to an end"},
  };
  for (const auto& [text, message] : cases)
    EXPECT_THAT([&] { rendered(text); }, ThrowsMessage<Error>(HasSubstr(message))) << text;
}

constexpr const char* kChat =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";
const ordered_json kTurns = ordered_json::array({{{"role", "user"}, {"content", "Q"}},
                                                 {{"role", "assistant"}, {"content", "A1"}},
                                                 {{"role", "user"}, {"content", "R"}},
                                                 {{"role", "assistant"}, {"content", "B"}}});

TEST(ChatTemplate, AnswersAreFoundBehindTheirPrompts) {
  const ChatTemplate chat(kChat, "here", {{"eos_token", "."}});
  EXPECT_EQ(chat.text(kTurns, true), "<user>Q.<assistant>A1.<user>R.<assistant>B.<assistant>");
  const auto marked = chat.marked_text(kTurns);
  EXPECT_EQ(marked.text, "<user>Q.<assistant>A1.<user>R.<assistant>B.");
  EXPECT_THAT(marked.answers, ElementsAre(Pair(19, 22), Pair(41, 43)));
}

TEST(ChatTemplate, MarkedAnswersAreTakenAsTheyAre) {
  const ChatTemplate chat(
      "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
      "{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}",
      "here", ordered_json::object());
  const auto marked = chat.marked_text(kTurns);
  EXPECT_EQ(marked.text, "Q;A1;R;B;");
  EXPECT_THAT(marked.answers, ElementsAre(Pair(2, 4), Pair(7, 8)));
}

TEST(ChatTemplate, AnAnswerThatIsWrittenOtherwiseLaterIsRefused) {
  const ChatTemplate chat(
      "{% for m in messages %}{{ m.content if not loop.last else '!' ~ m.content }}{% endfor %}",
      "here", ordered_json::object());
  EXPECT_THAT(
      [&] { chat.marked_text(kTurns); },
      ThrowsMessage<DataError>(HasSubstr("writes message 2 otherwise when it is the last")));
}

TEST(ChatTemplate, IsFoundInAFolder) {
  const TemporaryFolder folder;
  EXPECT_FALSE(ChatTemplate::load(folder.path()).has_value());
  folder.write(
      "tokenizer_config.json",
      R"({"eos_token": {"content": "!"}, "chat_template": [{"name": "tool_use", "template": "x"},
                   {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}]})");
  EXPECT_EQ(ChatTemplate::load(folder.path())->text(kTurns, false), "Q!");
  folder.write("chat_template.jinja", "file {{ eos_token }}");
  EXPECT_EQ(ChatTemplate::load(folder.path())->text(kTurns, false), "file !");
  folder.write("chat_template.jinja", "\n{% include 'x' %}");
  EXPECT_THAT([&] { ChatTemplate::load(folder.path()); },
              ThrowsMessage<DataError>(HasSubstr("chat_template.jinja cannot be used: line 2: the "
                                                 "statement 'include'")));
  folder.write("tokenizer_config.json", "{");
  EXPECT_THAT([&] { special_token(folder.path(), "eos_token"); },
              ThrowsMessage<DataError>(HasSubstr("tokenizer_config.json cannot be read")));
}

}  // namespace
}  // namespace zero
