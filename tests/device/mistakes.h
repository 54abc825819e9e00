// Mistakes that are made by hand, and what tests of them share. Each is a function that does the
// right thing or, if so asked, makes the mistake: the checker must report every one in every run,
// whatever the results were, and say nothing of the schedule without it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>

#include "tests/device/testing.h"

namespace zero::simulated {

struct Mistake {
  const char* name;
  void (*run)(bool mistake);
  const char* says;  ///< what a report of it contains
};

inline void expect_reported_in_every_run(const Mistake& mistake) {
  for (const Options& options : schedules(4)) {
    SCOPED_TRACE(describe(options));
    configure(options);
    mistake.run(false);
    EXPECT_EQ(reports(), "") << "without the mistake";
    configure(options);
    mistake.run(true);
    EXPECT_THAT(reports(), testing::HasSubstr(mistake.says)) << "with the mistake";
  }
}

inline constexpr int64_t kNumel = 256;

inline at::Tensor filled(double value, int index = 0) {
  return torch::full({kNumel}, value, torch::TensorOptions().device(device(index)));
}

inline c10::Event record(const c10::Stream& on) {
  c10::Event event(c10::kPrivateUse1);
  event.record(on);
  return event;
}
inline void order(const c10::Stream& waits, const c10::Stream& after) {
  record(after).block(waits);
}

/// Streams of a device.
struct ThreeStreams {
  explicit ThreeStreams(int index = 0)
      : main(stream(0, index)), side(stream(1, index)), third(stream(2, index)) {}
  c10::Stream main, side, third;
};

}  // namespace zero::simulated
