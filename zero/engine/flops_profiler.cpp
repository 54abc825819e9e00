#include "zero/engine/flops_profiler.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "zero/engine/operator_cost.h"
#include "zero/engine/parameter_names.h"
#include "zero/engine/thread_observer.h"

namespace zero {

namespace {

using Clock = std::chrono::steady_clock;

// The number of no module.
constexpr int kNone = -1;
constexpr int kModel = 0;

// Gradients that libzero computes in forward already do not count as forward.
constexpr std::string_view kGradientInForward = "zero::linear_cross_entropy_gradient";
// The name of LibTorch's own range around a node of autograd begins so.
constexpr std::string_view kAround = "autograd::engine::evaluate_function";

bool copies(std::string_view name) {
  constexpr std::array<std::string_view, 4> kCopies{"aten::to", "aten::_to_copy",
                                                    "aten::contiguous", "aten::clone"};
  return std::find(kCopies.begin(), kCopies.end(), name) != kCopies.end();
}

bool is_number(std::string_view name) {
  return !name.empty() &&
         std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// An operator between its start and its end.
struct Running final : at::ObserverContext {
  int module = kNone;
  bool outermost = false;
  bool counts = false;
  bool hides = false;  // operators inside it do not count
  int64_t used_before = 0;
  OperatorCost cost;
  Clock::time_point begin;
};

}  // namespace

FlopsCount& FlopsCount::operator+=(const FlopsCount& other) {
  parameters += other.parameters;
  macs += other.macs;
  flops += other.flops;
  ms += other.ms;
  return *this;
}

struct FlopsProfiler::State {
  struct Module {
    std::string name;
    int parent = kNone;
    int depth = 0;
    bool numbered = false;
    FlopsCount own{};
  };
  // A copy of a parameter. While the weak reference lives, no other storage gets the same address.
  struct Copy {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int module = kModel;
  };

  explicit State(const NamedTensors& tensors) {
    modules.push_back({});
    names.add(tensors.parameters);
    const size_t parameters = names.size();
    names.add(tensors.buffers);
    for (size_t i = 0; i < names.size(); ++i) module_of_name.push_back(module_named(names.name(i)));
    for (const auto& [name, tensor] : tensors.parameters) {
      const auto index = names.find(tensor);
      // A tied parameter counts under its first name alone.
      if (index && *index < parameters && names.name(*index) == name)
        modules[static_cast<size_t>(module_of_name[*index])].own.parameters += tensor.numel();
    }
  }

  // Returns the module that has the tensor of this name; makes it and those around it if needed.
  int module_named(const std::string& tensor) {
    int module = kModel;
    for (size_t begin = 0, dot = 0; (dot = tensor.find('.', begin)) != std::string::npos;
         begin = dot + 1) {
      const auto path = tensor.substr(0, dot);
      const auto found = std::find_if(modules.begin(), modules.end(),
                                      [&](const Module& other) { return other.name == path; });
      if (found == modules.end()) {
        const bool numbered = is_number(std::string_view(tensor).substr(begin, dot - begin));
        modules.push_back({path, module, of(module).depth + 1, numbered});
        module = static_cast<int>(modules.size()) - 1;
      } else {
        module = static_cast<int>(found - modules.begin());
      }
    }
    return module;
  }

  Module& of(int module) { return modules[static_cast<size_t>(module)]; }

  // Returns the deepest module that holds both.
  int common(int a, int b) {
    while (a != b) {
      if (of(a).depth < of(b).depth) std::swap(a, b);
      a = of(a).parent;
    }
    return a;
  }

  // --- The module of an operator ---

  // Returns the module of the parameters among the inputs.
  int module_read(c10::ArrayRef<const c10::IValue> inputs) {
    int module = kNone;
    for (const auto& input : inputs) {
      each_tensor(input, [&](const at::Tensor& tensor) {
        int read = kNone;
        if (const auto index = names.find(tensor)) {
          read = module_of_name[*index];
        } else if (!parameter_copies.empty() && tensor.defined() && tensor.has_storage()) {
          const auto found = parameter_copies.find(storage_of(tensor));
          if (found != parameter_copies.end()) read = found->second.module;
        }
        if (read != kNone) module = module == kNone ? read : common(module, read);
      });
    }
    return module;
  }

  static const void* storage_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }

  // Adds the counts between the last module used and `next` to the module that they belong to.
  void use(int next) {
    int module = last == kNone || next == kNone ? kModel : common(last, next);
    if (last != kNone && next != kNone) {
      int layer = kNone;
      for (int inner = last; inner != module; inner = of(inner).parent) {
        if (of(inner).numbered) layer = inner;
      }
      if (layer != kNone) module = layer;
    }
    of(module).own += std::exchange(between, {});
    last = next;
    ++used;
  }

