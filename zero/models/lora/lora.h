// LoRA (Hu et al., arXiv 2106.09685) as a change of a model: the weights that it has are frozen,
// and linear layers get products of two thin matrices, which are trained; with DoRA also the
// lengths of their rows (Note [DoRA] in layers/low_rank.h). The names, the initial values and the
// choice of layers are peft's.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

/// A choice of modules by their paths ("h.0.attn.c_attn"), as peft's `target_modules`.
struct NamePattern {
  /// Paths, or what a path ends with behind a dot: "c_attn".
  std::vector<std::string> names{};
  /// A regular expression of ECMAScript, which must match the whole path. In place of `names`.
  std::string expression{};
  /// All linear layers but those in `modules_to_save` (peft's "all-linear"; output projections of
  /// libzero's models are none).
  bool all_linear = false;

  /// Reads "all-linear", names that are separated by commas, or a regular expression, which is told
  /// by one of the characters ()[]{}|*+?^$\. Throws ConfigError for a wrong expression.
  static NamePattern parse(std::string_view text);
  /// Returns the text that `parse` reads back.
  std::string text() const;
  bool empty() const { return names.empty() && expression.empty() && !all_linear; }
  bool operator==(const NamePattern&) const = default;
};

struct LoraSettings {
  int64_t rank = 8;
  double alpha = 8;     ///< the product counts alpha / rank times
  bool rslora = false;  ///< alpha / sqrt(rank) times instead (arXiv 2312.03732)
  double dropout = 0;   ///< the probability, in training, at the input of the product
  bool dora = false;    ///< rows have magnitudes: Note [DoRA] in layers/low_rank.h
  /// The linear layers. Empty: those that peft takes, which are called q_proj and v_proj, c_attn,
  /// or query and value.
  NamePattern targets{};
  /// Modules that are trained whole, and saved with the adapter: "lm_head".
  std::vector<std::string> modules_to_save{};
  /// Comes before the paths of the model's modules in the paths of the published model:
  /// "transformer." for Gpt2. `targets` may have it or not.
  std::string prefix{};
  /// Names that fit no module are left out while others fit, as peft reads its files: its adapters
  /// of classifiers name "classifier" and "score", of which a model has one.
  bool names_may_miss = false;

  double scale() const;
  /// Throws ConfigError, naming the value.
  void validate() const;
};

/// A part of a layer's own weight.
struct LoraWeight {
  std::string parameter;
  int64_t out_begin = 0, in_begin = 0;
  bool in_out = false;  ///< it lies as (in, out)
};

/// A layer that has a product: the parameters `path`.lora_A.weight (rank, in) and
/// `path`.lora_B.weight (out, rank), and with DoRA `path`.lora_magnitude_vector (out).
struct LoraLayer {
  std::string path;
  int64_t in = 0, out = 0;
  std::vector<LoraWeight> weights;

  std::string a() const { return path + ".lora_A.weight"; }
  std::string b() const { return path + ".lora_B.weight"; }
  std::string magnitude() const { return path + ".lora_magnitude_vector"; }
};

/// A model's adapter: what add_lora has added.
struct Lora {
  LoraSettings settings;
  std::vector<LoraLayer> layers;
  std::vector<std::string> saved_parameters;  ///< those of `modules_to_save`
  bool in_out = false;                        ///< weights of the layers lie as (in, out)

  /// Returns the number of parameters' elements that are trained in the layers.
  int64_t elements() const;
  /// Returns the names of the parameters that a layer has got.
  std::vector<std::string> added(const LoraLayer& layer) const;
};

/// Freezes all parameters below `root` and adds LoRA to the layers that `settings` choose:
/// Projection (the linear layer of libzero's models, tiled or not), TiledLinear and
/// torch::nn::Linear. Then those of `modules_to_save` are made trainable again. The products' dtype
/// and device are the weights'. Call it before the engine takes the model, and after tile_linears.
///
/// A torch::nn::Linear is replaced by a Projection of the same parameters, which the code that runs
/// it must find (replace_linears.h); a model that holds its layers as members uses zero::Projection
/// for them instead.
///
/// Throws ConfigError, and changes nothing, for settings out of range, a target or a module to be
/// saved that there is not, a target that is no linear layer, whose weight is shared with another
/// module, or that cannot be replaced, and a model that has LoRA already.
Lora add_lora(torch::nn::Module& root, const LoraSettings& settings);

/// Freezes the parameters whose names fit a pattern: names as NamePattern has them, of a parameter
/// or of a module above it. Returns how many tensors. Call it before the engine takes the model.
/// Throws ConfigError where none fits.
int64_t freeze(torch::nn::Module& root, const NamePattern& pattern);

}  // namespace zero
