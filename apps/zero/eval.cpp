// `zero eval`: a model's loss on data.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <map>
#include <optional>
#include <string>

#include "apps/zero/options.h"
#include "apps/zero/ranks.h"
#include "apps/zero/subcommands.h"
#include "zero/train/evaluate.h"
#include "zero/train/monitor.h"
#include "zero/train/stop.h"

namespace zero::app {
namespace {

constexpr const char* kDescription =
    "Measures a model of a folder on data: its loss, its perplexity or its accuracy.\n\n"
    "  zero eval --from my_run --data my_tokens --nproc 2 --stage 3\n\n"
    "FILE is a token file, a folder of `zero data prepare` (its validation split), a text, or JSON "
    "lines (.jsonl).";

void print(const train::Evaluation& result) {
  if (result.task == TrainingTask::classes) {
    const train::Accuracy accuracy{.correct = result.correct, .texts = result.predicted};
    fmt::print("loss {:.6f}, {}\n", result.loss, to_text(accuracy));
    return;
  }
  fmt::print("loss {:.6f}, perplexity {:.4f}, over {} tokens\n", result.loss, std::exp(result.loss),
             result.predicted);
}

}  // namespace

int eval(const Arguments& arguments) {
  OptionParser parser("eval", kDescription);
  train::EvaluateOptions options;
  std::optional<int> nproc;
  std::string dtype = "fp32";
  parser
      .add_option("--from", options.from,
                  "Folder with config.json, weights and a tokenizer, or of a peft adapter")
      ->required()
      ->type_name("DIR");
  parser.add_option("--data", options.data, "What it is measured on; several are measured as one")
      ->required()
      ->allow_extra_args(false)
      ->type_name("FILE");
  parser.add_option("--adapter", options.adapter, "Folder of a peft adapter")->type_name("DIR");
  add_base_format(parser, options.quantize_base);
  const std::map<std::string, TrainingTask> tasks{{"auto", TrainingTask::any},
                                                  {"lm", TrainingTask::language},
                                                  {"sft", TrainingTask::supervised},
                                                  {"mlm", TrainingTask::masked},
                                                  {"classify", TrainingTask::classes}};
  std::string task = "auto";
  parser.add_option("--task", task, "What is predicted: auto, lm, sft, mlm or classify")
      ->check(CLI::IsMember({"auto", "lm", "sft", "mlm", "classify"}));
  parser
      .add_option("--mask-token", options.mask_token,
                  "The number of the token that hides others in --task mlm")
      ->check(not_negative())
      ->type_name("N");
  parser.add_flag("--document-attention", options.document_attention,
                  "Attend inside of each document alone, as the data's marks say");
  parser
      .add_option("--seq", options.seq,
                  "Tokens in a sequence; 0: the model's context, at most 1024")
      ->check(not_negative());
  parser.add_option("--tokens", options.tokens, "At most so many, evenly from the data; 0: all")
      ->check(not_negative());
  parser.add_option("--micro-batch", options.micro_batch, "Sequences that a rank passes together")
      ->check(positive());
  parser.add_option("-n,--nproc", nproc, "Ranks to start on this host")->type_name("N");
  parser.add_option("--stage", options.stage, "3: each rank holds its part of the weights")
      ->check(CLI::Range(0, 3));
  parser.add_option("--dtype", dtype, "Dtype of the weights")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  parser.add_option("--logits", options.logits, "File of safetensors to write the logits to")
      ->type_name("FILE");
  if (const auto status = parser.read(arguments)) return *status;
  options.task = tasks.at(task);
  options.bf16 = dtype == "bf16";

  const auto ranks = choose_ranks(nproc, 1);
  return run_on_ranks(ranks, {"eval"}, arguments, [&](const std::shared_ptr<comm::Group>& group) {
    const train::StopSignals signals;
    auto asked = options;
    asked.stop = [&] { return signals.received() != 0; };
    const auto result = train::evaluate(asked, group);
    if (result.stopped) return 128 + std::max(signals.received(), SIGINT);
    if (group->rank() == 0) print(result);
    return 0;
  });
}

}  // namespace zero::app
