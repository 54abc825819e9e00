// Files that text passes through: a tokenizer.json, a chat template, lines of JSON. The first byte
// says which.
#include <nlohmann/json.hpp>
#include <string_view>

#include "tests/fuzz/fuzz.h"
#include "zero/base/error.h"
#include "zero/data/chat_template.h"
#include "zero/data/example.h"
#include "zero/data/tokenizers/tokenizer_json.h"
#include "zero/data/utf8.h"

namespace zero {
namespace {

void read_tokenizer(std::string_view bytes) {
  try {
    const tokenizers::TokenizerJson tokenizer(bytes, "the file");
    for (const std::string_view text : {std::string_view("a b\n\xC3\xA9 12 <s>"), bytes}) {
      tokenizers::Ids tokens;
      tokenizer.encode(text, true, tokens);
      for (const auto token : tokens) ensure(token < tokenizer.vocab_size(), "a known token");
      const auto decoded = tokenizer.decode(tokens, false);
      ensure(valid_utf8(decoded) == decoded.size(), "text");
    }
  } catch (const DataError&) {
  }
}

void read_template(std::string_view bytes) {
  if (valid_utf8(bytes) < bytes.size()) return;  // files are checked before
  const auto messages = nlohmann::ordered_json::array(
      {{{"role", "user"}, {"content", "q"}}, {{"role", "assistant"}, {"content", "a"}}});
  try {
    const ChatTemplate chat(bytes, "the file", R"({"eos_token": "</s>"})");
    const auto marked = chat.marked_text(messages.dump());
    for (const auto& [begin, end] : marked.answers)
      ensure(begin <= end && end <= marked.text.size(), "an answer within the text");
  } catch (const DataError&) {
  }
}

void read_line(std::string_view bytes) {
  if (valid_utf8(bytes) < bytes.size()) return;
  const std::optional<ChatTemplate> chat(
      ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", "it"));
  try {
    const auto example = read_example(bytes, chat);
    for (const auto& [begin, end] : example.text.answers)
      ensure(begin <= end && end <= example.text.text.size(), "an answer within the text");
  } catch (const DataError&) {
  }
}

}  // namespace

std::vector<std::string> seeds() {
  const std::string model =
      R"("model":{"type":"BPE","unk_token":"<s>","byte_fallback":true,"vocab":{"<s>":0,"a":1,"b":2,"ab":3,"<0xC3>":4},"merges":["a b"]})";
  return {
      R"(0{"added_tokens":[{"id":0,"content":"<s>","special":true,"lstrip":true}],"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Prepend","prepend":"a"},{"type":"Replace","pattern":{"String":" "},"content":"b"}]},"pre_tokenizer":{"type":"Metaspace","replacement":"b","prepend_scheme":"first","split":true},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[0]}}},"decoder":{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},)" +
          model + "}",
      R"(0{"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{L}+|[^\\s\\p{N}]"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":true}]},"decoder":{"type":"ByteLevel"},)" +
          model + "}",
      R"(0{"normalizer":{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"decoder":{"type":"WordPiece","prefix":"##"},"model":{"type":"WordPiece","vocab":{"[UNK]":0,"a":1,"##b":2}}})",
      "1{% for m in messages %}{% if loop.first and m.role == 'user' %}[{{ m.content|trim ~ "
      "eos_token }}]"
      "{% else %}{% generation %}{{ m['content'][::-1] }}{% endgeneration %}{% endif %}{% endfor "
      "%}",
      "1{% macro f(x, y=1) %}{{ x|tojson(indent=2) }}{{ y // 2 }}{% endmacro %}{% set ns = "
      "namespace(a=[1, 2]) %}{% set ns.a = ns.a + [3] %}{{ f(ns.a) }}{{ "
      "messages|map(attribute='role')"
      "|join(', ') }}{{ raise_exception('no') if not messages is defined }}",
      R"(2{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]})",
      R"(2{"instruction":"i","input":"x","output":"o","history":[["q","a"]]})",
      R"(2{"conversations":[{"from":"human","value":"q"},{"from":"gpt","value":"a"}]})",
      R"(2{"prompt":"p","completion":"c"})",
  };
}

}  // namespace zero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 3 == 0) zero::read_tokenizer(rest);
  if (data[0] % 3 == 1) zero::read_template(rest);
  if (data[0] % 3 == 2) zero::read_line(rest);
  return 0;
}
