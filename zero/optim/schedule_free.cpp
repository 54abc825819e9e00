// Schedule-free AdamW: 2405.15682, algorithm 1.
#include "zero/optim/algorithm.h"
#include "zero/optim/schedule_free_step.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/schedule_free.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

struct ScheduleFreeRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const ScheduleFreeStep<float>& s, V& y, V g, V& z, V& v) {
    if (s.first) z = y;
    v = hn::Add(hn::Mul(hn::Set(d, s.beta2), v),
                hn::Mul(hn::Mul(hn::Set(d, s.one_minus_beta2), g), g));
    const auto denominator =
        hn::Add(hn::Mul(hn::Sqrt(v), hn::Set(d, s.inverse_root_correction2)), hn::Set(d, s.eps));
    const auto direction = hn::Add(hn::Div(g, denominator), hn::Mul(hn::Set(d, s.decay), y));
    y = hn::Add(y, hn::Mul(hn::Set(d, s.share), hn::Sub(z, y)));
    y = hn::Add(y, hn::Mul(hn::Set(d, s.step_of_mixed), direction));
    z = hn::Add(z, hn::Mul(hn::Set(d, s.negative_lr), direction));
  }
};

void update_schedule_free(const ScheduleFreeStep<float>& step, float gradient_scale,
                          const Operands& operands, int64_t begin, int64_t end) {
  update_elements<ScheduleFreeRule, 2>(step, gradient_scale, operands, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim::kernels {
HWY_EXPORT(update_schedule_free);
}

const optim::Algorithm<ScheduleFreeAdamW>& ScheduleFreeAdamW::algorithm() {
  static const optim::Algorithm<ScheduleFreeAdamW> known{
      .name = "ScheduleFreeAdamW",
      .limits = {{"lr", &ScheduleFreeAdamW::lr, 0},
                 {"beta1", &ScheduleFreeAdamW::beta1, 0, {}, 1},
                 {"beta2", &ScheduleFreeAdamW::beta2, 0, {}, 1},
                 {"eps", &ScheduleFreeAdamW::eps, 0},
                 {"weight_decay", &ScheduleFreeAdamW::weight_decay, 0},
                 {"warmup_steps", &ScheduleFreeAdamW::warmup_steps, 0}},
      .state_names =
          [](const ScheduleFreeAdamW&) {
            return std::vector<std::string_view>{"z", "exp_avg_sq"};
          },
      .signs = {optim::Sign::either, optim::Sign::positive},
      .rate = &optim::ScheduleFreeStep<double>::rate_of,
      .evaluated = [](const ScheduleFreeAdamW& o) { return 1 - 1 / o.beta1; },
      .check =
          [](const ScheduleFreeAdamW& o) {
            if (o.beta1 <= 0) optim::refuse("beta1", o.beta1, "above 0");
          },
      .update =
          [](const ScheduleFreeAdamW& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Operands& operands, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(update_schedule_free)
            (optim::ScheduleFreeStep<float>(optimizer, moment), gradient_scale, operands, begin,
             end);
          },
      .update_reference = &optim::plain_update<optim::ScheduleFreeStep, ScheduleFreeAdamW>,
      .update_exact = &optim::exact_update<optim::ScheduleFreeStep, ScheduleFreeAdamW>};
  return known;
}

}  // namespace zero
#endif
