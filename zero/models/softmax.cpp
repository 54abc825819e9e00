#include "zero/models/softmax.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/models/softmax_kernel.h"

namespace zero {
namespace {

void check_targets(const at::Tensor& targets, int64_t vocabulary) {
  const auto* values = targets.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < targets.numel(); ++row) {
    const int64_t target = values[row];
    if (target != kIgnoredTarget && (target < 0 || target >= vocabulary)) {
      throw DataError(
          fmt::format("Target {} is outside of the model's vocabulary of {} tokens. Prepare the "
                      "data with the model's tokenizer, or "
                      "give the model a larger vocab_size.",
                      target, vocabulary));
    }
  }
}

}  // namespace

at::Tensor softmax_cross_entropy_reference_(at::Tensor& logits, const at::Tensor& targets,
                                            const at::Tensor& row_scale, bool gradient) {
  const auto counted = targets.ne(kIgnoredTarget);
  const auto column = targets.clamp_min(0).unsqueeze(1);
  auto log_probability = at::_log_softmax(logits.to(at::kFloat), 1, false);
  const auto loss = log_probability.gather(1, column).squeeze(1).to(at::kDouble).neg_();
  if (gradient) {
    auto probability = log_probability.exp_();
    probability.mul_(row_scale.unsqueeze(1));
    probability.scatter_add_(1, column, row_scale.neg().unsqueeze(1));
    logits.copy_(probability);
  }
  return loss.masked_fill(counted.logical_not(), 0).sum();
}

at::Tensor softmax_cross_entropy_(at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& row_scale, bool gradient) {
  if (!logits.is_cpu())
    return softmax_cross_entropy_reference_(logits, targets, row_scale, gradient);
  const auto indices = targets.contiguous();
  const auto scales = row_scale.contiguous();
  const int64_t rows = logits.size(0);
  const int64_t vocabulary = logits.size(1);
  check_targets(indices, vocabulary);

  auto work = logits.to(at::kFloat).contiguous();  // logits itself when it is fp32
  auto losses = at::zeros({rows}, work.options().dtype(at::kDouble));
  auto* values = work.mutable_data_ptr<float>();
  auto* loss = losses.mutable_data_ptr<double>();
  const auto* target = indices.const_data_ptr<int64_t>();
  const auto* scale = scales.const_data_ptr<float>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* line = values + row * vocabulary;
      if (target[row] != kIgnoredTarget) {
        loss[row] = softmax_row(line, vocabulary, target[row], scale[row], gradient);
      } else if (gradient) {
        std::fill_n(line, vocabulary, 0.0F);
      }
    }
  });
  if (gradient && !work.is_same(logits)) logits.copy_(work);
  return losses.sum();
}

}  // namespace zero
