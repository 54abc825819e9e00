// Measures the steps of a run: times, traffic, FLOPs, and the profile of one step.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "zero/engine/flops_profiler.h"
#include "zero/engine/step_profile.h"
#include "zero/train/accounts.h"
#include "zero/train/run.h"
#include "zero/train/stragglers.h"

namespace zero::train {

class Measuring {
 public:
  /// Counts steps from `first_step`, the first step of this start of the run. `run` outlives this.
  Measuring(Run& run, int64_t first_step);

  /// While it lives, collectives and phases of steps are timed if the options ask for it.
  class Session {
   public:
    /// Measures matrix products, for `flops_profiler`. Collective.
    explicit Session(Measuring& measuring);
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session();

   private:
    comm::Group& group_;
  };

  void begin_step(int64_t step);
  /// Says that the step's passes have ended.
  void end_passes();
  /// Adds the measurements to the report of the step.
  void end_step(StepReport& report);
  /// Returns this rank's times in the step before, for StepExchange.
  RankTime last_time() const { return last_time_; }

  /// Returns whether there is a profile to be written. It stays until the next step has ended,
  /// which completes the work that the profiled step has left under way.
  bool has_profile() const { return profile_.has_value(); }
  /// Writes the profile, and reports it. Collective.
  void write_profile();

  StepTraffic& traffic() { return traffic_; }

 private:
  using Clock = std::chrono::steady_clock;
  bool is_profiled(int64_t step) const;
  void measure_products();
  FlopsReport flops_of(const StepReport& report) const;

  Run& run_;
  int64_t first_step_;
  StepTraffic traffic_;
  Clock::time_point begin_{};
  double waited_before_ = 0;
  double disk_before_ = 0;
  std::optional<comm::LinkTimes> link_before_;
  RankTime last_time_{};
  std::optional<StepProfile> profile_;
  std::unique_ptr<FlopsProfiler> flops_;  ///< lives in the step that it counts
  double product_speed_ = 0;              ///< FLOP/s of matrix products; 0: not measured
};

}  // namespace zero::train
