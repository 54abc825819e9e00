#include "zero/models/layers/softmax.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "zero/base/error.h"
#include "zero/base/observed.h"
#include "zero/base/traced.h"
#include "zero/models/layers/softmax_kernel.h"

namespace zero {
namespace {

constexpr int64_t kRowsOfAThread = 4;  // that are converted to fp32 at a time

int64_t rows_of_buffer(const at::Tensor& logits) {
  return std::min<int64_t>(logits.size(0), kRowsOfAThread * at::get_num_threads());
}

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

// Runs the kernel that the device of the logits has, or the reference.
at::Tensor enqueue(at::Tensor& logits, const at::Tensor& targets, const at::Tensor& row_scale,
                   bool gradient, double smoothing) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("zero::softmax_cross_entropy_", "")
          .typed<at::Tensor(at::Tensor&, const at::Tensor&, const at::Tensor&, bool, double)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(logits, targets, row_scale, gradient, smoothing);
}

// Takes the memory alone, for traces. A device's kernel needs none besides the losses.
at::Tensor losses_on_meta(at::Tensor& logits, const at::Tensor& /*targets*/,
                          const at::Tensor& /*row_scale*/, bool /*gradient*/,
                          double /*smoothing*/) {
  const auto losses = at::empty({logits.size(0)}, logits.options().dtype(at::kDouble));
  at::Tensor buffer;
  if (on_cpu(logits) && !(logits.scalar_type() == at::kFloat && logits.is_contiguous()))
    buffer =
        at::empty({rows_of_buffer(logits), logits.size(1)}, logits.options().dtype(at::kFloat));
  return losses.sum();
}

}  // namespace

TORCH_LIBRARY_IMPL(zero, Meta, library) { library.impl("softmax_cross_entropy_", &losses_on_meta); }

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def(
      "softmax_cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor row_scale, bool gradient, "
      "float smoothing) -> Tensor");
}

TORCH_LIBRARY_IMPL(zero, CompositeExplicitAutograd, library) {
  library.impl("softmax_cross_entropy_", &softmax_cross_entropy_reference_);
}

at::Tensor softmax_cross_entropy_reference_(at::Tensor& logits, const at::Tensor& targets,
                                            const at::Tensor& row_scale, bool gradient,
                                            double smoothing) {
  const auto counted = targets.ne(kIgnoredTarget);
  const auto column = targets.clamp_min(0).unsqueeze(1);
  auto log_probability = at::_log_softmax(logits.to(at::kFloat), 1, false);
  auto loss = log_probability.gather(1, column).squeeze(1).to(at::kDouble).mul_(smoothing - 1);
  // A probability of zero has an infinite logarithm, which only smoothing asks for.
  if (smoothing > 0) loss.sub_(log_probability.mean(1, false, at::kDouble), smoothing);
  if (gradient) {
    const auto& probability = log_probability.exp_();
    probability.mul_(row_scale.unsqueeze(1));
    probability.scatter_add_(1, column, row_scale.mul(smoothing - 1).unsqueeze(1));
    if (smoothing > 0)
      probability.sub_(row_scale.unsqueeze(1), smoothing / static_cast<double>(logits.size(1)));
    logits.copy_(probability);
  }
  return loss.masked_fill(counted.logical_not(), 0).sum();
}

at::Tensor softmax_cross_entropy_(at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& row_scale, bool gradient, double smoothing) {
  if (!logits.is_cpu()) return enqueue(logits, targets, row_scale, gradient, smoothing);
  const auto indices = targets.contiguous();
  const auto scales = row_scale.contiguous();
  const int64_t rows = logits.size(0);
  const int64_t vocabulary = logits.size(1);
  check_targets(indices, vocabulary);

  auto losses = at::zeros({rows}, logits.options().dtype(at::kDouble));
  auto* loss = losses.mutable_data_ptr<double>();
  const auto* target = indices.const_data_ptr<int64_t>();
  const auto* scale = scales.const_data_ptr<float>();
  const auto visit = [&](float* values, int64_t first, int64_t count) {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* line = values + i * vocabulary;
        const int64_t row = first + i;
        if (target[row] != kIgnoredTarget) {
          loss[row] = softmax_row(line, vocabulary, target[row], scale[row], gradient, smoothing);
        } else if (gradient) {
          std::fill_n(line, vocabulary, 0.0F);
        }
      }
    });
  };
  observed("zero::softmax_cross_entropy_", std::array{logits}, std::array{logits, losses}, [&] {
    if (logits.scalar_type() == at::kFloat && logits.is_contiguous())
      return visit(logits.mutable_data_ptr<float>(), 0, rows);
    // A few rows at a time are converted, in memory that stays in the caches.
    const int64_t step = rows_of_buffer(logits);
    const auto buffer = at::empty({step, vocabulary}, logits.options().dtype(at::kFloat));
    for (int64_t first = 0; first < rows; first += step) {
      const int64_t count = std::min(step, rows - first);
      auto lines = logits.narrow(0, first, count);
      buffer.narrow(0, 0, count).copy_(lines);
      visit(buffer.mutable_data_ptr<float>(), first, count);
      if (gradient) lines.copy_(buffer.narrow(0, 0, count));
    }
  });
  return losses.sum();
}

}  // namespace zero
