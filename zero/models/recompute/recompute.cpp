#include "zero/models/recompute/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/base/deferred_graph.h"
#include "zero/base/error.h"
#include "zero/models/recompute/activation_store.h"
#include "zero/models/recompute/graph_ends.h"

namespace zero {

namespace {

using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// --- What both runs must find alike ---

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

struct RandomState {
  at::Generator generator;
  at::Tensor state;
};

// LibTorch's default generators of the CPU and of the devices where inputs lie.
std::vector<at::Generator> default_generators(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  for (const auto& input : inputs) {
    // Tensors of `meta` draw nothing.
    if (!input.defined() || input.is_cpu() || !at::isAccelerator(input.device().type())) continue;
    const auto& own = at::globalContext().defaultGenerator(input.device());
    if (std::find(generators.begin(), generators.end(), own) == generators.end())
      generators.push_back(own);
  }
  return generators;
}

std::vector<RandomState> random_states(std::vector<at::Generator> generators) {
  std::vector<RandomState> states;
  for (auto& generator : generators) {
    auto state = state_of(generator);
    states.push_back({std::move(generator), std::move(state)});
  }
  return states;
}

// Keeps the states that have moved on since: nothing was drawn from the others.
std::vector<RandomState> used(std::vector<RandomState> states) {
  std::erase_if(states, [](auto& s) { return same_bytes(s.state, state_of(s.generator)); });
  return states;
}

// Sets generators back, for its life.
class Replay {
 public:
  explicit Replay(const std::vector<RandomState>& states) {
    for (const auto& s : states) {
      auto generator = s.generator;
      auto now = state_of(generator);
      set_state(generator, s.state);
      now_.push_back({std::move(generator), std::move(now)});
    }
  }
  ~Replay() {
    for (auto& s : now_) set_state(s.generator, s.state);
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

 private:
  std::vector<RandomState> now_;
};

// --- Inputs ---

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

// An input between forward and backward.
class SavedInput {
 public:
  SavedInput(const at::Tensor& input, const std::shared_ptr<ActivationStore>& store)
      : requires_grad_(input.defined() && input.requires_grad()) {
    if (store && requires_grad_ && !input.is_leaf() && input.is_cpu() &&
        input.layout() == at::kStrided && input.is_non_overlapping_and_dense()) {
      handle_ = store->put(input.detach());
      store_ = store;
    } else if (input.defined()) {
      tensor_ = input.detach();
      version_ = version_of(tensor_);
    }
  }
  SavedInput(SavedInput&& other) noexcept
      : requires_grad_(other.requires_grad_),
        tensor_(std::move(other.tensor_)),
        version_(other.version_),
        store_(std::move(other.store_)),
        handle_(other.handle_) {}
  SavedInput& operator=(SavedInput&&) = delete;
  SavedInput(const SavedInput&) = delete;
  SavedInput& operator=(const SavedInput&) = delete;
  ~SavedInput() {
    if (store_) store_->drop(handle_);
  }

  bool requires_grad() const { return requires_grad_; }
  bool changed() const { return version_of(tensor_) != version_; }
  // Returns a tensor without a graph. `last`: it is not asked for again.
  at::Tensor value(bool last) {
    if (store_) return store_->get(handle_).detach();
    if (!tensor_.defined()) return {};
    return last ? std::move(tensor_) : tensor_.detach();
  }
  void done() {
    if (store_) store_->done(handle_);
  }

 private:
  bool requires_grad_ = false;
  at::Tensor tensor_;  // undefined where the store has it
  int64_t version_ = 0;
  std::shared_ptr<ActivationStore> store_;
  int64_t handle_ = 0;
};

class Recomputation final : public Node {
 public:
  Recomputation(TensorFunction function, std::vector<SavedInput> inputs,
                std::vector<RandomState> random, const Autocast::State& autocast)
      : function_(std::move(function)),
        inputs_(std::move(inputs)),
        random_(std::move(random)),
        autocast_(autocast) {}

  std::string name() const override { return "zero::recompute"; }

  // Gives an output of the first run its place in the graph.
  at::Tensor attach(size_t position, size_t outputs, const at::Tensor& output) {
    auto attached = output.detach();
    torch::autograd::set_history(attached, getptr());
    positions_.push_back(position);
    outputs_ = outputs;
    return attached;
  }

  void will_release_variables() override { last_ = true; }

  void release_variables() override {
    released_ = true;
    function_ = nullptr;
    inputs_.clear();
    random_.clear();
  }

  variable_list apply(variable_list&& gradients) override {
    refuse_what_cannot_be();
    auto sink = std::make_shared<GraphSink>();
    const auto source = std::make_shared<GraphSource>();
    {
      const auto outputs = run_again(sink);
      for (size_t i = 0; i < positions_.size(); ++i) {
        const auto& output = outputs[positions_[i]];
        if (!gradients[i].defined() || !output.requires_grad()) continue;
        source->add_next_edge(torch::autograd::impl::gradient_edge(output));
        source->gradients.push_back(std::move(gradients[i]));
      }
    }
    if (!source->gradients.empty()) run_backward(source);
    if (!last_) {
      for (auto& input : inputs_) input.done();
    }
    variable_list result(inputs_.size());
    size_t next = 0;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!inputs_[i].requires_grad()) continue;
      if (next < sink->gradients.size()) result[i] = std::move(sink->gradients[next]);
      ++next;
    }
    return result;
  }

