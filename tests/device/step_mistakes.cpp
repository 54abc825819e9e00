// Mistakes in backward: its hooks and its branches.
#include <vector>

#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;

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

}  // namespace

std::vector<Mistake> mistakes_in_a_step() {
  return {
      {"hook_takes_the_default_stream", hook_takes_the_default_stream, wait_of(0, 2)},
      {"gradient_is_read_on_a_stream_that_backward_does_not_know",
       gradient_is_read_on_a_stream_that_backward_does_not_know, wait_of(1, 0)},
      {"frame_is_taken_while_a_branch_reads_it_in_backward",
       frame_is_taken_while_a_branch_reads_it_in_backward, wait_of(0, 1)},
      {"tied_gradients_are_added_on_two_streams", tied_gradients_are_added_on_two_streams,
       wait_of(2, 1)},
  };
}

}  // namespace zero::simulated
