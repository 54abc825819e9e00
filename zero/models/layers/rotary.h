// Rotary position embeddings (Su et al., arXiv 2104.09864), which turn the halves of each head by
// angles that grow with the position; and the ways to stretch them to longer sequences.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace zero {

/// How angles follow from positions: `rope_type` of Hugging Face's config.json.
enum class RotaryKind : uint8_t {
  standard,  ///< "default"
  linear,    ///< positions divided by `factor`
  dynamic,   ///< a larger base for sequences beyond the context
  llama3,    ///< low frequencies divided by `factor`, high ones kept
  yarn       ///< the same over a ramp, with larger queries and keys (Peng et al., arXiv 2309.00071)
};

struct RotaryOptions {
  RotaryKind kind = RotaryKind::standard;
  double theta = 10000;
  double factor = 1;
  double low_frequency_factor = 1;   ///< of llama3
  double high_frequency_factor = 4;  ///< of llama3
  int64_t original_context = 0;      ///< of llama3 and yarn; 0: the model's context
  double beta_fast = 32;             ///< of yarn, and the following
  double beta_slow = 1;
  bool truncate = true;
  std::optional<double> attention_factor{};
  double mscale = 0;
  double mscale_all_dim = 0;

  bool operator==(const RotaryOptions&) const = default;
};

/// Holds the cosines and sines of a sequence, (T, 1, D) in fp32 each; or of each row of a batch,
/// (B, T, 1, D).
struct RotaryTable {
  at::Tensor cosines;
  at::Tensor sines;
};

/// Returns the table of positions 0 to `sequence`. `head_dim` (D) is even; `context` is the model's
/// max_position_embeddings.
RotaryTable rotary_table(const RotaryOptions& options, int64_t head_dim, int64_t context,
                         int64_t sequence, c10::Device device);

/// Returns the rows of a table of a sequence that positions (B, T) int64 name.
RotaryTable rows_at(const RotaryTable& table, const at::Tensor& positions);

/// Turns queries or keys x (B, T, H, D). Cosines and sines are rounded to `dtype` first, which is
/// that of the hidden states. Devices with the kernel `zero::rotate` (Note [Kernels of a device] in
/// zero/optim/operators.h) make one pass, and round the result once.
at::Tensor rotate(const at::Tensor& x, const RotaryTable& table, at::ScalarType dtype);

}  // namespace zero
