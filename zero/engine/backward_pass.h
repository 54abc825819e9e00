// When a backward pass begins and ends, for whoever takes its gradients.
//
// Note [Passes]
// Engine::backward and Engine::accumulate say where their pass begins and ends. A pass that the
// user starts (`loss.backward()`) does not: it begins with the first gradient that comes for a
// parameter, and ends where autograd calls back at the end of the graph that this gradient is of.
// That is the whole pass, unless the first gradient comes in a pass inside it: where the last
// layers of a model are recomputed by reentrant checkpoints, each of those is a pass of its own.
// The sums are the same; sharded gradients then cost a reduction more for each.
//
// A pass that another engine has marked is that engine's alone: what it brings to these parameters
// is dropped (a GAN's generator, whose loss goes through the discriminator). One that nobody has
// marked belongs to every engine that it brings gradients to, as PyTorch's users expect.
//
// At stages 2 and 3, and between hosts or on a device, gradients of an unmarked pass are reduced as
// they come: where it goes through several engines, or through checkpoints that make passes of
// their own, every rank must reach the same parameters. One thread goes backward at a time.
//
// Where a pass throws, autograd drops what should be called back, and that ends it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "zero/engine/model.h"

namespace zero {

class BackwardPass final : public GradientSink {
 public:
  /// What there is to do. `holds`, `shared`: as ReduceFlow::begin_backward.
  struct Steps {
    std::function<void(bool holds, const std::vector<int64_t>& shared)> begin;
    std::function<void()> end;
    /// Called once where the pass or `end` has thrown.
    std::function<void()> fail;
    /// A pass that nobody has marked is to begin: throws where it may not.
    std::function<void()> check_unmarked;
    /// As NamedTensors::rethrow.
    std::function<void()> rethrow{};
  };

  /// Gradients of a pass go to `sink`, which outlives this; so do those that come in none.
  BackwardPass(GradientSink& sink, Steps steps);
  ~BackwardPass() override;
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  /// What `passes` does is one pass, of this engine alone.
  void run(bool holds, const std::vector<int64_t>& shared, const std::function<void()>& passes);

  void arrive(int64_t parameter, const at::Tensor& variable) override;
  at::Tensor place(int64_t parameter) override;
  double loss_factor() const override { return sink_.loss_factor(); }

 private:
  class Ending;
  class Mark;
  template <class F>
  std::invoke_result_t<F> leaving(F&& f);
  void begin_unmarked();
  void end_unmarked();
  void fail_unmarked() noexcept;

  GradientSink& sink_;
  Steps steps_;
  bool marked_ = false;
  std::weak_ptr<Ending> ending_;  // of an unmarked pass under way
  std::recursive_mutex mutex_;    // autograd may run hooks on threads of its own
};

}  // namespace zero
