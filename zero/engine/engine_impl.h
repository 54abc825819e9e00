// The owners behind an Engine, in the order in which they are made.
#pragma once

#include <c10/core/GradMode.h>

#include <functional>
#include <memory>
#include <string_view>

#include "zero/base/device_limit.h"
#include "zero/base/owner_process.h"
#include "zero/checkpoint/manifest.h"
#include "zero/engine/background_save.h"
#include "zero/engine/engine.h"
#include "zero/engine/engine_plan.h"
#include "zero/engine/evaluation_weights.h"
#include "zero/engine/flows.h"
#include "zero/engine/hyper_parameters.h"
#include "zero/engine/memory_budget.h"
#include "zero/engine/shown_operators.h"
#include "zero/engine/state_changes.h"
#include "zero/engine/state_source.h"
#include "zero/engine/step_progress.h"
#include "zero/engine/step_recording.h"

namespace zero {

struct Engine::Impl {
  Impl(NamedTensors tensors, const std::vector<ParameterGroup>& groups, Config config,
       std::shared_ptr<comm::Group> group);
  ~Impl();

  OwnerProcess owner{};
  std::unique_ptr<ShownOperators> shown{};  // on the thread that made this
  EnginePlan plan;                          // the decisions, made before anything else
  StepProgress progress{plan};              // micro-batches, steps and the loss scale
  HyperParameters hyper_parameters{plan.model()};
  MemoryBudget memory{plan};
  StepRecording recording{plan};  // for the simulated timeline
  Flows flows;                    // the table, gather, reduce, update and their schedule
  StateChanges changes{plan, progress, flows};
  EvaluationWeights evaluation{plan, flows, hyper_parameters, changes};
  BufferPolicy buffer_policy = BufferPolicy::per_rank;
  std::vector<uint8_t> gradients_used;            // by parameter, in the last step
  SaveMemory save_memory{plan.group().ledger()};  // of the copies of a save in the background
  std::unique_ptr<BackgroundSave> saving;         // the save that is not completed; ends first

  // Saving and loading (state_io.cpp).
  StateParts parts();
  Progress saved_progress() const;
  /// Returns whether a save may go on beside training: copies from a device with memory of its own
  /// would have to be ordered with its streams, and copies would exceed a memory budget.
  bool may_save_beside() const;
  /// Lists what this rank saves. With `delayed` it also has the parameters in force.
  std::unique_ptr<SliceFile> slice_file(bool delayed);
  /// Returns the manifest of a save of now, without files. With `delayed` it also has the
  /// parameters in force.
  Manifest manifest(bool delayed);
  /// Opens a source, which checks it on every rank, and puts its states in place of the engine's.
  /// Collective.
  void load_states(std::string_view label,
                   const std::function<std::unique_ptr<StateSource>()>& open);
};

/// The scope of a call that reads or writes states. Autograd does not record it, and a device's cap
/// does not refuse its memory. The gathers that the other ranks count on come before its
/// collectives.
struct Aside {
  explicit Aside(const Flows& flows) { flows.gather().start_owed(); }
  c10::NoGradGuard no_grad;
  HostScope not_refused;
};

}  // namespace zero
