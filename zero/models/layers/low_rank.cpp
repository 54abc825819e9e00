#include "zero/models/layers/low_rank.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
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
                 const at::TensorOptions& like)
    : options_(checked(options)),
      a_(registered(layer, "lora_A", uniform(options.rank, in, like))),
      b_(registered(layer, "lora_B", at::zeros({out, options.rank}, like))) {}

at::Tensor LowRank::add_to(const at::Tensor& y, const at::Tensor& x, bool training) const {
  const auto input = training && options_.dropout > 0 ? at::dropout(x, options_.dropout, true) : x;
  auto inner = zero::linear(input, a_->weight, at::Tensor());
  // The thin side is scaled, which is less work than the result.
  if (options_.scale != 1) inner = inner * options_.scale;
  return add_branch(zero::linear(inner, b_->weight, at::Tensor()), y);
}

}  // namespace zero