 private:
  void refuse_what_cannot_be() const {
    if (released_) {
      throw Error(
          "backward ran a second time through zero::recompute, whose inputs were released in the "
          "first. Give retain_graph=true to the first backward, or compute the loss again.");
    }
    if (at::GradMode::is_enabled()) {
      throw Error(
          "zero::recompute has no second derivative (backward ran with create_graph). Call the "
          "function without zero::recompute where one is needed.");
    }
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw Error(
          "zero::recompute cannot tell the gradients that torch::autograd::grad (or backward with "
          "inputs) asked for from those of the parameters that its function uses. Call backward "
          "without inputs and read .grad.");
    }
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!inputs_[i].changed()) continue;
      throw Error(fmt::format(
          "Input {} of zero::recompute was changed in place before backward, where the function "
          "must run on it again. Use an operator that is not in place, or give zero::recompute a "
          "clone.",
          i));
    }
  }

  // Returns the outputs of the second run, with a graph that ends in `sink`.
  std::vector<at::Tensor> run_again(const std::shared_ptr<GraphSink>& sink) {
    std::vector<at::Tensor> arguments(inputs_.size());
    for (size_t i = inputs_.size(); i-- > 0;)  // a store reads ahead downwards
      arguments[i] = inputs_[i].value(last_);
    released_ = last_;  // should this pass fail
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (inputs_[i].requires_grad()) torch::autograd::set_history(arguments[i], sink);
    }
    std::vector<at::Tensor> outputs;
    {
      const Replay replay(random_);
      const Autocast casts(autocast_);
      const at::AutoGradMode grad(true);
      outputs = function_(arguments);
    }
    if (outputs.size() != outputs_) {
      throw Error(
          fmt::format("A function given to zero::recompute returned {} tensors in forward and {} "
                      "in backward. {}",
                      outputs_, outputs.size(), kSameTwice));
    }
    for (size_t i = 0; i < positions_.size(); ++i) {
      const auto& output = outputs[positions_[i]];
      const auto& first = input_metadata(i);
      if (output.defined() && first.is_same_shape(output) &&
          c10::typeMetaToScalarType(first.options().dtype()) == output.scalar_type())
        continue;
      throw Error(fmt::format(
          "Output {} of a function given to zero::recompute has another shape or dtype in "
          "backward than in forward. {}",
          positions_[i], kSameTwice));
    }
    return outputs;
  }

  static constexpr const char* kSameTwice =
      "It must compute the same twice: what it captures, and the model's training mode, must stay "
      "as they are until backward.";

  TensorFunction function_;
  std::vector<SavedInput> inputs_;
  std::vector<RandomState> random_;
  Autocast::State autocast_;
  std::vector<size_t> positions_;  // by gradient: of the output that it belongs to
  size_t outputs_ = 0;
  bool last_ = false;
  bool released_ = false;
};

bool is_one_of(const at::Tensor& tensor, const std::vector<at::Tensor>& inputs) {
  return std::any_of(inputs.begin(), inputs.end(),
                     [&](const at::Tensor& input) { return tensor.is_same(input); });
}

}  // namespace

std::vector<at::Tensor> recompute(TensorFunction function, std::vector<at::Tensor> inputs,
                                  RecomputeOptions options) {
  if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return function(inputs);
  if (options.generators.empty()) options.generators = default_generators(inputs);
  auto random = random_states(std::move(options.generators));
  const auto autocast = Autocast::State::current();
  std::vector<int64_t> versions;
  for (const auto& input : inputs) versions.push_back(version_of(input));
  std::vector<at::Tensor> outputs;
  {
    const DeferredGraph deferred;
    const at::NoGradGuard no_grad;
    const Autocast casts(autocast);
    outputs = function(inputs);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (version_of(inputs[i]) == versions[i]) continue;
    throw Error(
        fmt::format("A function given to zero::recompute changed its input {} in place, and could "
                    "not run on it again in backward. Use an operator that is not in place, or "
                    "clone the input in the function.",
                    i));
  }
  const auto differentiable = [&](const at::Tensor& output) {
    return output.defined() && torch::autograd::isDifferentiableType(output.scalar_type()) &&
           !is_one_of(output, inputs);
  };
  if (std::none_of(outputs.begin(), outputs.end(), differentiable)) return outputs;

  std::vector<SavedInput> saved;
  saved.reserve(inputs.size());
  for (const auto& input : inputs) saved.emplace_back(input, options.store);
  const std::shared_ptr<Recomputation> node(
      new Recomputation(std::move(function), std::move(saved), used(std::move(random)), autocast),
      torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (differentiable(outputs[i])) outputs[i] = node->attach(i, outputs.size(), outputs[i]);
  }
  return outputs;
}

at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> function, at::Tensor input,
                     RecomputeOptions options) {
  if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return function(input);
  std::vector<at::Tensor> inputs;
  inputs.push_back(std::move(input));
  auto outputs = zero::recompute(
      [function = std::move(function)](const std::vector<at::Tensor>& arguments) {
        return std::vector<at::Tensor>{function(arguments.front())};
      },
      std::move(inputs), std::move(options));
  return std::move(outputs.front());
}

}  // namespace zero
