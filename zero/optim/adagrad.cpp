// Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011), as torch::optim::Adagrad.
#include "zero/optim/adagrad_step.h"
#include "zero/optim/algorithm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/adagrad.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

struct AdagradRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const AdagradStep<float>& s, V& p, V g, V& sum, V& /*none*/) {
    if (s.l2 != 0) g = hn::Add(g, hn::Mul(hn::Set(d, s.l2), p));
    if (s.initial != 0) sum = hn::Add(sum, hn::Set(d, s.initial));
    sum = hn::Add(sum, hn::Mul(g, g));
    const auto denominator = hn::Add(hn::Sqrt(sum), hn::Set(d, s.eps));
    p = hn::Add(p, hn::Div(hn::Mul(hn::Set(d, s.negative_lr), g), denominator));
  }
};

void update_adagrad(const AdagradStep<float>& step, float gradient_scale, const Range& range,
                    int64_t begin, int64_t end) {
  update_elements<AdagradRule, 1>(step, gradient_scale, range, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim::kernels {
HWY_EXPORT(update_adagrad);
}

const optim::Algorithm<Adagrad>& Adagrad::algorithm() {
  using optim::Ignored;
  using optim::OnlyFalse;
  static const optim::Algorithm<Adagrad> known{
      .names = {{.name = "Adagrad"}, {.name = "DeepSpeedCPUAdagrad"}},
      .hyper_parameters =
          {{.key = "lr",
            .value = &Adagrad::lr,
            .sentence = "Learning rate; of `zero train` the peak",
            .option = "--lr",
            .least = 0},
           {.key = "lr_decay",
            .value = &Adagrad::lr_decay,
            .sentence = "Update n has the rate divided by 1 + (n - 1) lr_decay",
            .least = 0},
           {.key = "weight_decay",
            .value = &Adagrad::weight_decay,
            .sentence = "Weight decay; in `zero train` of matrices, biases and norms have none",
            .details = "Added to the gradient.",
            .option = "--weight-decay",
            .least = 0},
           {.key = "initial_accumulator_value",
            .value = &Adagrad::initial_accumulator_value,
            .sentence = "What the sum of squared gradients begins with",
            .least = 0},
           {.key = "eps",
            .value = &Adagrad::eps,
            .sentence = "Added to the root of that sum",
            .least = 0},
           {.key = "fp32_optimizer_states",
            .value = Ignored::boolean,
            .sentence = "Accepted, without effect"},
           {.key = "amsgrad", .value = OnlyFalse(), .sentence = "There is none"},
           {.key = "foreach", .value = Ignored::boolean, .sentence = "Accepted, without effect"},
           {.key = "fused", .value = Ignored::boolean, .sentence = "Accepted, without effect"},
           {.key = "maximize", .value = OnlyFalse(), .sentence = "There is none"}},
      .state_names = [](const Adagrad&) { return std::vector<std::string_view>{"sum"}; },
      .signs = {optim::Sign::positive},
      .update =
          [](const Adagrad& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Range& range, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(update_adagrad)
            (optim::AdagradStep<float>(optimizer, moment), gradient_scale, range, begin, end);
          },
      .update_reference = &optim::plain_update<optim::AdagradStep, Adagrad>,
      .update_exact = &optim::exact_update<optim::AdagradStep, Adagrad>};
  return known;
}

}  // namespace zero
#endif
