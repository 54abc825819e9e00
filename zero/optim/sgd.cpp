// Stochastic gradient descent, with momentum or without, as torch::optim::SGD.
#include "zero/optim/algorithm.h"
#include "zero/optim/sgd_step.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/sgd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

struct SgdRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const SgdStep<float>& s, V& p, V g, V& buffer, V& /*none*/) {
    if (s.l2 != 0) g = hn::Add(g, hn::Mul(hn::Set(d, s.l2), p));
    if (s.keeps) {
      const auto momentum = hn::Set(d, s.momentum);
      buffer = s.first ? g
                       : hn::Add(hn::Mul(momentum, buffer),
                                 hn::Mul(hn::Set(d, s.one_minus_dampening), g));
      g = s.nesterov ? hn::Add(g, hn::Mul(momentum, buffer)) : buffer;
    }
    p = hn::Add(p, hn::Mul(hn::Set(d, s.negative_lr), g));
  }
};

void update_sgd(const SgdStep<float>& step, float gradient_scale, const Operands& operands,
                int64_t begin, int64_t end) {
  if (step.keeps) {
    update_elements<SgdRule, 1>(step, gradient_scale, operands, begin, end);
  } else {
    update_elements<SgdRule, 0>(step, gradient_scale, operands, begin, end);
  }
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim::kernels {
HWY_EXPORT(update_sgd);
}

const optim::Algorithm<Sgd>& Sgd::algorithm() {
  static const optim::Algorithm<Sgd> known{
      .name = "SGD",
      .limits = {{"lr", &Sgd::lr, 0},
                 {"momentum", &Sgd::momentum, 0},
                 {"dampening", &Sgd::dampening},
                 {"weight_decay", &Sgd::weight_decay, 0}},
      .state_names =
          [](const Sgd& o) {
            return o.momentum != 0 ? std::vector<std::string_view>{"momentum_buffer"}
                                   : std::vector<std::string_view>{};
          },
      .check =
          [](const Sgd& o) {
            if (!o.nesterov) return;
            if (o.momentum <= 0) optim::refuse("momentum", o.momentum, "above 0 with nesterov");
            if (o.dampening != 0) optim::refuse("dampening", o.dampening, "0 with nesterov");
          },
      .update =
          [](const Sgd& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Operands& operands, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(update_sgd)
            (optim::SgdStep<float>(optimizer, moment), gradient_scale, operands, begin, end);
          },
      .update_reference = &optim::plain_update<optim::SgdStep, Sgd>,
      .update_exact = &optim::exact_update<optim::SgdStep, Sgd>};
  return known;
}

}  // namespace zero
#endif
