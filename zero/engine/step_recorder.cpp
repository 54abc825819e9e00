#include "zero/engine/step_recorder.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/engine/operator_cost.h"

namespace zero {

struct StepRecorder::State {
  explicit State(const paging::Pager& of) : pager(of) {}

  // Returns the last operator of the trace so far.
  std::optional<size_t> last() const {
    const size_t position = pager.position();
    if (position == 0) return {};
    return position - 1;
  }

  void add(double operations, bool in_backward) {
    const auto position = last();
    if (!position) return;
    const std::lock_guard lock(mutex);
    if (flops.size() <= *position) {
      flops.resize(*position + 1, 0);
      // The operator itself ends before those that follow it.
      backward.resize(*position + 1, in_backward ? 1 : 0);
    }
    flops[*position] += operations;
  }

  const paging::Pager& pager;
  mutable std::mutex mutex;  // guards the members below: autograd has threads of its own
  std::vector<double> flops;
  std::vector<uint8_t> backward;
  std::vector<paging::StepSchedule::Reduction> reductions;
};

namespace {

// The recorders that the operators of a thread count for.
template <class State>
struct Recorded {
  std::vector<std::weak_ptr<State>> states;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  int makers = 0;    // recorders that were made on this thread and live
  int counting = 0;  // operators that run and count

  ~Recorded() { gone() = true; }

  // Returns null once the thread has ended.
  static Recorded* of_this_thread() {
    if (gone()) return nullptr;
    thread_local Recorded recorded;
    return &recorded;
  }

  void add(const std::shared_ptr<State>& state) {
    std::erase_if(states, [](const auto& other) { return other.expired(); });
    const bool known = std::any_of(states.begin(), states.end(),
                                   [&](const auto& other) { return other.lock() == state; });
    if (!known) states.push_back(state);
  }

 private:
  static bool& gone() {
    thread_local bool gone = false;
    return gone;
  }
};

// An operator between its start and its end.
struct Running final : at::ObserverContext {
  std::optional<OperatorCost> cost;
};

// Returns the elements of the first result, if the cost depends on it.
int64_t elements_of_result(const at::RecordFunction& range, const OperatorCost& cost) {
  if (!cost.needs_result()) return 0;
  for (const auto& output : range.outputs()) {
    if (!output.isTensor()) continue;
    const auto& tensor = output.toTensor();
    if (tensor.defined() && tensor.is_floating_point()) return tensor.numel();
  }
  return 0;
}

template <class State>
std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& range) {
  auto* recorded = Recorded<State>::of_this_thread();
  if (recorded == nullptr) return nullptr;
  auto running = std::make_unique<Running>();
  if (recorded->counting == 0) running->cost = operator_cost(range.name(), range.inputs());
  if (running->cost) ++recorded->counting;
  return running;
}

template <class State>
void on_end(const at::RecordFunction& range, at::ObserverContext* context) {
  auto* recorded = Recorded<State>::of_this_thread();
  if (recorded == nullptr || context == nullptr) return;
  const auto& cost = static_cast<Running*>(context)->cost;
  double operations = 0;
  if (cost) {
    --recorded->counting;
    operations = static_cast<double>(cost->total_flops(elements_of_result(range, *cost)));
  }
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  for (const auto& each : recorded->states) {
    if (const auto state = each.lock()) state->add(operations, in_backward);
  }
}

}  // namespace

StepRecorder::StepRecorder(const paging::Pager& pager) : state_(std::make_shared<State>(pager)) {
  auto& recorded = *Recorded<State>::of_this_thread();
  if (recorded.makers++ == 0) {
    recorded.handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback(&on_start<State>, &on_end<State>)
                                       .needsInputs(true)
                                       .needsOutputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  }
  recorded.add(state_);
}

StepRecorder::~StepRecorder() {
  auto* recorded = Recorded<State>::of_this_thread();
  if (std::this_thread::get_id() != thread_ || recorded == nullptr) return;
  if (--recorded->makers == 0)
    at::removeCallback(std::exchange(recorded->handle, at::INVALID_CALLBACK_HANDLE));
}

bool StepRecorder::begun() const { return state_->pager.position() > 0; }

size_t StepRecorder::operators() const {
  const std::lock_guard lock(state_->mutex);
  return state_->flops.size();
}

void StepRecorder::touched() {
  if (auto* recorded = Recorded<State>::of_this_thread()) recorded->add(state_);
}

void StepRecorder::reduction_starts(int64_t unit) {
  const auto position = state_->last();
  if (!position) return;
  const std::lock_guard lock(state_->mutex);
  state_->reductions.push_back({unit, *position});
}

void StepRecorder::restart() {
  const std::lock_guard lock(state_->mutex);
  state_->flops.clear();
  state_->backward.clear();
  state_->reductions.clear();
}

void StepRecorder::write(paging::StepSchedule& schedule) const {
  const std::lock_guard lock(state_->mutex);
  const size_t operators = schedule.trace.operators();
  ensure(state_->flops.size() <= operators, "what was recorded is of this trace");
  schedule.flops = state_->flops;
  schedule.flops.resize(operators, 0);
  schedule.backward = state_->backward;
  schedule.backward.resize(operators, 0);
  schedule.reductions = state_->reductions;
}

}  // namespace zero
