// LSTM and GRU as the CPU composes them.
//
// Note [Recurrent layers]
// For this kind of device LibTorch would take fused cells, one a step of the sequence. The CPU
// multiplies the whole sequence by the input's weights at once, or, where it has oneDNN, runs an
// LSTM's layer as one operator; the bits are others. So whole layers are composed here as the CPU
// does. Packed sequences still come as fused cells, whose results differ from the CPU's within
// rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace zero::simulated {

/// As aten::lstm.input, whose arguments these are.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& input, at::TensorList states,
                                                    at::TensorList parameters, bool biases,
                                                    int64_t layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first);
/// Does the same as aten::gru.input.
std::tuple<at::Tensor, at::Tensor> gru(const at::Tensor& input, const at::Tensor& state,
                                       at::TensorList parameters, bool biases, int64_t layers,
                                       double dropout, bool train, bool bidirectional,
                                       bool batch_first);
/// These do one step, as aten::lstm_cell and aten::gru_cell.
std::tuple<at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, at::TensorList states,
                                             const at::Tensor& input_weight,
                                             const at::Tensor& state_weight,
                                             const std::optional<at::Tensor>& input_bias,
                                             const std::optional<at::Tensor>& state_bias);
at::Tensor gru_cell(const at::Tensor& input, const at::Tensor& state,
                    const at::Tensor& input_weight, const at::Tensor& state_weight,
                    const std::optional<at::Tensor>& input_bias,
                    const std::optional<at::Tensor>& state_bias);
/// These do the same as aten::_thnn_fused_lstm_cell and aten::_thnn_fused_gru_cell, which LibTorch
/// asks this kind of device for. The workspace, their last result, is undefined since autograd sees
/// the parts.
std::tuple<at::Tensor, at::Tensor, at::Tensor> fused_lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& state_gates, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& state_bias);
std::tuple<at::Tensor, at::Tensor> fused_gru_cell(const at::Tensor& input_gates,
                                                  const at::Tensor& state_gates,
                                                  const at::Tensor& state,
                                                  const std::optional<at::Tensor>& input_bias,
                                                  const std::optional<at::Tensor>& state_bias);

}  // namespace zero::simulated
