#include "zero/train/layer_major.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/timeline.h"
#include "zero/models/recompute/graph_ends.h"

namespace zero {

namespace {

using torch::autograd::Edge;
using Tensors = std::vector<at::Tensor>;

bool differentiable(const at::Tensor& tensor) {
  return tensor.defined() && torch::autograd::isDifferentiableType(tensor.scalar_type());
}

// The part of a graph that one layer adds for one micro-batch, between the places where gradients
// of its outputs enter and where gradients of its inputs arrive.
struct Segment {
  std::shared_ptr<GraphSink> sink = std::make_shared<GraphSink>();
  std::vector<Edge> outputs;

  // Returns `tensors` as inputs of this part.
  Tensors enter(Tensors tensors) const {
    for (auto& tensor : tensors) {
      if (!differentiable(tensor)) continue;
      tensor = tensor.detach();
      torch::autograd::set_history(tensor, sink);
    }
    return tensors;
  }

  // Returns `tensors` without their graph, and keeps the graph's ends in this part.
  Tensors leave(Tensors tensors) {
    for (auto& tensor : tensors) {
      if (!differentiable(tensor)) continue;
      outputs.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                               : Edge());
      tensor = tensor.detach();
    }
    return tensors;
  }
};

// Adds an edge for each gradient, one for each differentiable tensor; undefined gradients have
// none.
void add_edges(GraphSource& source, std::vector<Edge>& edges, Tensors& gradients) {
  for (size_t i = 0; i < edges.size() && i < gradients.size(); ++i) {
    if (!edges[i].is_valid() || !gradients[i].defined()) continue;
    source.add_next_edge(std::move(edges[i]));
    source.gradients.push_back(std::move(gradients[i]));
  }
}

void run(const std::shared_ptr<GraphSource>& source) {
  if (!source->gradients.empty()) run_backward(source);
}

// Replaces the gradients of a part's outputs by those of its inputs, and frees the part.
void backward(Segment part, Tensors& gradients) {
  const auto source = std::make_shared<GraphSource>();
  add_edges(*source, part.outputs, gradients);
  gradients.clear();
  run(source);
  gradients = std::move(part.sink->gradients);
}

}  // namespace

std::vector<at::Tensor> backward_layer_major(Engine& engine, const LayerSequence& model,
                                             const RecomputeOptions& options) {
  const at::AutoGradMode grad(true);
  auto& timeline = *engine.group().accounts().timeline;
  const auto forward = [&](const auto& pass) {
    const Timeline::Scope phase(timeline, Activity::forward);
    return pass();
  };
  std::vector<at::Tensor> losses;
  auto values = forward(model.inputs);
  const size_t count = values.size();
  engine.accumulate(
      static_cast<int64_t>(count),
      [&](const std::function<void()>& layer_done) {
        std::vector<Segment> first(count);
        std::vector<std::vector<Segment>> layers;
        forward([&] {
          for (size_t i = 0; i < count; ++i) values[i] = first[i].leave(std::move(values[i]));
          for (const auto& layer : model.layers) {
            auto& parts = layers.emplace_back(count);
            for (size_t i = count; i-- > 0;) {
              auto entered = parts[i].enter(std::exchange(values[i], {}));
              values[i] = parts[i].leave(zero::recompute(layer, std::move(entered), options));
            }
          }
        });

        std::vector<Tensors> gradients(count);
        for (size_t i = 0; i < count; ++i) {
          Segment last;
          auto loss = forward([&] {
            return model.loss(last.enter(std::exchange(values[i], {})), static_cast<int64_t>(i));
          });
          if (!loss.defined() || loss.numel() != 1) {
            throw Error(fmt::format("The loss of micro-batch {} has {} elements; it must have one.",
                                    i, loss.defined() ? loss.numel() : 0));
          }
          gradients[i] = {engine.loss_gradient(loss)};
          losses.push_back(std::move(last.leave({std::move(loss)}).front()));
          backward(std::move(last), gradients[i]);
        }
        layer_done();
        while (!layers.empty()) {
          for (size_t i = 0; i < count; ++i) backward(std::move(layers.back()[i]), gradients[i]);
          layers.pop_back();
          layer_done();
        }
        const auto source = std::make_shared<GraphSource>();
        for (size_t i = 0; i < count; ++i) add_edges(*source, first[i].outputs, gradients[i]);
        run(source);
        layer_done();
      },
      model.shared);
  return losses;
}

}  // namespace zero
