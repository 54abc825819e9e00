// Matrices as bitsandbytes has them in files, with the values that they mean, for tests.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "zero/checkpoint/safetensors.h"

namespace zero::test {

using Tensors = std::map<std::string, at::Tensor>;

/// The numbers of NF4, by their codes.
inline const std::array<float, 16>& nf4_numbers() {
  static const std::array<float, 16> numbers{
      -1.0F,
      -0.6961928009986877F,
      -0.5250730514526367F,
      -0.39491748809814453F,
      -0.28444138169288635F,
      -0.18477343022823334F,
      -0.09105003625154495F,
      0.0F,
      0.07958029955625534F,
      0.16093020141124725F,
      0.24611230194568634F,
      0.33791524171829224F,
      0.44070982933044434F,
      0.5626170039176941F,
      0.7229568362236023F,
      1.0F,
  };
  return numbers;
}

inline at::Tensor bytes_of(const std::string& text) {
  auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
  return bytes;
}

struct Nf4Options {
  int64_t block = 64;
  bool nested = true;  // double quantisation
  std::string dtype = "float32";
};

/// Adds the tensors of an arbitrary matrix in NF4 with the name `name`. Each block has an element
/// of the greatest magnitude. Returns the values, in fp32, before they are rounded to the dtype.
inline at::Tensor add_nf4(Tensors& tensors, const std::string& name, int64_t rows, int64_t columns,
                          const Nf4Options& options = {}) {
  const int64_t numel = rows * columns;
  const int64_t blocks = (numel + options.block - 1) / options.block;
  auto codes = at::randint(16, {numel + numel % 2}, at::kByte);
  for (int64_t b = 0; b < blocks; ++b) codes[b * options.block] = b % 3 == 0 ? 0 : 15;
  const auto packed = codes.view({-1, 2}).select(1, 0) * 16 + codes.view({-1, 2}).select(1, 1);
  tensors[name] = packed.view({-1, 1});
  std::vector<float> table(nf4_numbers().begin(), nf4_numbers().end());
  tensors[name + ".quant_map"] = at::tensor(table);
  std::string state = R"({"quant_type": "nf4", "blocksize": )" + std::to_string(options.block) +
                      R"(, "dtype": ")" + options.dtype + R"(", "shape": [)" +
                      std::to_string(rows) + ", " + std::to_string(columns) + "]";
  std::vector<float> scales;
  if (options.nested) {
    const auto of_scales = at::randint(256, {blocks}, at::kByte);
    const auto second = at::rand({(blocks + 255) / 256}) * 0.01 + 0.001;
    const auto meaning = at::linspace(-1, 1, 256);
    tensors[name + ".absmax"] = of_scales;
    tensors[name + ".nested_absmax"] = second;
    tensors[name + ".nested_quant_map"] = meaning;
    state += R"(, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0234375)";
    for (int64_t b = 0; b < blocks; ++b) {
      const float product =
          meaning[of_scales[b].item<int64_t>()].item<float>() * second[b / 256].item<float>();
      scales.push_back(product + 0.0234375F);
    }
  } else {
    const auto absmax = at::rand({blocks}) + 0.01;
    tensors[name + ".absmax"] = absmax;
    for (int64_t b = 0; b < blocks; ++b) scales.push_back(absmax[b].item<float>());
  }
  tensors[name + ".quant_state.bitsandbytes__nf4"] = bytes_of(state + "}");
  auto values = at::empty({rows, columns}, at::kFloat);
  const auto* code = codes.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < numel; ++i) {
    values.mutable_data_ptr<float>()[i] =
        nf4_numbers().at(code[i]) * scales.at(static_cast<size_t>(i / options.block));
  }
  return values;
}

/// Adds those of an arbitrary matrix of LLM.int8 of the layer `layer`. Returns the values in fp32.
inline at::Tensor add_int8(Tensors& tensors, const std::string& layer, int64_t rows,
                           int64_t columns) {
  const auto codes = at::randint(-127, 128, {rows, columns}, at::kChar);
  const auto scales = at::rand({rows}) + 0.01;
  tensors[layer + ".weight"] = codes;
  tensors[layer + ".SCB"] = scales;
  tensors[layer + ".weight_format"] = at::zeros({}, at::kByte);
  auto values = at::empty({rows, columns}, at::kFloat);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const float product = codes[row][column].item<float>() * scales[row].item<float>();
      values[row][column] = product * 0.007874015718698502F;  // 1 / 127 in fp32
    }
  }
  return values;
}

inline void write_tensors(const std::filesystem::path& file, const Tensors& tensors) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : tensors)
    infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  SafetensorsWriter writer(file, infos, {{"format", "pt"}});
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

}  // namespace zero::test
