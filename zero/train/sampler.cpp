#include "zero/train/sampler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "zero/base/autocast.h"
#include "zero/data/tokenizer.h"
#include "zero/models/language/generate.h"
#include "zero/train/evaluation.h"

namespace zero::train {

void sample(Run& run, const std::function<bool()>& stop) {
  const auto& options = run.options;
  const auto& data = run.data;
  const auto device = run.group->device();
  const bool as_text = data.by_bytes || !data.tokenizer.empty();
  const auto tokenizer =
      data.tokenizer.empty() ? Tokenizer::bytes() : Tokenizer::load(data.tokenizer);
  const auto prompt = as_text ? tokenizer.encode(options.prompt) : std::vector<int64_t>{0};
  const EvaluationMode evaluation(run.model->module());
  // The model's vocabulary may be larger than the text's: tokens without a text are never drawn.
  const int64_t drawn = as_text ? tokenizer.vocab_size() : run.model->config().vocab_size();
  const auto tokens =
      generate(prompt,
               [&](const at::Tensor& seen) {
                 const Autocast casts(run.engine->config().autocast_dtype(), device.type());
                 return run.model->logits_last(on_device({seen}, device).front());
               },
               {.tokens = options.sample_tokens,
                .context = options.seq,
                .temperature = options.temperature,
                .top_k = options.top_k.value_or(0),
                .vocabulary = drawn,
                .seed = static_cast<uint64_t>(options.seed),
                .stop = stop});
  run.reports.tell([&](Monitor& monitor) {
    if (as_text) {
      monitor.sample(options.prompt, tokenizer.decode(tokens));
    } else {
      monitor.sample("tokens 0", fmt::format(" {}", fmt::join(tokens, " ")));
    }
  });
}

}  // namespace zero::train
