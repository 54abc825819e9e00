// Ranges for the tests of optimizers, and the optimizers that they are updated by.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/optim/test_arrays.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

/// The arrays of Operands, filled with the same numbers for the same seed.
struct Shard {
  Shard(const Optimizer& optimizer, int64_t numel, int64_t offset, c10::ScalarType gradient_dtype,
        c10::ScalarType parameter_dtype, bool special)
      : master(numel, offset),
        first(numel, offset + 1),
        second(numel, offset + 2),
        gradient(numel, offset),
        gradient16(numel, offset + 3),
        parameter(numel, offset + 1) {
    operands.numel = numel;
    operands.master = master.data();
    const auto states = state_names(optimizer).size();
    if (states > 0) operands.state[0] = first.data();
    if (states > 1) operands.state[1] = second.data();
    operands.gradient_dtype = gradient_dtype;
    operands.gradient = gradient_dtype == c10::ScalarType::Float
                            ? static_cast<void*>(gradient.data())
                            : static_cast<void*>(gradient16.data());
    if (parameter_dtype != c10::ScalarType::Float) {
      operands.parameter = parameter.data();
      operands.parameter_dtype = parameter_dtype;
    }
    Numbers weights(1, special), m(2, special), v(3, special);
    for (int64_t i = 0; i < numel; ++i) {
      operands.master[i] = weights.next();
      first.data()[i] = m.next();
      const float square = v.next();
      second.data()[i] = square * square;
    }
    if (operands.parameter) {
      for (int64_t i = 0; i < numel; ++i) parameter.data()[i] = 0xABCD;
    }
    new_gradient(4, special);
  }
  void new_gradient(uint32_t seed, bool special) {
    Numbers numbers(seed, special);
    for (int64_t i = 0; i < operands.numel; ++i) {
      narrow(const_cast<void*>(operands.gradient), operands.gradient_dtype, i, numbers.next());
    }
  }
  Array<float> master, first, second, gradient;
  Array<uint16_t> gradient16, parameter;
  Operands operands;
};

inline void expect_same(const Shard& a, const Shard& b, const std::string& what) {
  for (int64_t i = 0; i < a.operands.numel; ++i) {
    ASSERT_TRUE(same(a.operands.master[i], b.operands.master[i]))
        << what << " master " << i << ": " << a.operands.master[i] << " and "
        << b.operands.master[i];
    for (const int s : {0, 1}) {
      if (!a.operands.state[s]) continue;
      ASSERT_TRUE(same(a.operands.state[s][i], b.operands.state[s][i]))
          << what << " state " << s << " element " << i << ": " << a.operands.state[s][i] << " and "
          << b.operands.state[s][i];
    }
    if (a.operands.parameter) {
      ASSERT_TRUE(same(widen(a.operands.parameter, a.operands.parameter_dtype, i),
                       widen(b.operands.parameter, b.operands.parameter_dtype, i)))
          << what << " parameter " << i << " from " << a.operands.master[i];
    }
  }
  EXPECT_TRUE(a.master.guards_intact() && a.first.guards_intact() && a.second.guards_intact() &&
              a.parameter.guards_intact())
      << what;
}

/// Every optimizer that updates ranges, in its variants.
inline const std::vector<std::pair<std::string, Optimizer>>& optimizers() {
  static const std::vector<std::pair<std::string, Optimizer>> all{
      {"AdamW", AdamW{.lr = 3e-3, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1}},
      {"Adam", AdamW{.lr = 3e-3, .beta1 = 0.8, .weight_decay = 0.1, .decoupled = false}},
      {"AdamWithoutCorrection", AdamW{.lr = 1e-3, .bias_correction = false}},
      {"Sgd", Sgd{.lr = 0.1}},
      {"SgdMomentum", Sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.01}},
      {"SgdNesterov", Sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}},
      {"Adagrad", Adagrad{.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.05}},
      {"AdagradFromOne", Adagrad{.lr = 0.1, .initial_accumulator_value = 1, .eps = 1e-6}},
      {"Lion", Lion{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1}},
      {"ScheduleFree", ScheduleFreeAdamW{.lr = 3e-3, .beta2 = 0.95, .weight_decay = 0.1}},
      {"ScheduleFreeWarm", ScheduleFreeAdamW{.lr = 3e-3, .beta1 = 0.8, .warmup_steps = 7}},
      {"Lamb", Lamb{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1}},
      {"LambEpsInside",
       Lamb{.lr = 1e-2, .eps = 1e-3, .bias_correction = false, .eps_inside_sqrt = true}},
      {"Adafactor", Adafactor{.lr = 1e-2, .weight_decay = 0.1, .factored = false}},
      {"AdafactorEpsAdded", Adafactor{.lr = 1e-2,
                                      .beta2_decay = -0.6,
                                      .eps1 = 1e-8,
                                      .d = 0.5,
                                      .relative_step = false,
                                      .eps_added = true,
                                      .factored = false}}};
  return all;
}

}  // namespace zero::optim
