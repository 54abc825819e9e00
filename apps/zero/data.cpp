// `zero data`: token files from text.
#include <fmt/format.h>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/data/prepare.h"

namespace zero::app {

int data(const Arguments& arguments) {
  OptionParser parser("data", "Makes data to train on.");
  auto* prepare_parser =
      parser.add_subcommand("prepare",
                            "Turns text files into token files with a training and a validation "
                            "split, which `zero train --data DIR` takes.");
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
                   "sentencepiece model's file")
      ->capture_default_str();
  prepare_parser->add_option("--vocab-size", options.vocab_size, "Tokens of a bpe")
      ->capture_default_str()
      ->type_name("N");
  prepare_parser
      ->add_option("--validation", options.validation_fraction,
                   "Share of the text, from its end, that validates")
      ->capture_default_str();
  prepare_parser->add_flag("--overwrite", options.overwrite,
                           "Replace what an earlier preparation made");
  if (const auto status = parser.read(arguments)) return *status;

  options.inputs.assign(inputs.begin(), inputs.end());
  options.output = output;
  const auto result = prepare(options);
  fmt::print("{}: vocabulary {}; {} tokens to train on ({} bytes), {} for validation ({} bytes)\n",
             output, result.vocab_size, result.train_tokens, result.train_bytes,
             result.validation_tokens, result.validation_bytes);
  if (result.tokenizer_changed) {
    fmt::print(
        "The model {} changes blanks, line ends or characters; {}/tokenizer.model is a copy that "
        "takes text as it is. Use the copy with what is trained on these tokens.\n",
        options.tokenizer, output);
  }
  return 0;
}

}  // namespace zero::app
