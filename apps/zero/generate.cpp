// `zero generate`: continues a text.
#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/data/chat_template.h"
#include "zero/data/tokenizer.h"
#include "zero/data/utf8.h"
#include "zero/models/language/generate.h"
#include "zero/train/evaluation.h"
#include "zero/train/loaded_model.h"

namespace zero::app {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// Prints the text of tokens while they come. Characters whose bytes are not all there wait.
class Printer {
 public:
  explicit Printer(const Tokenizer& tokenizer, std::vector<int64_t> prompt)
      : tokenizer_(tokenizer), tokens_(std::move(prompt)) {
    shown_ = text().size();
  }
  void add(int64_t token) {
    tokens_.push_back(token);
    const auto all = text();
    if (all.size() <= shown_ || all.ends_with(kReplacement) || valid_utf8(all) < all.size()) return;
    show(all);
  }
  void finish() {
    show(text());
    std::fputs("\n", stdout);
  }

 private:
  std::string text() const { return tokenizer_.decode(tokens_, SpecialTokens::without); }
  void show(const std::string& all) {
    if (all.size() > shown_)
      std::fputs(printable(std::string_view(all).substr(shown_), "\n\t").c_str(), stdout);
    std::fflush(stdout);
    shown_ = std::max(shown_, all.size());
  }

  const Tokenizer& tokenizer_;
  std::vector<int64_t> tokens_;
  size_t shown_ = 0;
};

std::string as_chat(const std::string& prompt, const std::filesystem::path& folder) {
  const auto chat = ChatTemplate::load(folder);
  if (!chat) {
    throw DataError(fmt::format(
        "{} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json). "
        "Leave --chat out.",
        folder.string()));
  }
  return chat->text(nlohmann::ordered_json::array({{{"role", "user"}, {"content", prompt}}}), true);
}

}  // namespace

int generate(const Arguments& arguments) {
  OptionParser parser("generate", "Continues a text with a model from a folder.");
  std::string from;
  std::string prompt;
  std::string tokenizer_path;
  std::string dtype = "fp32";
  bool chat = false;
  GenerateOptions options;
  options.temperature = 0;
  options.tokens = 64;
  parser.add_option("--from", from, "Folder with config.json, weights and a tokenizer")
      ->required()
      ->type_name("DIR");
  parser.add_option("--prompt", prompt, "The text to continue")->required()->type_name("TEXT");
  parser
      .add_option("--tokenizer", tokenizer_path,
                  "A tokenizer.json, a folder with one, a sentencepiece model's file, or bytes, in "
                  "place of the folder's")
      ->type_name("PATH");
  parser.add_flag("--chat", chat, "The prompt is a user's message: use the chat template");
  parser.add_option("--tokens", options.tokens, "The most tokens to add")->check(not_negative());
  parser.add_option("--temperature", options.temperature, "0 takes the likeliest token")
      ->check(not_negative());
  parser.add_option("--top-k", options.top_k, "Only the likeliest so many are drawn; 0: all");
  parser.add_option("--top-p", options.top_p,
                    "Only the likeliest are drawn whose probabilities add up to so much");
  parser.add_option("--seed", options.seed, "Seed of the draws");
  parser.add_option("--dtype", dtype, "Dtype of the weights")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  if (const auto status = parser.read(arguments)) return *status;

  const auto tokenizer = tokenizer_path == "bytes"
                             ? Tokenizer::bytes()
                             : Tokenizer::load(tokenizer_path.empty() ? from : tokenizer_path);
  const auto tokens = chat ? tokenizer.encode(as_chat(prompt, tokenizer.file().parent_path()))
                           : tokenizer.encode(prompt, SpecialTokens::with);
  train::LoadedModel loaded(from, dtype == "bf16");
  auto& model = loaded.model();
  const int64_t drawn = std::min(tokenizer.vocab_size(), model.config().vocab_size());
  options.context = model.config().context();
  options.stop_tokens = train::end_tokens(from, tokenizer);
  Printer printer(tokenizer, tokens);
  options.on_token = [&](int64_t token) { printer.add(token); };
  const train::EvaluationMode evaluation(model.module());
  if (!chat) fmt::print("{}", printable(prompt, "\n\t"));
  const auto logits = cached_logits(model);
  zero::generate(
      tokens,
      [&](const at::Tensor& seen) { return logits(seen).to(at::kFloat).narrow(1, 0, drawn); },
      options);
  printer.finish();
  return 0;
}

}  // namespace zero::app
