// `zero generate`: continues a text, or many.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "apps/zero/options.h"
#include "apps/zero/ranks.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_texts.h"
#include "zero/data/chat_template.h"
#include "zero/data/tokenizer.h"
#include "zero/data/utf8.h"
#include "zero/models/architectures.h"
#include "zero/train/generate_texts.h"
#include "zero/train/loaded_model.h"

namespace zero::app {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

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

// Returns the prompts of a file, one on each line.
std::vector<std::string> read_prompts(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::error_code ignored;
  if (!file || std::filesystem::is_directory(path, ignored)) {
    throw DataError(
        fmt::format("Cannot read the prompts {}. Give a text file with a prompt on each line, or "
                    "JSON lines (.jsonl) with {{\"prompt\": ...}}.",
                    path));
  }
  const bool json = path.ends_with(".jsonl");
  std::vector<std::string> prompts;
  std::string line;
  const auto refuse = [&](const std::string& why) {
    throw DataError(fmt::format("Line {} of {} {}", prompts.size() + 1, path, why));
  };
  while (std::getline(file, line)) {
    if (line.ends_with('\r')) line.pop_back();
    if (prompts.empty() && line.starts_with(kByteOrderMark)) line.erase(0, kByteOrderMark.size());
    if (const auto good = valid_utf8(line); good < line.size()) {
      refuse(fmt::format("is no UTF-8: its byte {} is 0x{:02x}. Convert the file to UTF-8.",
                         good + 1, static_cast<unsigned char>(line[good])));
    }
    if (json) {
      try {
        const auto object = parse_json(line);
        if (!object.is_object() || !object.contains("prompt") || !object["prompt"].is_string())
          refuse(
              fmt::format("is {}; it should be an object with a text \"prompt\".", excerpt(line)));
        line = object["prompt"].get<std::string>();
      } catch (const DataError&) {
        throw;
      } catch (const Error& error) {
        refuse(fmt::format("{}.", error.what()));
      }
    }
    if (line.empty()) refuse("is empty. Leave it out.");
    prompts.push_back(line);
  }
  if (file.bad()) throw DataError(fmt::format("Reading {} has failed.", path));
  if (prompts.empty())
    throw DataError(fmt::format("{} has no prompts. Give one on each line.", path));
  return prompts;
}

struct Input {
  std::string from;
  std::string adapter;
  BaseFormat quantize_base = BaseFormat::as_they_are;
  std::string prompt;        // one, or
  std::string prompts_file;  // a file of some
  std::string tokenizer;
  bool chat = false;
};

train::Options model_of(const Input& input) {
  return train::options_of_model(input.from, input.adapter, input.quantize_base);
}

// All ranks need this, and rank 0 alone reads files for it.
struct Encoded {
  std::vector<std::vector<int64_t>> prompts;
  std::vector<int64_t> stop_tokens;
  int64_t vocabulary = 0;

  std::string message() const {
    return nlohmann::json{{"prompts", prompts}, {"stop", stop_tokens}, {"vocabulary", vocabulary}}
        .dump();
  }
  static Encoded of(const std::string& message) {
    const auto json = nlohmann::json::parse(message);
    return {.prompts = json.at("prompts").get<std::vector<std::vector<int64_t>>>(),
            .stop_tokens = json.at("stop").get<std::vector<int64_t>>(),
            .vocabulary = json.at("vocabulary").get<int64_t>()};
  }
};

/// Rank 0's texts and tokenizer.
struct GivenTexts {
  std::vector<std::string> prompts;
  Tokenizer tokenizer;

  explicit GivenTexts(const Input& input)
      : prompts(input.prompts_file.empty() ? std::vector{input.prompt}
                                           : read_prompts(input.prompts_file)),
        tokenizer(tokenizer_of(input)) {}

  Encoded encoded(const Input& input) const {
    const auto base = model_of(input).from;
    const auto sizes =
        language_model_config((std::filesystem::path(base) / "config.json").string());
    if (sizes->head() != Head::next_token) {
      throw ConfigError(fmt::format(
          "The model of {} is a {}, which does not predict the next token: it continues no text. "
          "Give another --from.",
          base, sizes->description()));
    }
    std::optional<ChatTemplate> chat;
    if (input.chat) chat = chat_of(tokenizer.file().parent_path());
    Encoded all{.prompts = {},
                .stop_tokens = train::end_tokens(base, tokenizer),
                .vocabulary = std::min(tokenizer.vocab_size(), sizes->vocab_size())};
    for (const auto& prompt : prompts) {
      all.prompts.push_back(
          chat
              ? tokenizer.encode(chat->text(
                    nlohmann::ordered_json::array({{{"role", "user"}, {"content", prompt}}}).dump(),
                    true))
              : tokenizer.encode(prompt, SpecialTokens::with));
    }
    return all;
  }

 private:
  static Tokenizer tokenizer_of(const Input& input) {
    if (input.tokenizer == "bytes") return Tokenizer::bytes();
    if (!input.tokenizer.empty()) return Tokenizer::load(input.tokenizer);
    // A run puts it beside its adapter, and other programs need not.
    const std::filesystem::path own = input.from;
    const bool has_one = std::filesystem::exists(own / "tokenizer.json") ||
                         std::filesystem::exists(own / "tokenizer.model");
    return Tokenizer::load(has_one ? input.from : model_of(input).from);
  }

