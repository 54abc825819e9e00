#include "zero/data/chat_template.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/data/jinja/template.h"

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
      {"{{ (1, 2) }}{{ (1,) }}{{ () }}{{ (1, 2)[:1] + (3,) }}{{ (1, 2)|list }}",
       "(1, 2)(1,)()(1, 3)[1, 2]"},
      {"{{ {'a': 1}|dictsort }}{{ {'a': 1}.items()|list }}{{ [(1, 2)]|tojson }}",
       "[('a', 1)][('a', 1)][[1, 2]]"},
      {"{{ (1, 2) == [1, 2] }}{{ (1, 2) in [(1, 2)] }}{{ 1, 2 }}", "FalseTrue(1, 2)"},
      {"{{ '7.9'|int }}{{ ' +7 '|int }}{{ '1e3'|int }}{{ 'x'|int(5) }}{{ 'inf'|int(3) }}"
       "{{ '-7.9'|int }}",
       "77100053-7"},
      {"{{ -5|abs }} {{ -2**2 }} {{ -3 is number }} {{ 2**3**2 }}", "5 4 True 64"},
      {"{{ 1e3 }} {{ 1.5e-2 }} {{ 2.5E+2 }} {{ 1e16 }}", "1000.0 0.015 250.0 1e+16"},
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
      {"{{ (1,) + [1] }}", "the operator '+' between a tuple and a list"},
      {"{{ '11'|int(0, 2) }}", "the base 2 of an integer is not supported"},
      {"{{ 'a'.title() }}", "the method 'title' of a string is not supported"},
      {"{{ q() }}", "an undefined value is called"},
      {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deeply"},
      {"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
       "does not come to an end"},
  };
  for (const auto& [text, message] : cases)
    EXPECT_THAT([&] { rendered(text); }, ThrowsMessage<Error>(HasSubstr(message))) << text;
}

TEST(Jinja, TemplatesOfStrangersEnd) {
  const std::pair<const char*, const char*> cases[] = {
      {"{% set ns=namespace(l=1) %}{% set ns.l=ns %}{{ ns }}", "a namespace in a list, a dict or"},
      {"{% set ns=namespace(l=1) %}{% set ns.l=[{'a': ns}] %}", "a namespace in a list, a dict or"},
      {"{% set d={} %}{% set d.d=d %}{{ d|tojson }}", "'d' is no namespace"},
      {"{% set ns=namespace(l=[]) %}{% for i in range(999999) %}{% set ns.l=[ns.l] %}{% endfor %}",
       "lists and dicts nest too deeply"},
      {"{% set ns=namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l=[ns.l, ns.l] %}"
       "{% endfor %}{{ ns.l == ns.l }}",
       "a value has over 64 MiB"},
      {"{% set ns=namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l=ns.l + ns.l %}{% endfor "
       "%}",
       "a value has over 64 MiB"},
      {"{{ 'abcd' * 4611686018427387904 }}", "a value has over 64 MiB"},
      {"{{ ('x' * 60000000).replace('x', 'y' * 60000000) }}", "a value has over 64 MiB"},
      {"{{ range(9999)|join('y' * 60000000) }}", "a value has over 64 MiB"},
      {"{{ ('x' * 60000000)|list }}", "a value has over 64 MiB"},
      {"{{ range(99999)|map('default', 'x' * 9999999)|list }}", "does not come to an end"},
      {"{% for i in range(99999) %}{{ 'x' * 60000000 }}{% endfor %}", "does not come to an end"},
      {"{{ range(-9, 9223372036854775807) }}", "a range has over a million elements"},
      {"{{ (10.0 ** 300)|int }}", "a number is too large"},
      {"{{ (0 - 9223372036854775807 - 1)|abs }}", "a number is too large"},
  };
  for (const auto& [text, message] : cases)
    EXPECT_THAT([&] { rendered(text); }, ThrowsMessage<Error>(HasSubstr(message))) << text;
  for (const char* sign : {"~", "+"}) {
    const auto text = fmt::format(
        "{{% set ns=namespace(s='ab') %}}{{% for i in range(99) %}}{{% set ns.s=ns.s {} ns.s %}}"
        "{{% endfor %}}",
        sign);
    EXPECT_THAT(
        [&] { ChatTemplate(text, "here").text("[]", false); },
        ThrowsMessage<DataError>(HasSubstr(
            "The chat template of here fails on these messages: line 1: a value has over")));
  }
  std::string sum = "1";
  for (int i = 0; i < 100000; ++i) sum += "+1";
  EXPECT_THAT([&] { jinja::Template whole("{{ " + sum + " }}"); },
              ThrowsMessage<Error>(HasSubstr("over 1000 operators")));
  std::string blocks = "{% macro m() %}";
  for (int i = 0; i < 120; ++i) blocks += "{% for a in [1] %}";
  blocks += "{{ m() }}";
  for (int i = 0; i < 120; ++i) blocks += "{% endfor %}";
  EXPECT_THAT([&] { rendered(blocks + "{% endmacro %}{{ m() }}"); },
              ThrowsMessage<Error>(HasSubstr("too deeply")));
}

