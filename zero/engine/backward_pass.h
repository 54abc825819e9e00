// The begin and the end of a backward pass.
//
// Note [Passes]
// Engine::backward and Engine::accumulate say where their pass begins and ends. A pass that the
// user starts (`loss.backward()`) does not. It begins with the first gradient that comes for a
// parameter, and ends when autograd calls back at the end of the graph that this gradient belongs
// to. That is the whole pass, unless the first gradient comes in a pass inside it. If reentrant
// checkpoints recompute the last layers of a model, each of those is a pass of its own. Sharded
// gradients then cost one more reduction for each of them. The sums are the same, unless a
// parameter has gradients in several of these passes: then the order of additions differs.
//
// A pass that another engine has marked belongs to that engine alone. Its gradients for the
// parameters of this engine are dropped (a GAN's generator, whose loss goes through the
// discriminator). A pass that nobody has marked belongs to every engine that it brings gradients
// to, as users of PyTorch expect.
//
// At stages 2 and 3, and between hosts or on a device, gradients of an unmarked pass are reduced as
// they come. So if a pass goes through several engines, or through checkpoints that make passes of
// their own, it must reach the same parameters on every rank. One thread goes backward at a time.
//
// When a pass throws, autograd drops its callback without a call, and the callback's destructor
// ends the pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "zero/engine/engine_plan.h"
#include "zero/engine/gather.h"
#include "zero/engine/reduce.h"
#include "zero/engine/step_progress.h"
#include "zero/engine/update.h"
#include "zero/engine/update_schedule.h"

namespace zero {

class BackwardPass final : public GradientSink {
 public:
  /// Gradients go to `reduce`. The arguments outlive this.
  BackwardPass(EnginePlan& plan, StepProgress& progress, GatherFlow& gather, ReduceFlow& reduce,
               UpdateFlow& update, UpdateSchedule& schedule)
      : plan_(plan),
        progress_(progress),
        gather_(gather),
        reduce_(reduce),
        update_(update),
        schedule_(schedule) {}
  ~BackwardPass() override;
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  /// Runs `passes` as one backward pass that belongs to this engine alone. `layer_major` and
  /// `shared` are those of GradientReduction::Pass.
  void run(bool layer_major, const std::vector<int64_t>& shared,
           const std::function<void()>& passes);

  void arrive(int64_t parameter, const at::Tensor& variable) override;
  at::Tensor place(int64_t parameter) override;
  double loss_factor() const override { return progress_.loss_factor(); }
  bool announce_rows(int64_t parameter, const at::Tensor& indices) override {
    return in_last_pass() && reduce_.announce_rows(parameter, indices);
  }
  c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(int64_t parameter,
                                                       const at::Tensor& indices) override {
    return reduce_.announce_look_up(parameter, indices);
  }
  GradientTaker* taker(int64_t parameter) override { return reduce_.taker(parameter); }
  void returns_whole(int64_t parameter, const at::Tensor& gradient) override {
    reduce_.returns_whole(parameter, gradient);
  }

 private:
  class Ending;
  class Mark;
  template <class F>
  std::invoke_result_t<F> rethrowing(F&& f);
  enum class Begun : uint8_t { by_engine, by_first_gradient };
  void begin(bool layer_major, const std::vector<int64_t>& shared, Begun begun);
  bool in_last_pass() const { return progress_.micro_batches_left() <= 1; }
  void end();
  void fail();
  void begin_unmarked();
  void end_unmarked();
  void fail_unmarked() noexcept;

  EnginePlan& plan_;
  StepProgress& progress_;
  GatherFlow& gather_;
  ReduceFlow& reduce_;
  UpdateFlow& update_;
  UpdateSchedule& schedule_;
  bool marked_ = false;
  std::weak_ptr<Ending> ending_;  // the end of an unmarked pass under way
  std::recursive_mutex mutex_;    // autograd may run hooks on threads of its own
};

}  // namespace zero
