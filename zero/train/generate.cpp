#include "zero/train/generate.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/train/evaluation.h"

namespace zero::train {

std::vector<int64_t> generate(Gpt2& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options, comm::Group& group) {
  if (prompt.empty()) throw ConfigError("The prompt is empty; it should have at least one token.");
  const EvaluationMode evaluation(*model);
  const int64_t window = std::min(options.window, model->config().context);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(options.seed));
  auto tokens = prompt;
  const auto chosen_by_all = at::empty({group.size()}, at::kLong);
  for (int64_t i = 0; i < options.tokens; ++i) {
    const auto length = std::min(window, static_cast<int64_t>(tokens.size()));
    const auto input =
        at::from_blob(tokens.data() + tokens.size() - length, {1, length}, at::kLong);
    const auto logits = model->logits_last(input)[0].to(at::kFloat);
    const auto chosen =
        options.temperature == 0
            ? at::argmax(logits, 0).view({1})
            : at::multinomial(at::softmax(logits / options.temperature, 0), 1, false, generator);
    // The ranks compute the same; that they go on with the same token does not depend on it.
    group.all_gather_control(chosen_by_all, chosen, "the next token");
    tokens.push_back(chosen_by_all.data_ptr<int64_t>()[0]);
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

}  // namespace zero::train
