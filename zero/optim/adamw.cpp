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

void update_adamw(const AdamWStep<float>& step, float gradient_scale, const Range& range,
                  int64_t begin, int64_t end) {
  update_elements<AdamWRule, 2>(step, gradient_scale, range, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim::kernels {
HWY_EXPORT(update_adamw);
}

const optim::Algorithm<AdamW>& AdamW::algorithm() {
  using optim::Ignored;
  using optim::OnlyFalse;
  static const optim::Algorithm<AdamW> known{
      // DeepSpeed's names mean fused Adam, whose weight decay is 0 where a file gives none; its
      // "Adam" decays like AdamW unless adam_w_mode is false, and its "AdamW" always does.
      .names = {{.name = "AdamW",
                 .defaults = {.weight_decay = 0},
                 .settle = [](AdamW& adam) { adam.decoupled = true; }},
                {.name = "Adam", .defaults = {.weight_decay = 0}},
                {.name = "FusedAdam", .defaults = {.weight_decay = 0}},
                {.name = "DeepSpeedCPUAdam", .defaults = {.weight_decay = 0}},
                {.name = "OneBitAdam", .defaults = {.weight_decay = 0}, .approximation = true},
                {.name = "ZeroOneAdam", .defaults = {.weight_decay = 0}, .approximation = true}},
      .hyper_parameters =
          {{.key = "lr",
            .value = &AdamW::lr,
            .sentence = "Learning rate; of `zero train` the peak",
            .option = "--lr",
            .least = 0},
           {.key = "betas",
            .value = std::pair{&AdamW::beta1, &AdamW::beta2},
            .sentence = "Decay rates of the two moments, each at least 0 and less than 1",
            .least = 0,
            .below = 1},
           {.key = "",
            .value = &AdamW::beta1,
            .sentence = "AdamW's first moment",
            .option = "--beta1",
            .least = 0,
            .below = 1},
           {.key = "",
            .value = &AdamW::beta2,
            .sentence = "AdamW's second moment",
            .option = "--beta2",
            .least = 0,
            .below = 1},
           {.key = "eps",
            .value = &AdamW::eps,
            .sentence = "Added to the root of the second moment",
            .least = 0},
           {.key = "weight_decay",
            .value = &AdamW::weight_decay,
            .sentence = "Weight decay; in `zero train` of matrices, biases and norms have none",
            .details = "In a file 0 where it is left out, as in DeepSpeed.",
            .option = "--weight-decay",
            .least = 0},
           {.key = "adam_w_mode",
            .value = &AdamW::decoupled,
            .sentence = "Decay acts on the weight and not on the gradient (AdamW)",
            .details = "Of \"AdamW\" it always does, as in DeepSpeed.",
            .also = "adamw_mode"},
           {.key = "bias_correction",
            .value = &AdamW::bias_correction,
            .sentence = "The moments are corrected for their start at 0"},
           {.key = "torch_adam", .value = Ignored::boolean, .sentence = "Accepted, without effect"},
           {.key = "fp32_optimizer_states",
            .value = Ignored::boolean,
            .sentence = "Accepted, without effect"},
           {.key = "foreach", .value = Ignored::boolean, .sentence = "Accepted, without effect"},
           {.key = "fused", .value = Ignored::boolean, .sentence = "Accepted, without effect"},
           {.key = "set_grad_none",
            .value = Ignored::boolean,
            .sentence = "Accepted, without effect"},
           {.key = "cuda_aware", .value = Ignored::boolean, .sentence = "Accepted, without effect"},
           {.key = "comm_backend_name",
            .value = Ignored::text,
            .sentence = "Accepted, without effect"},
           {.key = "freeze_step",
            .value = Ignored::number,
            .sentence = "Of 1-bit optimizers; nothing is compressed here"},
           {.key = "var_freeze_step",
            .value = Ignored::number,
            .sentence = "Of 1-bit optimizers; nothing is compressed here"},
           {.key = "var_update_scaler",
            .value = Ignored::number,
            .sentence = "Of 1-bit optimizers; nothing is compressed here"},
           {.key = "local_step_scaler",
            .value = Ignored::number,
            .sentence = "Of 1-bit optimizers; nothing is compressed here"},
           {.key = "local_step_clipper",
            .value = Ignored::number,
            .sentence = "Of 1-bit optimizers; nothing is compressed here"},
           {.key = "max_grad_norm",
            .value = optim::Instead{"gradient_clipping"},
            .sentence = "Clipping of gradients"},
           {.key = "amsgrad", .value = OnlyFalse(), .sentence = "There is none"},
           {.key = "maximize", .value = OnlyFalse(), .sentence = "There is none"}},
      .state_names =
          [](const AdamW&) {
            return std::vector<std::string_view>{"exp_avg", "exp_avg_sq"};
          },
      .signs = {optim::Sign::either, optim::Sign::positive},
      .name_of = [](const AdamW& o) -> std::string_view { return o.decoupled ? "AdamW" : "Adam"; },
      .update =
          [](const AdamW& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Range& range, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(update_adamw)
            (optim::AdamWStep<float>(optimizer, moment), gradient_scale, range, begin, end);
          },
      .update_reference = &optim::plain_update<optim::AdamWStep, AdamW>,
      .update_exact = &optim::exact_update<optim::AdamWStep, AdamW>};
  return known;
}

}  // namespace zero
#endif
