// Mistakes in the parts of a step: backward and its hooks, flags, norms, updates.
#include <vector>

#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using c10::Event;

// ---- backward

// A hook runs on the stream of its parameter's operators, which need not be the default one.
// pytorch/pytorch issue 86910.
void hook_takes_the_default_stream(bool mistake) {
  const auto weight = filled(1).requires_grad_();
  synchronize();
  Tensor norm;
  weight.register_hook([&](const Tensor& gradient) {
    const c10::StreamGuard guard(mistake ? stream(0) : current_stream());
    norm = gradient.norm();
  });
  on(stream(2), [&] { (weight * weight).sum().backward(); });
  synchronize();
}

void hook_fills_a_bucket_before_the_gradient_is_there(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1).requires_grad_();
  const auto bucket = filled(0);
  synchronize();
  weight.register_hook([&](const Tensor& gradient) {
    if (!mistake) order(s.side, current_stream());
    on(s.side, [&] { bucket.copy_(gradient); });
    gradient.record_stream(s.side);
  });
  (weight * weight).sum().backward();
  synchronize();
}

// The hook scales on a stream of its own, and the reduction waits for backward's alone.
// NVIDIA/Megatron-LM issue 3670.
void reduction_does_not_wait_for_the_hooks_stream(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1).requires_grad_();
  const auto bucket = filled(0);
  synchronize();
  weight.register_hook([&](const Tensor& gradient) {
    order(s.third, current_stream());
    on(s.third, [&] { bucket.copy_(gradient).mul_(0.5); });
    gradient.record_stream(s.third);
  });
  (weight * weight).sum().backward();
  order(s.side, mistake ? s.main : s.third);
  on(s.side, [&] { return bucket * 2; });
  synchronize();
}

// Backward of a second micro-batch adds to what the copy into the bucket still reads.
// pytorch/pytorch pull request 73535.
void second_backward_adds_to_a_gradient_that_is_copied(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1).requires_grad_();
  const auto bucket = filled(0);
  synchronize();
  (weight * weight).sum().backward();
  order(s.side, s.main);
  on(s.side, [&] { bucket.copy_(weight.grad()); });
  if (!mistake) order(s.main, s.side);
  (weight * weight).sum().backward();
  synchronize();
}

// Backward lets the stream that called it wait, and no other.
// meta-pytorch/torchrec pull request 2071.
void gradient_is_read_on_a_stream_that_backward_does_not_know(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1).requires_grad_();
  synchronize();
  (weight * weight).sum().backward();
  if (!mistake) order(s.side, s.main);
  on(s.side, [&] { return weight.grad() * 2; });
  synchronize();
}

// The frame of a weight takes the next unit where one branch is done; the other still reads it.
void frame_is_taken_while_a_branch_reads_it_in_backward(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1);
  const auto x = filled(1).requires_grad_(), other = filled(1).requires_grad_();
  synchronize();
  const auto first = weight * x;
  const auto second = on(s.side, [&] { return weight * other; });  // its backward is the first
  order(s.main, s.side);
  x.register_hook([&](const Tensor& /*gradient*/) {
    if (!mistake) order(s.main, s.side);
    const torch::NoGradGuard no_grad;
    on(s.main, [&] { weight.fill_(2); });
  });
  (first + second).sum().backward();
  synchronize();
}

void updated_while_backward_reads_it(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1), gradient = filled(1);
  synchronize();
  const auto y = weight * 2;
  if (!mistake) order(s.side, s.main);
  on(s.side, [&] { weight.sub_(gradient); });
  synchronize();
}

// An embedding that is the output's weight too gets its gradient from both ends.
void tied_gradients_are_added_on_two_streams(bool mistake) {
  const ThreeStreams s;
  const auto sum = filled(0), of_output = filled(1), of_embedding = filled(2);
  synchronize();
  on(s.side, [&] { sum.add_(of_output); });
  if (!mistake) order(s.third, s.side);
  on(s.third, [&] { sum.add_(of_embedding); });
  synchronize();
}

