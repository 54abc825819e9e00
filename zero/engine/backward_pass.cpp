#include "zero/engine/backward_pass.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "zero/base/error.h"

namespace zero {

namespace {

// Marks the pass under way as an engine's. LibTorch takes its debug information along to the
// threads on which autograd runs the graphs of a device. This kind of debug information is not one
// of LibTorch's own.
constexpr auto kMark = static_cast<c10::DebugInfoKind>(0x7A);
bool marked_here() { return c10::ThreadLocalDebugInfo::get(kMark) != nullptr; }

}  // namespace

// Marks `pass` while it lives.
class BackwardPass::Mark {
 public:
  explicit Mark(BackwardPass& pass) : pass_(pass) { pass_.marked_ = true; }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  ~Mark() { pass_.marked_ = false; }

 private:
  BackwardPass& pass_;
  c10::DebugInfoGuard here_{kMark, std::make_shared<c10::DebugInfoBase>()};
};

// Autograd holds this to call it back at the end of the pass. If it is destroyed without having
// been called, the pass has thrown. The engine may be gone by then.
class BackwardPass::Ending {
 public:
  explicit Ending(BackwardPass& pass) : pass_(&pass) {}
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;
  ~Ending() {
    if (auto* pass = std::exchange(pass_, nullptr)) pass->fail_unmarked();
  }
  void complete() {
    if (auto* pass = std::exchange(pass_, nullptr)) pass->rethrowing([&] { pass->end_unmarked(); });
  }
  void forget() { pass_ = nullptr; }

 private:
  BackwardPass* pass_;
};

BackwardPass::~BackwardPass() {
  if (const auto ending = ending_.lock()) ending->forget();
}

void BackwardPass::begin(bool layer_major, const std::vector<int64_t>& shared, Begun begun) {
  plan_.model().check();
  plan_.model().hook();
  gather_.start_owed();
  schedule_.begin_pass(layer_major);
  reduce_.begin_pass({.layer_major = layer_major,
                      .shared = shared,
                      .last = in_last_pass(),
                      .from_start = begun == Begun::by_engine});
  if (plan_.timing().in_backward) {
    progress_.begin_updates();
    update_.begin();
  }
}

void BackwardPass::end() {
  schedule_.end_pass();
  reduce_.end_pass();
  progress_.end_pass();
}

// The pass, or `end`, has thrown.
void BackwardPass::fail() {
  reduce_.drop_pass();
  // This pass has updated some weights already: the next call says that a checkpoint must be
  // loaded.
  if (reduce_.handed_over()) return;
  reduce_.clear();
  progress_.restart();
}

void BackwardPass::run(bool layer_major, const std::vector<int64_t>& shared,
                       const std::function<void()>& passes) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto ending = ending_.lock()) {
      if (torch::autograd::get_current_graph_task_id() >= 0) {
        throw Error(
            "Engine::backward inside a backward pass of this model that loss.backward() has begun "
            "(in a hook?). Call it after that pass.");
      }
      ending->forget();  // autograd still holds it although its pass has thrown
      ending_.reset();
      fail();
    }
    begin(layer_major, shared, Begun::by_engine);
  }
  try {
    const Mark mark(*this);
    passes();
    end();
  } catch (...) {
    fail();
    throw;
  }
}

// Calls `f`, whose errors leave through LibTorch.
template <class F>
std::invoke_result_t<F> BackwardPass::rethrowing(F&& f) {
  try {
    return f();
  } catch (const Error&) {
    if (const auto& in_users_language = plan_.model().rethrow()) in_users_language();
    throw;
  }
}

void BackwardPass::arrive(int64_t parameter, const at::Tensor& variable) {
  rethrowing([&] {
    const std::lock_guard lock(mutex_);  // the pass must not end between the two
    try {
      if (variable.grad().defined()) begin_unmarked();
    } catch (...) {
      variable.mutable_grad() = at::Tensor();  // otherwise the next pass would add to it
      throw;
    }
    reduce_.arrive(parameter, variable);
  });
}

// Asking for a place does not begin a pass: torch::autograd::grad may ask, and its gradients are
// the user's own.
at::Tensor BackwardPass::place(int64_t parameter) {
  return rethrowing([&] { return reduce_.place(parameter); });
}

// Begins a pass. It does nothing if one is under way, if the pass is another engine's, or if the
// gradient does not come in a pass. The caller holds the mutex.
void BackwardPass::begin_unmarked() {
  if (marked_here() || torch::autograd::get_current_graph_task_id() < 0) return;
  if (marked_ || !ending_.expired()) return;
  if (plan_.config().scales_loss() && !progress_.in_scaled_pass()) {
    throw Error(
        "loss.backward() of a loss that is to be scaled (fp16): its small gradients would be lost. "
        "Call engine.backward(loss), or engine.scale(loss).backward().");
  }
  const auto ending = std::make_shared<Ending>(*this);
  torch::autograd::Engine::get_default_engine().queue_callback([ending] { ending->complete(); });
  ending_ = ending;
  try {
    begin(false, {}, Begun::by_first_gradient);
  } catch (...) {
    ending->forget();
    ending_.reset();
    throw;
  }
}

void BackwardPass::end_unmarked() {
  const std::lock_guard lock(mutex_);
  ending_.reset();
  try {
    end();
  } catch (...) {
    fail();
    throw;
  }
}

void BackwardPass::fail_unmarked() noexcept {
  const std::lock_guard lock(mutex_);
  ending_.reset();
  try {
    fail();
  } catch (const std::exception&) {  // the user sees what the pass has thrown
  }
}

}  // namespace zero
