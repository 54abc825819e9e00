// Softmax, loss and gradient of a row of logits as a device's threads compute them, in plain C++:
// Note [Kernels in plain C++] in zero/optim/device_elements.h.
//
// A thread block has one row. Each thread reads its share and has its largest logit, the sum of its
// exponentials, and its sum (`part_of`); the block joins these (`join`), and each thread writes the
// gradient over its share (`write_gradient`). So a row is read twice, the second time from the
// device's cache, and is written once. The exponential and the logarithm are a device's own
// (`Math`), which the tests replace by those of the C++ library.
#pragma once

#include <cstdint>
#include <limits>

#include "zero/models/layers/packs.h"

namespace zero::softmax {

/// The logits of a loss and what belongs to their rows, in the memory of a device.
template <class NumbersType>
struct Rows {
  using Numbers = NumbersType;
  typename Numbers::Stored* logits;  ///< row r begins at r * stride
  int64_t stride;
  int64_t vocabulary;
  const int64_t* targets;
  const float* scales;  ///< factors of the rows' gradients
  double* losses;
  float smoothing = 0;  ///< of labels: softmax_cross_entropy_
};

/// The part that some logits add to their row's softmax. `sum` is of exp(logit - origin(largest)),
/// `total` of the logits themselves.
struct Part {
  float largest = -std::numeric_limits<float>::infinity();
  float sum = 0;
  float total = 0;
};

inline constexpr float kLog2OfE = 1.44269504088896340736F;

/// Returns the number that is subtracted from logits before the exponential. Logits of minus
/// infinity have a probability of zero, also where a share has no others.
constexpr float origin(float largest) {
  return largest == -std::numeric_limits<float>::infinity() ? 0.0F : largest;
}

/// Returns exp(logit - from).
template <class Math>
constexpr float exponential(float logit, float from) {
  return Math::exp2((logit - from) * kLog2OfE);
}

/// Returns the part of two shares. (b, a) gives the same bits.
template <class Math>
constexpr Part join(Part a, Part b) {
  const float largest = b.largest > a.largest ? b.largest : a.largest;
  const float from = origin(largest);
  return {largest,
          a.sum * exponential<Math>(a.largest, from) + b.sum * exponential<Math>(b.largest, from),
          a.total + b.total};
}

/// Returns `part` with kCount further logits. NaN is never the largest, and stays in the sum.
template <class Math, int kCount>
constexpr Part add(Part part, const packs::Pack<float, kCount>& logits) {
  float largest = part.largest;
  for (int i = 0; i < kCount; ++i)
    largest = logits.values[i] > largest ? logits.values[i] : largest;
  const float from = origin(largest);
  float sum = part.sum * exponential<Math>(part.largest, from);
  float total = part.total;
  for (int i = 0; i < kCount; ++i) {
    sum += exponential<Math>(logits.values[i], from);
    total += logits.values[i];
  }
  return {largest, sum, total};
}

/// Returns the part of the logits that `thread` of so many reads: every so many-th pack of kCount.
template <class Math, class Numbers, int kCount>
constexpr Part part_of(const typename Numbers::Stored* row, int64_t vocabulary, int64_t thread,
                       int64_t threads) {
  Part part;
  for (int64_t begin = thread * kCount; begin < vocabulary; begin += threads * kCount) {
    if (begin + kCount <= vocabulary) {
      part = add<Math>(part, packs::widened<Numbers, kCount>(row + begin));
    } else {
      for (int64_t i = begin; i < vocabulary; ++i)
        part = add<Math>(part, packs::widened<Numbers, 1>(row + i));
    }
  }
  return part;
}

/// Returns the loss of a row whose target has the logit `chosen`; NaN where a logit is NaN, or the
/// largest is infinite.
template <class Math, class Numbers>
constexpr double loss(const Rows<Numbers>& rows, Part whole, float chosen) {
  double wanted = chosen;
  if (rows.smoothing > 0) {
    const double mean = static_cast<double>(whole.total) / static_cast<double>(rows.vocabulary);
    wanted += rows.smoothing * (mean - wanted);
  }
  return Math::log(static_cast<double>(whole.sum)) +
         (static_cast<double>(origin(whole.largest)) - wanted);
}

/// Writes the gradient of row `number` over the logits that part_of reads in this thread.
template <class Math, class Numbers, int kCount>
constexpr void write_gradient(const Rows<Numbers>& rows, int64_t number, int64_t thread,
                              int64_t threads, Part whole) {
  auto* const row = rows.logits + number * rows.stride;
  const int64_t vocabulary = rows.vocabulary;
  const int64_t target = rows.targets[number];
  const float scale = rows.scales[number];
  const float from = origin(whole.largest);
  const float factor = scale / whole.sum;
  // The wanted probabilities take this from every word, and the target loses `most` beside it.
  const float rest = rows.smoothing / static_cast<float>(vocabulary) * scale;
  const float most = (1 - rows.smoothing) * scale;
  const auto write = [&]<int kWidth>(int64_t begin) {
    const auto logits = packs::widened<Numbers, kWidth>(row + begin);
    const bool here = target >= begin && target < begin + kWidth;
    const int chosen = here ? static_cast<int>(target - begin) : -1;
    packs::Pack<typename Numbers::Stored, kWidth> gradient{};
    for (int i = 0; i < kWidth; ++i) {
      const float probability = exponential<Math>(logits.values[i], from) * factor;
      const float rested = probability - rest;
      gradient.values[i] = Numbers::narrow(i == chosen ? rested - most : rested);
    }
    optim::device::store(gradient, row + begin);
  };
  for (int64_t begin = thread * kCount; begin < vocabulary; begin += threads * kCount) {
    if (begin + kCount <= vocabulary) {
      write.template operator()<kCount>(begin);
    } else {
      for (int64_t i = begin; i < vocabulary; ++i) write.template operator()<1>(i);
    }
  }
}

/// Writes zeros there: the gradient of a row without a target.
template <class Numbers, int kCount>
constexpr void write_zeros(typename Numbers::Stored* row, int64_t vocabulary, int64_t thread,
                           int64_t threads) {
  for (int64_t begin = thread * kCount; begin < vocabulary; begin += threads * kCount) {
    if (begin + kCount <= vocabulary) {
      optim::device::store(packs::Pack<typename Numbers::Stored, kCount>{}, row + begin);
    } else {
      for (int64_t i = begin; i < vocabulary; ++i) row[i] = {};
    }
  }
}

/// Calls f(width) with how many logits a thread reads at once, an integral_constant: 16 bytes where
/// every row begins at a multiple of them, else one.
template <class Numbers, class F>
void with_width(const Rows<Numbers>& rows, const F& f) {
  constexpr int kWidth = packs::kWidth<Numbers>;
  if (packs::aligned(rows.logits) && rows.stride % kWidth == 0)
    return f(std::integral_constant<int, kWidth>());
  f(std::integral_constant<int, 1>());
}

}  // namespace zero::softmax