void gradients_are_unscaled_while_they_are_added_up(bool mistake) {
  const ThreeStreams s;
  const auto sum = filled(0), gradient = filled(1);
  synchronize();
  Event first(c10::kPrivateUse1), last(c10::kPrivateUse1);
  sum.add_(gradient);
  first.record(s.main);
  sum.add_(gradient);
  last.record(s.main);
  (mistake ? first : last).block(s.side);
  on(s.side, [&] { sum.div_(1024); });
  synchronize();
}

// ---- flags, norms, scales

void finite_flag_is_read_too_early(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1), weight = filled(1);
  synchronize();
  const auto finite = on(s.side, [&] { return gradient.isfinite().all(); });
  if (!mistake) order(s.main, s.side);
  weight.mul_(finite);
  synchronize();
}

// Units are checked on two streams, each into an element of its own.
void overflow_flag_is_read_before_all_units_are_checked(bool mistake) {
  const ThreeStreams s;
  const auto first = filled(1), second = filled(1), weight = filled(1), found = filled(0, 0, 2);
  synchronize();
  on(s.side, [&] { found.select(0, 0).copy_(first.isinf().any()); });
  on(s.third, [&] { found.select(0, 1).copy_(second.isinf().any()); });
  order(s.main, s.side);
  if (!mistake) order(s.main, s.third);
  weight.sub_(found.sum());
  synchronize();
}

void loss_scale_grows_while_gradients_are_unscaled(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1), scale = filled(1024, 0, 1);
  order(s.side, s.main);
  on(s.side, [&] { gradient.div_(scale); });
  if (!mistake) order(s.main, s.side);
  scale.mul_(2);
  synchronize();
}

void clip_reads_the_norm_before_it_is_there(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1);
  auto norm = filled(0, 0, 1);
  order(s.side, s.main);
  on(s.side, [&] { norm.copy_(gradient.norm()); });
  if (!mistake) order(s.main, s.side);
  const auto factor = (1 / norm).clamp_max(1);
  synchronize();
}

// Clipping in place begins with one unit where the norm of all is still being taken.
void gradient_is_clipped_while_the_norm_reads_it(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1);
  order(s.side, s.main);
  const auto norm = on(s.side, [&] { return gradient.norm(); });
  if (!mistake) order(s.main, s.side);
  gradient.mul_(0.5);
  synchronize();
}

void gradients_are_cleared_while_the_norm_reads_them(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1).requires_grad_();
  synchronize();
  (weight * weight).sum().backward();
  order(s.side, s.main);
  const auto norm = on(s.side, [&] { return weight.grad().norm(); });
  if (!mistake) order(s.main, s.side);
  weight.mutable_grad().zero_();
  synchronize();
}

// One element takes the sum of squares of a unit after another.
void partial_norm_is_cleared_before_it_was_added(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1), partial = filled(0, 0, 1), total = filled(0, 0, 1);
  for (int unit = 0; unit < 2; ++unit) {
    if (unit > 0 && !mistake) order(s.main, s.side);
    partial.zero_();
    partial.add_(gradient.pow(2).sum());
    order(s.side, s.main);
    on(s.side, [&] { total.add_(partial); });
  }
  synchronize();
}

// ---- updates

void two_groups_share_a_step_count(bool mistake) {
  const ThreeStreams s;
  const auto first = filled(1), second = filled(1), count = filled(0, 0, 1);
  synchronize();
  const auto update = [&](const Tensor& weight) {
    count.add_(1);
    weight.sub_(0.1 / count);
  };
  on(s.side, [&] { update(first); });
  if (!mistake) order(s.third, s.side);
  on(s.third, [&] { update(second); });
  synchronize();
}

void average_of_weights_reads_while_they_are_updated(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1), average = filled(1);
  for (int step = 0; step < 2; ++step) {
    if (step > 0 && !mistake) order(s.main, s.side);
    weight.sub_(0.5);
    order(s.side, s.main);
    on(s.side, [&] { average.mul_(0.9).add_(weight, 0.1); });
  }
  synchronize();
}

