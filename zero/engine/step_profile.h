// Writes the timelines of all ranks in a step to a file that Perfetto and Chrome show
// (docs/profiling.md).
//
//   zero::StepProfile profile(engine.group());
//   at::Tensor loss;
//   {
//     const zero::Timeline::Scope forward(profile.timeline(), zero::Activity::forward);
//     loss = model->loss(batch);
//   }
//   engine.backward(loss);
//   engine.step();
//   profile.write("step.json");
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "zero/base/timeline.h"
#include "zero/comm/group.h"

namespace zero {

/// Keeps the spans of this rank, and the operators of this thread, from its construction until
/// `stop`. Throws Error if another one keeps spans of the group or operators of the thread.
class StepProfile {
 public:
  struct Options {
    size_t most = Timeline::kSpans;  ///< spans of a rank, 128 bytes each; more are counted alone
    bool operators = true;           ///< LibTorch's, as its profilers see them
  };
  /// `group` outlives this. Not collective.
  explicit StepProfile(comm::Group& group) : StepProfile(group, Options()) {}
  StepProfile(comm::Group& group, Options options);
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;
  ~StepProfile();

  /// Returns the group's timeline, for phases that the program knows (Activity::forward).
  Timeline& timeline() const { return *timeline_; }
  /// Keeps nothing more, except the end of spans that are under way.
  void stop();

  struct Written {
    int64_t spans = 0;    ///< the spans of all ranks
    int64_t dropped = 0;  ///< the spans that did not fit
  };
  /// Stops, and rank 0 writes the spans of all ranks to `file`. If that fails, an earlier file
  /// stays. Then the memory is freed. Returns the same on every rank. Collective. Throws Error on
  /// every rank if the file cannot be written.
  Written write(const std::string& file);

 private:
  class Operators;
  comm::Group& group_;
  std::shared_ptr<Timeline> timeline_;
  std::unique_ptr<Operators> operators_;
};

}  // namespace zero