TEST(Jinja, LargeNumbersAreTakenAsTheyAre) {
  EXPECT_EQ(rendered("[{{ a.99999999999 }}{{ a.99999999999999999999 }}{{ a.1 }}]", {{"a", {1, 2}}}),
            "[2]");
  EXPECT_EQ(rendered("[{{ '' * 9000000000000000000 }}{{ 'ab' * -1 }}{{ 'ab' * 2 }}]"), "[abab]");
  EXPECT_EQ(rendered("{{ range(9223372036854775800, 9223372036854775807, 5) }}"),
            "[9223372036854775800, 9223372036854775805]");
  EXPECT_EQ(rendered("{{ 'abc'[1::9223372036854775807] }}{{ [1, 2, 3][::-9223372036854775807] }}"),
            "b[3]");
  EXPECT_EQ(rendered("{{ 9007199254740993|int }}"), "9007199254740993");
  EXPECT_EQ(rendered("{{ 'h\xC3\xA9llo'[1] }}{{ 'h\xC3\xA9llo'[-4:2] }}"), "\xC3\xA9\xC3\xA9");
  EXPECT_EQ(rendered("{{ ' a  b c'.split(none, 1) }}"), "['a', 'b c']");
}

constexpr const char* kChat =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";
const ordered_json kTurns = ordered_json::array({{{"role", "user"}, {"content", "Q"}},
                                                 {{"role", "assistant"}, {"content", "A1"}},
                                                 {{"role", "user"}, {"content", "R"}},
                                                 {{"role", "assistant"}, {"content", "B"}}});

TEST(ChatTemplate, AnswersAreFoundBehindTheirPrompts) {
  const ChatTemplate chat(kChat, "here", R"({"eos_token": "."})");
  EXPECT_EQ(chat.text(kTurns.dump(), true),
            "<user>Q.<assistant>A1.<user>R.<assistant>B.<assistant>");
  const auto marked = chat.marked_text(kTurns.dump());
  EXPECT_EQ(marked.text, "<user>Q.<assistant>A1.<user>R.<assistant>B.");
  EXPECT_THAT(marked.answers, ElementsAre(Pair(19, 22), Pair(41, 43)));
}

TEST(ChatTemplate, MarkedAnswersAreTakenAsTheyAre) {
  const ChatTemplate chat(
      "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
      "{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}",
      "here");
  const auto marked = chat.marked_text(kTurns.dump());
  EXPECT_EQ(marked.text, "Q;A1;R;B;");
  EXPECT_THAT(marked.answers, ElementsAre(Pair(2, 4), Pair(7, 8)));
}

TEST(ChatTemplate, AnAnswerThatIsWrittenOtherwiseLaterIsRefused) {
  const ChatTemplate chat(
      "{% for m in messages %}{{ m.content if not loop.last else '!' ~ m.content }}{% endfor %}",
      "here");
  EXPECT_THAT(
      [&] { chat.marked_text(kTurns.dump()); },
      ThrowsMessage<DataError>(HasSubstr("writes message 2 otherwise when it is the last")));
}

TEST(ChatTemplate, WhatIsNotJsonIsRefused) {
  const ChatTemplate chat(kChat, "here");
  EXPECT_THAT([&] { chat.text("[{]", false); },
              ThrowsMessage<DataError>(HasSubstr("The messages for the chat template of here")));
  EXPECT_THAT([&] { ChatTemplate(kChat, "here", "[]"); },
              ThrowsMessage<DataError>(HasSubstr("are []; they should be an object")));
}

TEST(ChatTemplate, IsFoundInAFolder) {
  const TemporaryFolder folder;
  EXPECT_FALSE(ChatTemplate::load(folder.path()).has_value());
  folder.write(
      "tokenizer_config.json",
      R"({"eos_token": {"content": "!"}, "chat_template": [{"name": "tool_use", "template": "x"},
                   {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}]})");
  EXPECT_EQ(ChatTemplate::load(folder.path())->text(kTurns.dump(), false), "Q!");
  folder.write("chat_template.jinja", "file {{ eos_token }}");
  EXPECT_EQ(ChatTemplate::load(folder.path())->text(kTurns.dump(), false), "file !");
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