// The mark stands after the fp32 update; the gather reads the bf16 copy that comes next.
void half_copy_is_read_before_it_is_written(bool mistake) {
  const ThreeStreams s;
  const auto master = filled(1), half = filled(1).to(at::kBFloat16);
  synchronize();
  Event updated(c10::kPrivateUse1);
  on(s.side, [&] {
    master.sub_(0.5);
    if (mistake) updated.record(s.side);
    half.copy_(master);
    if (!mistake) updated.record(s.side);
  });
  updated.block(s.third);
  on(s.third, [&] { return half * 2; });
  synchronize();
}

// The update of one unit runs beside the norm of the next; moments are shared by a wrong offset.
void moments_of_two_units_overlap(bool mistake) {
  const ThreeStreams s;
  const auto moments = filled(0, 0, 2 * kNumel), gradient = filled(1);
  synchronize();
  const auto update = [&](int64_t offset) {
    moments.narrow(0, offset, kNumel).mul_(0.9).add_(gradient);
  };
  on(s.side, [&] { update(0); });
  on(s.third, [&] { update(mistake ? kNumel / 2 : kNumel); });
  synchronize();
}

}  // namespace

std::vector<Mistake> mistakes_in_a_step() {
  return {
      {"hook_takes_the_default_stream", hook_takes_the_default_stream, wait_of(0, 2)},
      {"hook_fills_a_bucket_before_the_gradient_is_there",
       hook_fills_a_bucket_before_the_gradient_is_there, wait_of(1, 0)},
      {"reduction_does_not_wait_for_the_hooks_stream", reduction_does_not_wait_for_the_hooks_stream,
       wait_of(1, 2)},
      {"second_backward_adds_to_a_gradient_that_is_copied",
       second_backward_adds_to_a_gradient_that_is_copied, wait_of(0, 1)},
      {"gradient_is_read_on_a_stream_that_backward_does_not_know",
       gradient_is_read_on_a_stream_that_backward_does_not_know, wait_of(1, 0)},
      {"frame_is_taken_while_a_branch_reads_it_in_backward",
       frame_is_taken_while_a_branch_reads_it_in_backward, wait_of(0, 1)},
      {"updated_while_backward_reads_it", updated_while_backward_reads_it, wait_of(1, 0)},
      {"tied_gradients_are_added_on_two_streams", tied_gradients_are_added_on_two_streams,
       wait_of(2, 1)},
      {"gradients_are_unscaled_while_they_are_added_up",
       gradients_are_unscaled_while_they_are_added_up, wait_of(1, 0)},
      {"finite_flag_is_read_too_early", finite_flag_is_read_too_early, wait_of(0, 1)},
      {"overflow_flag_is_read_before_all_units_are_checked",
       overflow_flag_is_read_before_all_units_are_checked, wait_of(0, 2)},
      {"loss_scale_grows_while_gradients_are_unscaled",
       loss_scale_grows_while_gradients_are_unscaled, wait_of(0, 1)},
      {"clip_reads_the_norm_before_it_is_there", clip_reads_the_norm_before_it_is_there,
       wait_of(0, 1)},
      {"gradient_is_clipped_while_the_norm_reads_it", gradient_is_clipped_while_the_norm_reads_it,
       wait_of(0, 1)},
      {"gradients_are_cleared_while_the_norm_reads_them",
       gradients_are_cleared_while_the_norm_reads_them, wait_of(0, 1)},
      {"partial_norm_is_cleared_before_it_was_added", partial_norm_is_cleared_before_it_was_added,
       wait_of(0, 1)},
      {"two_groups_share_a_step_count", two_groups_share_a_step_count, wait_of(2, 1)},
      {"average_of_weights_reads_while_they_are_updated",
       average_of_weights_reads_while_they_are_updated, wait_of(0, 1)},
      {"half_copy_is_read_before_it_is_written", half_copy_is_read_before_it_is_written,
       wait_of(2, 1)},
      {"moments_of_two_units_overlap", moments_of_two_units_overlap, wait_of(2, 1)},
  };
}

}  // namespace zero::simulated
