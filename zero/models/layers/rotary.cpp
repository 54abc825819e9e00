#include "zero/models/layers/rotary.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "zero/base/traced.h"
#include "zero/models/layers/device_kernel.h"

namespace zero {
namespace {

struct Frequencies {
  at::Tensor inverse;   // (D / 2), fp32
  double factor = 1.0;  // on cosines and sines
};

at::Tensor powers(double theta, int64_t dim) {
  const auto exponents = at::arange(0, dim, 2, at::kLong).to(at::kFloat) / dim;
  return at::pow(theta, exponents).reciprocal();
}

at::Tensor llama3_frequencies(const at::Tensor& f, const RotaryOptions& options, double old) {
  const double low = options.low_frequency_factor;
  const double high = options.high_frequency_factor;
  const auto wave = at::reciprocal(f) * (2 * std::numbers::pi);
  const auto share = (at::reciprocal(wave) * old - low) / (high - low);
  const auto between = (1 - share) * f / options.factor + share * f;
  const auto long_ones = at::where(wave > old / low, f / options.factor, f);
  return at::where((wave >= old / high).logical_and(wave <= old / low), between, long_ones);
}

double yarn_scale(double factor, double scale) {
  return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
}

Frequencies yarn_frequencies(const at::Tensor& f, const RotaryOptions& options, double old,
                             int64_t dim) {
  // The dimension whose angle turns so often over the original context.
  const auto turning = [&](double rotations) {
    return static_cast<double>(dim) * std::log(old / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(options.theta));
  };
  double low = turning(options.beta_fast);
  double high = turning(options.beta_slow);
  if (options.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dim - 1));
  if (low == high) high += 0.001;
  const auto ramp = ((at::arange(dim / 2, at::kFloat) - low) / (high - low)).clamp(0, 1);
  const bool both = options.mscale != 0 && options.mscale_all_dim != 0;
  const double factor = options.attention_factor.value_or(
      both ? yarn_scale(options.factor, options.mscale) /
                 yarn_scale(options.factor, options.mscale_all_dim)
           : yarn_scale(options.factor, 1));
  return {f / options.factor * ramp + f * (1 - ramp), factor};
}

Frequencies frequencies(const RotaryOptions& options, int64_t dim, int64_t context,
                        int64_t sequence) {
  const auto old =
      static_cast<double>(options.original_context > 0 ? options.original_context : context);
  switch (options.kind) {
    case RotaryKind::standard:
      break;
    case RotaryKind::linear:
      return {powers(options.theta, dim) / options.factor};
    case RotaryKind::dynamic: {
      const double stretch = options.factor * static_cast<double>(std::max(sequence, context)) /
                                 static_cast<double>(context) -
                             (options.factor - 1);
      const auto d = static_cast<double>(dim);
      return {powers(options.theta * std::pow(stretch, d / (d - 2)), dim)};
    }
    case RotaryKind::llama3:
      return {llama3_frequencies(powers(options.theta, dim), options, old)};
    case RotaryKind::yarn:
      return yarn_frequencies(powers(options.theta, dim), options, old, dim);
  }
  return {powers(options.theta, dim)};
}

constexpr const char* kRotate = "zero::rotate";

bool has_rotary_kernel(const at::Tensor& x, const at::Tensor& cosines, at::ScalarType dtype) {
  return !on_cpu(x) && x.scalar_type() == dtype && x.dim() == 4 && cosines.size(-1) == x.size(-1) &&
         has_kernel_dtype(x) && has_device_kernel(x, kRotate);
}

at::Tensor turn_heads(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                      bool back) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(kRotate, "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(x.contiguous(), cosines, sines, back);
}

// Backward is a rotation too, so that it is differentiable any number of times.
class Rotate : public torch::autograd::Function<Rotate> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& cosines, const at::Tensor& sines, bool back) {
    context->save_for_backward({cosines, sines});
    context->saved_data["back"] = back;
    return turn_heads(x, cosines, sines, back);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const bool back = context->saved_data.at("back").toBool();
    return {Rotate::apply(gradients[0], saved[0], saved[1], !back), {}, {}, {}};
  }
};

// Computes the shape alone, for traces.
at::Tensor rotate_on_meta(const at::Tensor& x, const at::Tensor& /*cosines*/,
                          const at::Tensor& /*sines*/, bool /*back*/) {
  return at::empty_like(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(zero, Meta, library) { library.impl("rotate", &rotate_on_meta); }

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def("rotate(Tensor x, Tensor cosines, Tensor sines, bool back) -> Tensor");
}

RotaryTable rotary_table(const RotaryOptions& options, int64_t head_dim, int64_t context,
                         int64_t sequence, c10::Device device) {
  const auto [inverse, factor] = frequencies(options, head_dim, context, sequence);
  const auto half = at::outer(at::arange(sequence, at::kLong).to(at::kFloat), inverse);
  const auto angles = at::cat({half, half}, -1).unsqueeze(1);
  return {(angles.cos() * factor).to(device), (angles.sin() * factor).to(device)};
}

RotaryTable rows_at(const RotaryTable& table, const at::Tensor& positions) {
  const auto rows = [&](const at::Tensor& of) {
    return of.index_select(0, positions.flatten()).view({positions.size(0), -1, 1, of.size(-1)});
  };
  return {rows(table.cosines), rows(table.sines)};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTable& table, at::ScalarType dtype) {
  if (has_rotary_kernel(x, table.cosines, dtype)) {
    return Rotate::apply(x, table.cosines.to(dtype).contiguous(),
                         table.sines.to(dtype).contiguous(), false);
  }
  const auto halves = x.chunk(2, -1);
  const auto turned = at::cat({halves[1].neg(), halves[0]}, -1);
  return x * table.cosines.to(dtype) + turned * table.sines.to(dtype);
}

}  // namespace zero
