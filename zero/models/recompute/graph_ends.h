// A part of a graph by itself: where a backward pass through it begins, and where it ends.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>

namespace zero {

/// The node where backward begins. It gives the gradients of `next_edges` away, so that nobody else
/// holds them meanwhile.
class GraphSource final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& nothing) override;
  std::string name() const override { return "zero: gradients of outputs"; }
  torch::autograd::variable_list gradients;
};

/// The node where backward ends. It takes the gradients as they are (leaves would copy some of
/// them), in the order in which tensors were given this history.
class GraphSink final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& arrived) override;
  std::string name() const override { return "zero: gradients of inputs"; }
  torch::autograd::variable_list gradients;
};

/// Runs one backward pass from `source`, which frees the graph and adds to leaves.
void run_backward(const std::shared_ptr<GraphSource>& source);

}  // namespace zero
