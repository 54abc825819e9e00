// Muon (K. Jordan, Y. Jin, V. Boza, J. You, F. Cesista, L. Newhouse, J. Bernstein, 2024,
// kellerjordan.github.io/posts/muon). It takes two sweeps: Note [Two sweeps] in sweeps.h.
// newton_schulz.cpp does the work between them.

#include "zero/optim/algorithm.h"
#include "zero/optim/matrix_step.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/muon.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

struct MuonDirectionRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const MuonDirection<float>& s, V& direction, V g, V& buffer,
                               V& /*none*/) {
    const auto momentum = hn::Set(d, s.momentum);
    const auto fresh = hn::Mul(hn::Set(d, s.one_minus_momentum), g);
    buffer = hn::Add(hn::Mul(momentum, buffer), fresh);
    direction = s.nesterov ? hn::Add(fresh, hn::Mul(momentum, buffer)) : buffer;
  }
};

struct MatrixRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const MatrixStep<float>& s, V& p, V g, V& /*none*/,
                               V& /*none*/) {
    p = hn::Mul(p, hn::Set(d, s.decay));
    p = hn::Add(p, hn::Mul(hn::Set(d, s.coefficient), g));
  }
};

void muon_first(const MuonDirection<float>& step, float gradient_scale, const Operands& operands,
                int64_t begin, int64_t end) {
  update_elements<MuonDirectionRule, 1>(step, gradient_scale, operands, begin, end);
}

void matrix_second(const MatrixStep<float>& step, const Operands& operands, int64_t begin,
                   int64_t end) {
  update_elements<MatrixRule, 0>(step, 1.0F, operands, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim {

namespace kernels {
HWY_EXPORT(muon_first);
HWY_EXPORT(matrix_second);
}  // namespace kernels

void update_matrix(const MatrixStep<float>& step, const Operands& operands, int64_t begin,
                   int64_t end) {
  using namespace kernels;
  HWY_DYNAMIC_DISPATCH(matrix_second)(step, operands, begin, end);
}

}  // namespace optim

const optim::Algorithm<Muon>& Muon::algorithm() {
  static const optim::Algorithm<Muon> known{
      .name = "Muon",
      .limits = {{"lr", &Muon::lr, 0},
                 {"adam_lr", &Muon::adam_lr, 0},
                 {"momentum", &Muon::momentum, 0, {}, 1},
                 {"ns_steps", &Muon::ns_steps, 1, 99},
                 {"weight_decay", &Muon::weight_decay, 0},
                 {"beta1", &Muon::beta1, 0, {}, 1},
                 {"beta2", &Muon::beta2, 0, {}, 1},
                 {"eps", &Muon::eps, 0}},
      .state_names = [](const Muon&) { return std::vector<std::string_view>{"momentum_buffer"}; },
      .reach = optim::Reach::matrix,
      .beside_matrices = &optim::adamw_beside<Muon>,
      .first_sweep =
          [](const Muon& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Operands& operands, optim::Findings& findings, int64_t begin,
             int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(muon_first)
            (optim::MuonDirection<float>(optimizer, moment), gradient_scale,
             optim::to_direction(operands, findings.direction), begin, end);
          },
      .first_sweep_reference = &optim::plain_direction<optim::MuonDirection, Muon>,
      .update = &optim::second_sweep<Muon>,
      .update_reference = &optim::plain_update<optim::MatrixStep, Muon>,
      .update_exact = &optim::exact_update<optim::MatrixStep, Muon>};
  return known;
}

}  // namespace zero
#endif