  static ChatTemplate chat_of(const std::filesystem::path& folder) {
    if (auto chat = ChatTemplate::load(folder)) return std::move(*chat);
    throw DataError(fmt::format(
        "{} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json). "
        "Leave --chat out.",
        folder.string()));
  }
};

// A line of JSON: what the model was given, and what it has added.
void print_line(const std::string& prompt, std::vector<int64_t> tokens,
                const std::vector<int64_t>& added, const Tokenizer& tokenizer) {
  const auto begin = tokenizer.decode(tokens, SpecialTokens::without).size();
  tokens.insert(tokens.end(), added.begin(), added.end());
  const auto whole = tokenizer.decode(tokens, SpecialTokens::without);
  const nlohmann::ordered_json line{{"prompt", prompt},
                                    {"text", whole.substr(std::min(begin, whole.size()))}};
  fmt::print("{}\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  std::fflush(stdout);
}

int generate_on(const std::shared_ptr<comm::Group>& group, const Input& input, const Config& config,
                train::GenerateTextsOptions options) {
  std::optional<GivenTexts> texts;
  std::string message;
  comm::agree_on_rank_zero<DataError>(*group, "Reading the prompts", [&] {
    texts.emplace(input);
    message = texts->encoded(input).message();
  });
  const auto encoded = Encoded::of(comm::gather_texts(*group, message, "prompts").front());
  train::LoadedModel loaded(model_of(input), config, group);
  options.each.context = loaded.model().config().context();
  options.each.stop_tokens = encoded.stop_tokens;
  options.each.vocabulary = encoded.vocabulary;
  std::optional<Printer> printer;
  if (texts && input.prompts_file.empty()) {
    printer.emplace(texts->tokenizer, encoded.prompts.front());
    if (!input.chat) fmt::print("{}", printable(input.prompt, "\n\t"));
    options.on_token = [&](size_t, int64_t token) { printer->add(token); };
  } else if (texts) {
    options.on_text = [&](size_t i, const std::vector<int64_t>& added) {
      print_line(texts->prompts[i], encoded.prompts[i], added, texts->tokenizer);
    };
  }
  train::generate_texts(loaded.engine(), loaded.model(), encoded.prompts, options);
  if (printer) printer->finish();
  return 0;
}

}  // namespace

int generate(const Arguments& arguments) {
  OptionParser parser("generate", "Continues a text, or many, with a model from a folder.");
  Input input;
  Config config;
  std::optional<int> nproc;
  std::string dtype = "fp32";
  train::GenerateTextsOptions options;
  options.each.temperature = 0;
  options.each.tokens = 64;
  parser
      .add_option("--from", input.from,
                  "Folder with config.json, weights and a tokenizer, or of a peft adapter")
      ->required()
      ->type_name("DIR");
  parser.add_option("--adapter", input.adapter, "Folder of a peft adapter")->type_name("DIR");
  add_base_format(parser, input.quantize_base);
  auto* one =
      parser.add_option("--prompt", input.prompt, "The text to continue")->type_name("TEXT");
  parser
      .add_option("--prompts", input.prompts_file,
                  "A file with a text on each line, or JSON lines (.jsonl) with {\"prompt\": TEXT}")
      ->type_name("FILE");
  parser
      .add_option("--tokenizer", input.tokenizer,
                  "A tokenizer.json, a folder with one, a sentencepiece model's file, or bytes, in "
                  "place of the folder's")
      ->type_name("PATH");
  parser.add_flag("--chat", input.chat, "A prompt is a user's message: use the chat template");
  parser.add_option("--tokens", options.each.tokens, "The most tokens to add to a text")
      ->check(not_negative());
  parser.add_option("--temperature", options.each.temperature, "0 takes the likeliest token")
      ->check(not_negative());
  parser.add_option("--top-k", options.each.top_k, "Only the likeliest so many are drawn; 0: all");
  parser.add_option("--top-p", options.each.top_p,
                    "Only the likeliest are drawn whose probabilities add up to so much");
  parser.add_option("--seed", options.each.seed, "Seed of the draws of the first text");
  parser.add_option("--batch", options.batch, "Texts that a rank continues at a time")
      ->check(positive());
  parser.add_option("-n,--nproc", nproc, "Ranks to start on this host")->type_name("N");
  parser.add_option("--stage", config.stage, "3: each rank holds its part of the weights")
      ->check(CLI::Range(0, 3));
  parser
      .add_option("--live-parameters", config.max_live_parameters,
                  "Stage 3 on several hosts: the most parameters that a rank gathers at a time")
      ->check(not_negative());
  parser.add_option("--dtype", dtype, "Dtype of the weights")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  if (const auto status = parser.read(arguments)) return *status;
  config.bf16 = dtype == "bf16";
  if ((one->count() > 0) == !input.prompts_file.empty()) {
    throw ConfigError(
        "zero generate continues the text of --prompt, or those of a file (--prompts). Give one of "
        "the two.");
  }
  zero::check(options.each);
  const auto ranks = choose_ranks(nproc, 1);
  return run_on_ranks(ranks, {"generate"}, arguments,
                      [&](const std::shared_ptr<comm::Group>& group) {
                        return generate_on(group, input, config, options);
                      });
}

}  // namespace zero::app
