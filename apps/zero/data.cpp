// `zero data`: token files from text, and the tokens of lines.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/data/document.h"
#include "zero/data/example.h"
#include "zero/data/prepare.h"
#include "zero/data/tokenizer.h"
#include "zero/data/utf8.h"

namespace zero::app {
namespace {

/// Prints what the lines of a file are to a training.
int encode_lines(const std::string& path, const std::string& name) {
  const auto tokenizer = name == "bytes" ? Tokenizer::bytes() : Tokenizer::load(name);
  const DocumentEncoder encoder(tokenizer);
  const auto text = read_file(path, &fail<DataError>);
  int64_t number = 0;
  for (auto rest = std::string_view(text); !rest.empty();) {
    const auto line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    ++number;
    if (is_blank(line)) continue;
    try {
      const auto example = encoder.read(line);
      const auto document = encoder.encode(example);
      auto supervised = nlohmann::ordered_json::array();
      for (const auto mark : document.marks) supervised.push_back(mark & kSupervised);
      const nlohmann::ordered_json out{{"text", example.text.text},
                                       {"tokens", document.tokens},
                                       {"supervised", supervised},
                                       {"decoded", tokenizer.decode(document.tokens)}};
      fmt::print("{}\n",
                 out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    } catch (const DataError& error) {
      throw DataError(
          fmt::format("{}, line {}: {}", path, number, sentence_about_line(error.what())));
    }
  }
  return 0;
}

}  // namespace

int data(const Arguments& arguments) {
  OptionParser parser("data", "Makes data to train on.");
  auto* prepare_parser =
      parser.add_subcommand("prepare",
                            "Turns text files into token files with a training and a validation "
                            "split, which `zero train --data DIR` takes.");
  auto* encode_parser = parser.add_subcommand(
      "encode",
      "Prints what JSON lines are to a training: text, tokens, which of them are learned.");
  std::string lines;
  std::string tokenizer;
  encode_parser->add_option("input", lines, "JSON lines")->required()->type_name("FILE");
  encode_parser
      ->add_option("--tokenizer", tokenizer,
                   "A tokenizer.json, a folder with one, a sentencepiece model's file, or bytes")
      ->required();
  parser.require_subcommand(1);
  PrepareOptions options;
  std::vector<std::string> inputs;
  std::string output;
  prepare_parser->add_option("input", inputs, "Text files, taken as one text in this order")
      ->required()
      ->type_name("FILE...");
  prepare_parser->add_option("-o,--out", output, "Folder to make")->required()->type_name("DIR");
  prepare_parser
      ->add_option("--tokenizer", options.tokenizer,
                   "bpe: train a byte-pair encoding on the text; bytes: each byte is a token; or a "
                   "tokenizer.json, a folder with one, or a sentencepiece model's file")
      ->capture_default_str();
  prepare_parser->add_option("--vocab-size", options.vocab_size, "Tokens of a bpe")
      ->capture_default_str()
      ->type_name("N");
  prepare_parser
      ->add_option("--validation", options.validation_fraction,
                   "Share of the text, from its end, that validates")
      ->capture_default_str();
  prepare_parser->add_flag("--jsonl", options.json_lines,
                           "The files are JSON lines, each a document or a conversation");
  prepare_parser->add_flag(
      "--classify", options.classify,
      "The files are JSON lines, each with text, perhaps text_pair, and label");
  prepare_parser->add_flag("--overwrite", options.overwrite,
                           "Replace what an earlier preparation made");
  if (const auto status = parser.read(arguments)) return *status;

  if (encode_parser->parsed()) return encode_lines(lines, tokenizer);
  options.inputs.assign(inputs.begin(), inputs.end());
  options.output = output;
  const auto result = prepare(options);
  fmt::print("{}: vocabulary {}; {} tokens to train on ({} bytes), {} for validation ({} bytes)\n",
             output, result.vocab_size, result.train_tokens, result.train_bytes,
             result.validation_tokens, result.validation_bytes);
  if (options.classify) {
    fmt::print("{} texts of {} classes: {}\n", result.documents, result.classes.size(),
               printable(fmt::format("{}", fmt::join(result.classes, ", "))));
  } else if (options.json_lines) {
    fmt::print("{} documents; {} tokens are targets of the loss\n", result.documents,
               result.supervised_tokens);
  }
  if (result.open_documents > 0) {
    fmt::print(
        "{} documents have no token at their end, since the tokenizer names no eos_token: a model "
        "does not learn from them where an answer ends. Name one in the tokenizer_config.json "
        "beside the "
        "tokenizer.json, and prepare again.\n",
        result.open_documents);
  }
  if (result.unknown_tokens > 0) {
    fmt::print("{} tokens stand for text that the tokenizer has no other token for\n",
               result.unknown_tokens);
  }
  if (result.tokenizer_changed) {
    fmt::print(
        "The model {} changes blanks, line ends or characters; {}/tokenizer.model is a copy that "
        "takes text as it is. Use the copy with what is trained on these tokens.\n",
        options.tokenizer, output);
  }
  return 0;
}

}  // namespace zero::app
