#include "zero/models/layers/low_rank.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <cmath>

#include "zero/base/error.h"
#include "zero/models/layers/linear.h"
#include "zero/models/layers/residual.h"

namespace zero {
namespace {

LowRankOptions checked(const LowRankOptions& options) {
  if (options.rank < 1)
    throw ConfigError(fmt::format("The rank of LoRA is {}; it must be positive.", options.rank));
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    throw ConfigError(fmt::format(
        "The dropout of LoRA is {}; it must be at least 0 and less than 1.", options.dropout));
  }
  return options;
}

at::Tensor uniform(int64_t rank, int64_t in, const at::TensorOptions& like) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  // Always with values, since no file of the model has them, and drawn in fp32 on the host, so that
  // they depend neither on the dtype nor on the device.
  return at::empty({rank, in}, at::kFloat).uniform_(-bound, bound).to(like);
}

LowRankMatrix registered(torch::nn::Module& layer, const char* name, at::Tensor values) {
  return layer.register_module(name, LowRankMatrix(std::move(values)));
}

}  // namespace

LowRank::LowRank(torch::nn::Module& layer, int64_t in, int64_t out, const LowRankOptions& options,
                 const at::TensorOptions& like, const at::Tensor& lengths)
    : options_(checked(options)),
      a_(registered(layer, "lora_A", uniform(options.rank, in, like))),
      b_(registered(layer, "lora_B", at::zeros({out, options.rank}, like))) {
  if (!options_.magnitude) return;
  magnitude_ = layer.register_parameter(
      "lora_magnitude_vector", lengths.defined() ? lengths.to(like) : at::ones({out}, like));
}

at::Tensor LowRank::product(const at::Tensor& input) const {
  auto inner = zero::linear(input, a_->weight, at::Tensor());
  // The thin side is scaled, which is less work than the result.
  if (options_.scale != 1) inner = inner * options_.scale;
  return zero::linear(inner, b_->weight, at::Tensor());
}

at::Tensor LowRank::add_to(const at::Tensor& y, const at::Tensor& x, bool training) const {
  const auto input = training && options_.dropout > 0 ? at::dropout(x, options_.dropout, true) : x;
  return add_branch(product(input), y);
}

at::Tensor LowRank::factor(const at::Tensor& weight) const {
  const auto fixed = [](const at::Tensor& matrix) { return matrix.detach().to(at::kFloat); };
  const auto added = at::mm(fixed(b_->weight), fixed(a_->weight)).mul_(options_.scale);
  return magnitude_ / row_lengths(fixed(weight) + added).to(magnitude_.scalar_type());
}

void LowRank::begin_magnitudes(const at::Tensor& lengths) {
  const c10::NoGradGuard no_grad;
  if (magnitude_.defined()) magnitude_.copy_(lengths);
}

at::Tensor LowRank::add_to(const at::Tensor& y, const at::Tensor& x, bool training,
                           const Base& base) const {
  if (!options_.magnitude) return add_to(y, x, training);
  const bool drops = training && options_.dropout > 0;
  const auto input = drops ? at::dropout(x, options_.dropout, true) : x;
  const auto own = drops ? base.product(input) : base.bias.defined() ? y - base.bias : y;
  const auto factor = this->factor(base.weight());
  return (y + ((factor - 1) * own + factor * product(input))).to(y.scalar_type());
}

at::Tensor row_lengths(const at::Tensor& weight) { return weight.to(at::kFloat).norm(2, 1); }

}  // namespace zero