  void end_pass() {
    use(kNone);
    parameter_copies.clear();
  }

  FlopsCount& count_of(int module) { return module == kNone ? between : of(module).own; }

  // --- Operators ---

  std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& range) {
    const std::string_view name = range.name();
    if (torch::autograd::get_current_graph_task_id() != -1 || name.starts_with(kAround)) {
      if (last != kNone || between.ms > 0) end_pass();
      return nullptr;
    }
    auto running = std::make_unique<Running>();
    running->outermost = depth++ == 0;
    running->used_before = used;
    if (name == kGradientInForward) {
      running->hides = true;
      ++hidden;
    }
    if (hidden == 0) {
      const auto inputs = range.inputs();
      running->module = module_read(inputs);
      if (running->module != kNone) use(running->module);
      if (running->outermost) outer = running->module;
      if (counting == 0) {
        if (const auto cost = operator_cost(name, inputs)) {
          running->counts = true;
          running->cost = *cost;
          ++counting;
        }
      }
    }
    running->begin = Clock::now();
    return running;
  }

  void end(const at::RecordFunction& range, at::ObserverContext& context) {
    auto& running = static_cast<Running&>(context);
    const auto time = Clock::now() - running.begin;
    --depth;
    if (running.hides) {
      --hidden;
      return;
    }
    if (hidden > 0) return;
    if (running.counts) {
      --counting;
      add_cost(range, running);
    }
    if (running.module != kNone && copies(range.name())) remember_copy(range, running.module);
    if (!running.outermost) return;
    // If only inner operators have read a parameter, the operator belongs to the last module used.
    const int module =
        running.module == kNone && used != running.used_before ? last : running.module;
    count_of(module).ms += std::chrono::duration<double, std::milli>(time).count();
  }

  void add_cost(const at::RecordFunction& range, const Running& running) {
    int64_t elements = 0;
    if (running.cost.needs_result()) {
      bool found = false;
      for (const auto& output : range.outputs()) {
        each_tensor(output, [&](const at::Tensor& tensor) {
          if (found || !tensor.defined() || !tensor.is_floating_point()) return;
          found = true;
          elements = tensor.numel();
        });
      }
    }
    auto& count = count_of(running.module == kNone ? outer : running.module);
    count.macs += running.cost.total_macs(elements);
    count.flops += running.cost.total_flops(elements);
  }

  void remember_copy(const at::RecordFunction& range, int module) {
    for (const auto& output : range.outputs()) {
      each_tensor(output, [&](const at::Tensor& tensor) {
        if (!tensor.defined() || !tensor.has_storage() || names.find(tensor)) return;
        parameter_copies.insert_or_assign(storage_of(tensor),
                                          Copy{tensor.storage().getWeakStorageImpl(), module});
      });
    }
  }

  // --- What has been counted ---

  ModuleFlops profile_of(int module) const {
    const auto& given = modules[static_cast<size_t>(module)];
    ModuleFlops result{.name = given.name, .own = given.own, .total = given.own};
    for (size_t i = 0; i < modules.size(); ++i) {
      if (modules[i].parent != module) continue;
      result.children.push_back(profile_of(static_cast<int>(i)));
      result.total += result.children.back().total;
    }
    return result;
  }

  ParameterNames names;
  std::vector<int> module_of_name;
  std::vector<Module> modules;  // parents first
  std::unordered_map<const void*, Copy> parameter_copies;
  FlopsCount between;  // counted between the last parameter and the next one
  int last = kNone;    // the module whose parameter was used last
  int64_t used = 0;    // how often a parameter was used
  int outer = kNone;   // the module of the outermost operator that runs
  int depth = 0;       // the number of operators that run
  int counting = 0;    // those of them that count
  int hidden = 0;      // those of them that hide the operators inside them
  std::optional<ThreadObserver<State>> observer{
      std::in_place, *this, ThreadObserver<State>::Scopes{at::RecordScope::FUNCTION}, true,
      "A second zero::FlopsProfiler on this thread while another one counts: stop that one first."};
};

FlopsProfiler::FlopsProfiler(const NamedTensors& tensors)
    : state_(std::make_unique<State>(tensors)) {}

FlopsProfiler::~FlopsProfiler() { stop(); }

void FlopsProfiler::stop() {
  if (!state_->observer) return;
  state_->observer.reset();
  state_->end_pass();
}

ModuleFlops FlopsProfiler::profile() const { return state_->profile_of(kModel); }

}  // namespace zero
