// The begin and the end of a backward pass.
//
// Note [Passes]
// Engine::backward and Engine::accumulate say where their pass begins and ends. A pass that the
// user starts (`loss.backward()`) does not. It begins with the first gradient that comes for a
// parameter, and ends when autograd calls back at the end of the graph that this gradient belongs
// to. That is the whole pass, unless the first gradient comes in a pass inside it: where the last
// layers of a model are recomputed by reentrant checkpoints, each of those is a pass of its own.
// The sums are the same, but sharded gradients then cost one more reduction for each of them.
//
// A pass that another engine has marked belongs to that engine alone. What it brings to the
// parameters of this one is dropped (a GAN's generator, whose loss goes through the discriminator).
// A pass that nobody has marked belongs to every engine that it brings gradients to, as users of
// PyTorch expect.
//
// At stages 2 and 3, and between hosts or on a device, gradients of an unmarked pass are reduced as
// they come. So if a pass goes through several engines, or through checkpoints that make passes of
// their own, it must reach the same parameters on every rank. One thread goes backward at a time.
//
// When a pass throws, autograd drops what it should have called back, and this ends the pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "zero/engine/model.h"
#include "zero/engine/reduce.h"

namespace zero {

class BackwardPass final : public GradientSink {
 public:
  /// The engine's part in its passes.
  class Steps {
   public:
    virtual ~Steps() = default;
    /// A pass begins. `holds` and `shared` are GradientReduction::Pass's.
    virtual void begin(bool holds, const std::vector<int64_t>& shared) = 0;
    virtual void end() = 0;
    /// The pass, or `end`, has thrown. Called once.
    virtual void fail() = 0;
    /// A pass that nobody has marked is about to begin: throws if it may not.
    virtual void check_unmarked() const = 0;
    virtual double loss_factor() const = 0;
    /// An Error is about to leave through LibTorch: throws it in the user's language, or returns.
    virtual void rethrow() const = 0;
  };

  /// Gradients go to `reduce`, which outlives this.
  BackwardPass(ReduceFlow& reduce, std::unique_ptr<Steps> steps);
  ~BackwardPass() override;
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  /// Makes what `passes` does one pass, of this engine alone.
  void run(bool holds, const std::vector<int64_t>& shared, const std::function<void()>& passes);

  void arrive(int64_t parameter, const at::Tensor& variable) override;
  at::Tensor place(int64_t parameter) override;
  double loss_factor() const override { return steps_->loss_factor(); }

 private:
  class Ending;
  class Mark;
  template <class F>
  std::invoke_result_t<F> leaving(F&& f);
  void begin_unmarked();
  void end_unmarked();
  void fail_unmarked() noexcept;

  ReduceFlow& reduce_;
  std::unique_ptr<Steps> steps_;
  bool marked_ = false;
  std::weak_ptr<Ending> ending_;  // of an unmarked pass under way
  std::recursive_mutex mutex_;    // autograd may run hooks on threads of its own
};

}  // namespace zero
