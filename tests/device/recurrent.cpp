#include "tests/device/recurrent.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace zero::simulated {

namespace {

using OptionalBias = std::optional<at::Tensor>;

// The parameters of one direction of one layer.
struct Weights {
  at::Tensor input, state;
  OptionalBias input_bias, state_bias;
};

std::vector<Weights> weights_of(at::TensorList parameters, bool biases, size_t projections) {
  const size_t each = (biases ? 4 : 2) + projections;
  std::vector<Weights> all;
  for (size_t i = 0; i + each <= parameters.size(); i += each) {
    Weights w{parameters[i], parameters[i + 1], std::nullopt, std::nullopt};
    if (biases) {
      w.input_bias = parameters[i + 2];
      w.state_bias = parameters[i + 3];
    }
    all.push_back(std::move(w));
  }
  return all;
}

// The state and the cell of an LSTM after one step; `gates` of the input, of the state.
std::pair<at::Tensor, at::Tensor> lstm_step(const at::Tensor& input_gates,
                                            const at::Tensor& state_gates, const at::Tensor& cell) {
  const auto gates = state_gates.add_(input_gates).unsafe_chunk(4, 1);
  const auto admit = gates[0].sigmoid_();
  const auto keep = gates[1].sigmoid_();
  const auto candidate = gates[2].tanh_();
  const auto show = gates[3].sigmoid_();
  auto next = (keep * cell).add_(admit * candidate);
  auto state = show * next.tanh();
  return {std::move(state), std::move(next)};
}

at::Tensor gru_step(const at::Tensor& input_gates, const at::Tensor& state_gates,
                    const at::Tensor& state) {
  const auto from_input = input_gates.unsafe_chunk(3, 1);
  const auto from_state = state_gates.unsafe_chunk(3, 1);
  const auto reset = from_state[0].add_(from_input[0]).sigmoid_();
  const auto keep = from_state[1].add_(from_input[1]).sigmoid_();
  const auto candidate = from_input[2].add(from_state[2].mul_(reset)).tanh_();
  return (state - candidate).mul_(keep).add_(candidate);
}

// The states that a layer starts from and ends with: of a GRU the one, of an LSTM state and cell.
struct States {
  at::Tensor state, cell;
};

// One direction of a layer, step by step. Returns the output of all steps.
template <class Step>
at::Tensor run_steps(const at::Tensor& input, const Weights& w, bool backwards, States& states,
                     Step step) {
  const auto whole = at::linear(input, w.input, w.input_bias);
  auto gates = whole.unbind(0);
  if (backwards) std::reverse(gates.begin(), gates.end());
  std::vector<at::Tensor> outputs;
  for (const auto& of_input : gates) {
    step(of_input, at::linear(states.state, w.state, w.state_bias), states);
    outputs.push_back(states.state);
  }
  if (backwards) std::reverse(outputs.begin(), outputs.end());
  return at::stack(outputs, 0);
}

// As the CPU does it where it has oneDNN.
at::Tensor run_fused_layer(const at::Tensor& input, const Weights& w, bool backwards,
                           States& states, int64_t layers, bool biases, bool bidirectional,
                           bool batch_first, bool train) {
  constexpr int64_t kLstm = 2;  // its number among the kinds
  const auto bias = [&](const OptionalBias& given, const at::Tensor& weight) {
    return given ? *given : at::zeros({weight.size(0)}, weight.options());
  };
  auto [output, state, cell, workspace] = at::mkldnn_rnn_layer(
      input, w.input, w.state, bias(w.input_bias, w.input), bias(w.state_bias, w.state),
      states.state, states.cell, backwards, {}, kLstm, states.state.size(1), layers, biases,
      bidirectional, batch_first, train);
  states = {state, cell};
  return output;
}

// Layers and directions around `run(input, weights, backwards, states)`.
template <class Run>
at::Tensor run_layers(const at::Tensor& input, const std::vector<Weights>& weights,
                      std::vector<States>& states, int64_t layers, double dropout, bool train,
                      bool bidirectional, bool batch_first, Run run) {
  const size_t directions = bidirectional ? 2 : 1;
  auto between = batch_first ? input.transpose(0, 1) : input;
  for (size_t layer = 0; layer < static_cast<size_t>(layers); ++layer) {
    std::vector<at::Tensor> outputs;
    for (size_t d = 0; d < directions; ++d) {
      const size_t i = layer * directions + d;
      outputs.push_back(run(between, weights[i], d == 1, states[i]));
    }
    between = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout != 0 && train && layer + 1 < static_cast<size_t>(layers)) {
      between = at::dropout(between, dropout, true);
    }
  }
  return batch_first ? between.transpose(0, 1) : between;
}

