#include "zero/engine/shown_operators.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <vector>

namespace zero {

namespace {

// Where the operators of a thread are shown.
struct Shown {
  std::vector<std::weak_ptr<comm::Activity>> places;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

  static Shown& of_this_thread() {
    thread_local Shown shown;
    return shown;
  }
};

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& operation) {
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  for (const auto& place : Shown::of_this_thread().places) {
    if (const auto activity = place.lock()) activity->begin(operation.name(), backward);
  }
  return nullptr;
}

}  // namespace

ShownOperators::ShownOperators(comm::Group& group) : activity_(group.activity()) {
  auto& shown = Shown::of_this_thread();
  if (shown.places.empty())
    shown.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_start).scopes(
        {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  shown.places.push_back(activity_);
}

ShownOperators::~ShownOperators() {
  if (std::this_thread::get_id() != thread_) return;
  auto& shown = Shown::of_this_thread();
  // Of several of one group each has an entry; those of groups that are gone go along.
  const auto same = std::find_if(shown.places.begin(), shown.places.end(),
                                 [&](const auto& place) { return place.lock() == activity_; });
  if (same != shown.places.end()) shown.places.erase(same);
  std::erase_if(shown.places, [](const auto& place) { return place.expired(); });
  if (shown.places.empty()) at::removeCallback(shown.handle);
}

}  // namespace zero
