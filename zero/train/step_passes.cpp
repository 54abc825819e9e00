#include "zero/train/step_passes.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <optional>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/comm/gather_records.h"
#include "zero/train/layer_major.h"

namespace zero::train {
namespace {

/// Returns the same layers, each with a cast of its own, since the backward passes between them
/// have none.
LayerSequence cast(LayerSequence model, std::optional<at::ScalarType> dtype,
                   c10::DeviceType device) {
  if (!dtype) return model;
  model.inputs = [inputs = std::move(model.inputs), dtype, device] {
    const Autocast casts(dtype, device);
    return inputs();
  };
  for (auto& layer : model.layers) {
    layer = [layer = std::move(layer), dtype, device](const std::vector<at::Tensor>& x) {
      const Autocast casts(dtype, device);
      return layer(x);
    };
  }
  model.loss = [loss = std::move(model.loss), dtype, device](const std::vector<at::Tensor>& x,
                                                             int64_t micro_batch) {
    const Autocast casts(dtype, device);
    return loss(x, micro_batch);
  };
  return model;
}

at::Tensor scaled(const at::Tensor& loss, double factor) {
  return factor == 1 ? loss : loss * factor;
}

/// Returns a new seed for each step and rank, so that dropout in a resumed run is that of an
/// uninterrupted one.
uint64_t dropout_seed(int64_t seed, int64_t step, int rank) {
  uint64_t x = static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15u +
               static_cast<uint64_t>(step) * 0xbf58476d1ce4e5b9u +
               static_cast<uint64_t>(rank) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x * 0xd6e8feb86659fd93u;
}

/// Returns the result of `pass`. If a device is full, the error gets a sentence with a remedy.
template <class Pass>
auto explained(const Engine& engine, const Pass& pass) {
  try {
    return pass();
  } catch (const c10::OutOfMemoryError& error) {
    throw engine.explained(error);
  }
}

}  // namespace

void StepPasses::begin(int64_t step) {
  at::manual_seed(dropout_seed(run_.options.seed, step, run_.group->rank()));
  data_begin_ = run_.task->position();
}

void StepPasses::pass(StepWatch* watch) {
  if (watch != nullptr) watch->begin_step();
  if (run_.engine->config().layer_major_accumulation) {
    pass_layer_major(watch);
  } else {
    pass_one_by_one(watch);
  }
}

void StepPasses::pass_again(int64_t step, StepWatch& watch) {
  run_.engine->zero_grad();
  run_.task->restore(data_begin_);
  begin(step);
  pass(&watch);
}

Batch StepPasses::next_batch() { return on_device(run_.task->next(), run_.group->device()); }

std::vector<double> StepPasses::factors_of(const std::vector<Batch>& batches) const {
  std::vector<double> factors(losses_.size(), 1);
  const auto micro_batches = static_cast<int64_t>(losses_.size()) * run_.group->size();
  if (run_.task->step_weight()) return factors;  // equal weights
  for (size_t i = 0; i < batches.size(); ++i) factors[i] = run_.task->weight(batches[i]);
  const double mine = std::accumulate(factors.begin(), factors.end(), 0.0);
  double total = 0;
  for (const double weight : comm::gather_records(*run_.group, mine, "weights of a step"))
    total += weight;
  for (auto& factor : factors) factor = loss_factor(factor, total, micro_batches);
  return factors;
}

void StepPasses::pass_one_by_one(StepWatch* watch) {
  auto& engine = *run_.engine;
  // If their weights differ, the whole step's batches are needed first.
  std::vector<Batch> batches;
  if (!run_.task->step_weight()) {
    for (size_t i = 0; i < losses_.size(); ++i) batches.push_back(run_.task->next());
  }
  const auto factors = factors_of(batches);
  std::vector<at::Tensor> losses;
  for (size_t i = 0; i < losses_.size(); ++i) {
    const auto batch =
        batches.empty() ? next_batch() : on_device(std::move(batches[i]), run_.group->device());
    const auto number = static_cast<int64_t>(i) + 1;
    if (watch != nullptr) watch->begin_micro_batch(number);
    const auto loss = explained(engine, [&] {
      const Autocast casts(engine.config().autocast_dtype(), run_.group->device().type());
      const Timeline::Scope forward(*run_.group->accounts().timeline, Activity::forward);
      return scaled(run_.task->loss(batch), factors[i]);
    });
    engine.backward(loss);
    losses.push_back(loss.detach());
    if (watch != nullptr) watch->add_loss(number, loss.item<float>());
    if (i + 1 < losses_.size()) engine.step();  // counts the micro-batch
  }
  // A device works on while the host waits for the first loss: all passes are enqueued by now.
  for (size_t i = 0; i < losses_.size(); ++i) losses_[i] = losses[i].item<float>();
}

void StepPasses::pass_layer_major(StepWatch* watch) {
  auto& engine = *run_.engine;
  std::vector<Batch> batches;
  for (size_t i = 0; i < losses_.size(); ++i) batches.push_back(next_batch());
  const auto factors = factors_of(batches);
  auto model = cast(run_.task->layers(std::move(batches)), engine.config().autocast_dtype(),
                    run_.group->device().type());
  model.loss = [loss = std::move(model.loss), &factors](const std::vector<at::Tensor>& last,
                                                        int64_t micro_batch) {
    return scaled(loss(last, micro_batch), factors[static_cast<size_t>(micro_batch)]);
  };
  if (watch != nullptr) watch->begin_micro_batch(0);
  const auto losses = explained(
      engine, [&] { return backward_layer_major(engine, model, {.store = run_.activations}); });
  for (size_t i = 0; i < losses_.size(); ++i) {
    losses_[i] = losses[i].item<float>();
    if (watch != nullptr) watch->add_loss(static_cast<int64_t>(i) + 1, losses_[i]);
  }
}

}  // namespace zero::train
