// AdamW and Adam. Adam: 1412.6980, algorithm 1; decoupled weight decay: 1711.05101, algorithm 2.
#include "zero/optim/adamw_step.h"
#include "zero/optim/algorithm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

struct AdamWRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const AdamWStep<float>& s, V& p, V g, V& m, V& v) {
    if (s.l2 != 0) g = hn::Add(g, hn::Mul(hn::Set(d, s.l2), p));
    m = hn::Add(hn::Mul(hn::Set(d, s.beta1), m), hn::Mul(hn::Set(d, s.one_minus_beta1), g));
    v = hn::Add(hn::Mul(hn::Set(d, s.beta2), v),
                hn::Mul(hn::Mul(hn::Set(d, s.one_minus_beta2), g), g));
    const auto denominator =
        hn::Add(hn::Mul(hn::Sqrt(v), hn::Set(d, s.inverse_root_correction2)), hn::Set(d, s.eps));
    p = hn::Mul(p, hn::Set(d, s.decay));
    p = hn::Add(p, hn::Div(hn::Mul(hn::Set(d, s.negative_step_size), m), denominator));
  }
};

void update_adamw(const AdamWStep<float>& step, float gradient_scale, const Operands& operands,
                  int64_t begin, int64_t end) {
  update_elements<AdamWRule, 2>(step, gradient_scale, operands, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim::kernels {
HWY_EXPORT(update_adamw);
}

const optim::Algorithm<AdamW>& AdamW::algorithm() {
  static const optim::Algorithm<AdamW> known{
      .name = "AdamW",
      .limits = {{"lr", &AdamW::lr, 0},
                 {"beta1", &AdamW::beta1, 0, {}, 1},
                 {"beta2", &AdamW::beta2, 0, {}, 1},
                 {"eps", &AdamW::eps, 0},
                 {"weight_decay", &AdamW::weight_decay, 0}},
      .state_names =
          [](const AdamW&) {
            return std::vector<std::string_view>{"exp_avg", "exp_avg_sq"};
          },
      .signs = {optim::Sign::either, optim::Sign::positive},
      .name_of = [](const AdamW& o) -> std::string_view { return o.decoupled ? "AdamW" : "Adam"; },
      .update =
          [](const AdamW& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Operands& operands, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(update_adamw)
            (optim::AdamWStep<float>(optimizer, moment), gradient_scale, operands, begin, end);
          },
      .update_reference = &optim::plain_update<optim::AdamWStep, AdamW>,
      .update_exact = &optim::exact_update<optim::AdamWStep, AdamW>};
  return known;
}

}  // namespace zero
#endif
