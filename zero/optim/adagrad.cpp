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

void update_adagrad(const AdagradStep<float>& step, float gradient_scale, const Operands& operands,
                    int64_t begin, int64_t end) {
  update_elements<AdagradRule, 1>(step, gradient_scale, operands, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim::kernels {
HWY_EXPORT(update_adagrad);
}

const optim::Algorithm<Adagrad>& Adagrad::algorithm() {
  static const optim::Algorithm<Adagrad> known{
      .name = "Adagrad",
      .limits = {{"lr", &Adagrad::lr, 0},
                 {"lr_decay", &Adagrad::lr_decay, 0},
                 {"weight_decay", &Adagrad::weight_decay, 0},
                 {"initial_accumulator_value", &Adagrad::initial_accumulator_value, 0},
                 {"eps", &Adagrad::eps, 0}},
      .state_names = [](const Adagrad&) { return std::vector<std::string_view>{"sum"}; },
      .signs = {optim::Sign::positive},
      .update =
          [](const Adagrad& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Operands& operands, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(update_adagrad)
            (optim::AdagradStep<float>(optimizer, moment), gradient_scale, operands, begin, end);
          },
      .update_reference = &optim::plain_update<optim::AdagradStep, Adagrad>,
      .update_exact = &optim::exact_update<optim::AdagradStep, Adagrad>};
  return known;
}

}  // namespace zero
#endif
