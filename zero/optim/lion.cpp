// Lion: 2302.06675, program 1.
#include "zero/optim/algorithm.h"
#include "zero/optim/lion_step.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/lion.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

struct LionRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const LionStep<float>& s, V& p, V g, V& m, V& /*none*/) {
    const auto mean =
        hn::Add(hn::Mul(hn::Set(d, s.beta1), m), hn::Mul(hn::Set(d, s.one_minus_beta1), g));
    m = hn::Add(hn::Mul(hn::Set(d, s.beta2), m), hn::Mul(hn::Set(d, s.one_minus_beta2), g));
    p = hn::Mul(p, hn::Set(d, s.decay));
    const auto zero = hn::Zero(d);
    const auto lr = hn::Set(d, s.lr);
    p = hn::IfThenElse(hn::Gt(mean, zero), hn::Sub(p, lr),
                       hn::IfThenElse(hn::Lt(mean, zero), hn::Add(p, lr), p));
  }
};

void update_lion(const LionStep<float>& step, float gradient_scale, const Operands& operands,
                 int64_t begin, int64_t end) {
  update_elements<LionRule, 1>(step, gradient_scale, operands, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim::kernels {
HWY_EXPORT(update_lion);
}

const optim::Algorithm<Lion>& Lion::algorithm() {
  static const optim::Algorithm<Lion> known{
      .name = "Lion",
      .limits = {{"lr", &Lion::lr, 0},
                 {"beta1", &Lion::beta1, 0, {}, 1},
                 {"beta2", &Lion::beta2, 0, {}, 1},
                 {"weight_decay", &Lion::weight_decay, 0}},
      .state_names = [](const Lion&) { return std::vector<std::string_view>{"exp_avg"}; },
      .update =
          [](const Lion& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Operands& operands, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(update_lion)
            (optim::LionStep<float>(optimizer, moment), gradient_scale, operands, begin, end);
          },
      .update_reference = &optim::plain_update<optim::LionStep, Lion>,
      .update_exact = &optim::exact_update<optim::LionStep, Lion>};
  return known;
}

}  // namespace zero
#endif