at::Tensor stacked(const std::vector<States>& states, at::Tensor States::*which) {
  std::vector<at::Tensor> all;
  for (const States& s : states) all.push_back(s.*which);
  return at::stack(all, 0);
}

at::Tensor plus(const at::Tensor& gates, const OptionalBias& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& input, at::TensorList states,
                                                    at::TensorList parameters, bool biases,
                                                    int64_t layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first) {
  TORCH_CHECK(states[0].size(2) == states[1].size(2),
              "simulated device: an LSTM with projections is not there");
  const bool fused = at::globalContext().userEnabledMkldnn() && at::Context::hasMKLDNN() &&
                     input.scalar_type() == at::kFloat && input.numel() > 0;
  const auto first = fused ? states[0].contiguous() : states[0];
  const auto second = fused ? states[1].contiguous() : states[1];
  std::vector<States> running;
  for (int64_t i = 0; i < first.size(0); ++i) running.push_back({first[i], second[i]});
  auto output = run_layers(
      input, weights_of(parameters, biases, 0), running, layers, dropout, train, bidirectional,
      batch_first, [&](const at::Tensor& x, const Weights& w, bool backwards, States& s) {
        if (fused) {
          return run_fused_layer(x.contiguous(), w, backwards, s, layers, biases, bidirectional,
                                 batch_first, train);
        }
        return run_steps(x, w, backwards, s,
                         [](const auto& of_input, const auto& of_state, auto& t) {
                           std::tie(t.state, t.cell) = lstm_step(of_input, of_state, t.cell);
                         });
      });
  return {std::move(output), stacked(running, &States::state), stacked(running, &States::cell)};
}

std::tuple<at::Tensor, at::Tensor> gru(const at::Tensor& input, const at::Tensor& state,
                                       at::TensorList parameters, bool biases, int64_t layers,
                                       double dropout, bool train, bool bidirectional,
                                       bool batch_first) {
  std::vector<States> running;
  for (int64_t i = 0; i < state.size(0); ++i) running.push_back({state[i], {}});
  auto output = run_layers(
      input, weights_of(parameters, biases, 0), running, layers, dropout, train, bidirectional,
      batch_first, [](const at::Tensor& x, const Weights& w, bool backwards, States& s) {
        return run_steps(x, w, backwards, s,
                         [](const auto& of_input, const auto& of_state, auto& t) {
                           t.state = gru_step(of_input, of_state, t.state);
                         });
      });
  return {std::move(output), stacked(running, &States::state)};
}

std::tuple<at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, at::TensorList states,
                                             const at::Tensor& input_weight,
                                             const at::Tensor& state_weight,
                                             const OptionalBias& input_bias,
                                             const OptionalBias& state_bias) {
  return lstm_step(at::linear(input, input_weight, input_bias),
                   at::linear(states[0], state_weight, state_bias), states[1]);
}

at::Tensor gru_cell(const at::Tensor& input, const at::Tensor& state,
                    const at::Tensor& input_weight, const at::Tensor& state_weight,
                    const OptionalBias& input_bias, const OptionalBias& state_bias) {
  return gru_step(at::linear(input, input_weight, input_bias),
                  at::linear(state, state_weight, state_bias), state);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> fused_lstm_cell(const at::Tensor& input_gates,
                                                               const at::Tensor& state_gates,
                                                               const at::Tensor& cell,
                                                               const OptionalBias& input_bias,
                                                               const OptionalBias& state_bias) {
  auto [state, next] =
      lstm_step(plus(input_gates, input_bias), plus(state_gates, state_bias).clone(), cell);
  return {std::move(state), std::move(next), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> fused_gru_cell(const at::Tensor& input_gates,
                                                  const at::Tensor& state_gates,
                                                  const at::Tensor& state,
                                                  const OptionalBias& input_bias,
                                                  const OptionalBias& state_bias) {
  return {gru_step(plus(input_gates, input_bias), plus(state_gates, state_bias).clone(), state),
          at::Tensor()};
}

}  // namespace zero::simulated
