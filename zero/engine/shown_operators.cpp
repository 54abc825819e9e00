#include "zero/engine/shown_operators.h"

#include <ATen/record_function.h>
#include <pthread.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace zero {

namespace {

// The slots that show the operators of a thread.
struct Shown {
  std::vector<std::weak_ptr<comm::RankActivity>> places;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

  Shown() {
    // A forked child must not write to its parent's slots.
    static const int once = pthread_atfork(nullptr, nullptr, [] {
      if (auto* shown = of_this_thread()) shown->places.clear();
    });
    (void)once;
  }
  ~Shown() { gone() = true; }

  // Returns null once the thread has ended: an engine may be destroyed after that, with the
  // program's statics.
  static Shown* of_this_thread() {
    if (gone()) return nullptr;
    thread_local Shown shown;
    return &shown;
  }

 private:
  static bool& gone() {
    thread_local bool gone = false;
    return gone;
  }
};

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& operation) {
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  const auto* shown = Shown::of_this_thread();
  if (shown == nullptr) return nullptr;
  for (const auto& place : shown->places) {
    if (const auto activity = place.lock()) activity->begin(operation.name(), backward);
  }
  return nullptr;
}

}  // namespace

ShownOperators::ShownOperators(comm::Group& group) : activity_(group.activity()) {
  auto& shown = *Shown::of_this_thread();
  if (shown.handle == at::INVALID_CALLBACK_HANDLE)
    shown.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_start).scopes(
        {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  shown.places.push_back(activity_);
}

ShownOperators::~ShownOperators() {
  auto* of_thread = Shown::of_this_thread();
  if (std::this_thread::get_id() != thread_ || of_thread == nullptr) return;
  auto& shown = *of_thread;
  // Several engines of one group have an entry each. Entries of groups that are gone are removed
  // too.
  const auto same = std::find_if(shown.places.begin(), shown.places.end(),
                                 [&](const auto& place) { return place.lock() == activity_; });
  if (same != shown.places.end()) shown.places.erase(same);
  std::erase_if(shown.places, [](const auto& place) { return place.expired(); });
  if (shown.places.empty())
    at::removeCallback(std::exchange(shown.handle, at::INVALID_CALLBACK_HANDLE));
}

}  // namespace zero
