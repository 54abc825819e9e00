#include "zero/engine/anomaly_watch.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "zero/engine/parameter_names.h"
#include "zero/engine/thread_observer.h"
#include "zero/optim/optimizer.h"
#include "zero/paging/page.h"

namespace zero {

namespace {

using Inputs = Anomaly::Inputs;

// Backward finds its forward operators by their numbers. Beyond this many, half are forgotten.
constexpr size_t kRemembered = size_t{1} << 20;

// --- Looking at elements ---

// While one lives, the operators that this thread calls are neither observed nor recorded for
// backward. Parameters are read where they lie, so the pager's plan does not change.
class Unobserved {
  at::DisableRecordFunctionGuard unobserved_;
  c10::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard unpaged_{paging::kPagedKey};
};

// Returns whether the tensor has dense floating-point numbers in memory that is there.
bool readable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.numel() > 0 &&
         (at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type())) &&
         tensor.has_storage() && !tensor.is_meta() &&
         tensor.unsafeGetTensorImpl()
                 ->unsafe_storage()
                 .unsafeGetStorageImpl()
                 ->_mutable_data_ptr_no_checks()
                 .get() != nullptr;
}

bool absent(const at::Tensor& tensor) {
  return paging::page_of(tensor) != nullptr && !readable(tensor);
}

// Returns whether all values of a readable tensor are finite.
bool all_finite(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  const bool kernel = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (kernel && tensor.is_cpu() && tensor.is_non_overlapping_and_dense())
    return optim::squared_norm(tensor.const_data_ptr(), dtype, tensor.numel()).finite;
  return at::isfinite(tensor).all().item<bool>();
}

struct Count {
  int64_t nans = 0;
  int64_t infinities = 0;
};

Count count_of(const at::Tensor& tensor) {
  if (!readable(tensor) || all_finite(tensor)) return {};
  return {at::isnan(tensor).sum().item<int64_t>(), at::isinf(tensor).sum().item<int64_t>()};
}

Inputs worse(Inputs a, Inputs b) {
  // A NaN explains more than an infinity does, and an infinity more than an absent input.
  const auto rank = [](Inputs x) {
    return x == Inputs::nan ? 3 : x == Inputs::infinity ? 2 : x == Inputs::absent ? 1 : 0;
  };
  return rank(a) >= rank(b) ? a : b;
}

// --- What an operator's schema says ---

enum class Role : uint8_t { read, overwritten, out };

struct Traits {
  // Its result is a view, memory that nobody has written, or the result of operators inside it.
  bool shows_nothing = false;
  bool copies = false;      // its result has the values of its input
  std::vector<Role> roles;  // by argument
};

Traits traits_of(const c10::FunctionSchema& schema) {
  constexpr std::array<std::string_view, 6> kUnwritten{"aten::empty",  "aten::new_empty",
                                                       "aten::resize", "aten::_resize_output",
                                                       "aten::set_",   "aten::_reshape_alias"};
  Traits traits;
  const auto& name = schema.name();
  traits.shows_nothing =
      std::any_of(kUnwritten.begin(), kUnwritten.end(),
                  [&](std::string_view begin) { return name.starts_with(begin); });
  // These operators overwrite all that their output held before, so its findings are cleared.
  const bool replaces = name == "aten::copy_" || name == "aten::fill_" || name == "aten::zero_";
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    traits.roles.push_back(!written ? Role::read
                           : argument.is_out() || argument.kwarg_only() || replaces
                               ? Role::out
                               : Role::overwritten);
  }
  constexpr std::array<std::string_view, 6> kCopies{"aten::copy_",         "aten::_to_copy",
                                                    "aten::clone",         "aten::lift_fresh",
                                                    "aten::scalar_tensor", "aten::contiguous"};
  traits.copies = std::find(kCopies.begin(), kCopies.end(), name) != kCopies.end();
  const auto& returns = schema.returns();
  const bool views =
      !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const auto& result) {
        return result.alias_info() != nullptr && !result.alias_info()->isWrite();
      });
  const auto handle = c10::Dispatcher::singleton().findSchema(schema.operator_name());
  const bool composite =
      handle && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  traits.shows_nothing = traits.shows_nothing || views || composite;
  return traits;
}

// --- Names ---

// Makes "zero::Linear" of "torch::autograd::CppNode<zero::(anonymous namespace)::Linear>".
std::string short_name(std::string name) {
  constexpr std::string_view kWrapper = "torch::autograd::CppNode<";
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  constexpr std::string_view kOwn = "torch::autograd::";
  if (name.starts_with(kWrapper) && name.ends_with('>'))
    name = name.substr(kWrapper.size(), name.size() - kWrapper.size() - 1);
  if (name.starts_with(kOwn)) name.erase(0, kOwn.size());
  for (size_t at = 0; (at = name.find(kAnonymous, at)) != std::string::npos;)
    name.erase(at, kAnonymous.size());
  return name;
}

std::string place_of(const std::string& parameter, const std::string& after) {
  if (!parameter.empty()) return fmt::format(" of parameter {}", parameter);
  if (!after.empty()) return fmt::format(" after parameter {}", after);
  return "";
}

// The name of LibTorch's own range around a node and its hooks begins so.
constexpr std::string_view kAround = "autograd::engine::evaluate_function";

// An operator under way, with its inputs.
struct Operation final : at::ObserverContext {
  std::vector<c10::IValue> inputs;  // those that it only reads
  std::vector<c10::IValue> written;
  Inputs before = Inputs::finite;  // the kind of the inputs that it overwrites
  std::string before_input;
  bool node = false;  // one of autograd's; its outputs are not checked
  bool shows_nothing = false;
  bool copies = false;
  Anomaly as;  // the anomaly that it is if its outputs are not finite
};

}  // namespace

std::string Anomaly::text() const {
  std::string text = backward ? "backward: " : recomputed ? "forward, recomputed: " : "forward: ";
  const auto called =
      within.empty() ? operation : fmt::format("{} (called by {})", operation, within);
  if (operation.empty()) {
    text += fmt::format("the gradient{} came with", place_of(parameter, after));
  } else if (backward) {
    text += called;
    if (!node.empty()) text += fmt::format(" in {}", node);
    if (!forward_operation.empty()) text += fmt::format(", which belongs to {}", forward_operation);
    text += fmt::format("{}, made", place_of(parameter, after));
  } else {
    text += fmt::format("{}{}, made", called, place_of(parameter, after));
  }
  text += fmt::format(" {} NaN and {} infinite of {} elements ({}, [{}])", nans, infinities,
                      elements, c10::toString(dtype), fmt::join(sizes, ", "));
  if (operation.empty()) return text + ", which no operator that can be observed has made";
  const auto named = input.empty() ? std::string() : fmt::format(", parameter {}", input);
  switch (inputs) {
    case Inputs::finite:
      return text + " from finite inputs";
    case Inputs::infinity:
      return fmt::format("{} from an input with an infinity{}", text, named);
    case Inputs::nan:
      return fmt::format("{} from an input with a NaN already{}", text, named);
    case Inputs::absent:
      return fmt::format("{}; its input{} was absent and not looked at", text, named);
  }
  return text;
}

struct AnomalyWatch::State {
  // A forward operator, as an operator of backward looks it up.
  struct Forward {
    int64_t sequence = 0;
    std::string operation;
    std::string parameter;
    std::string after;
  };
  // A node of autograd that runs, or the range around such a node and its hooks.
  struct Node {
    std::string name;
    int64_t sequence = -1;
    bool around = false;
    bool recomputes = false;
    std::string parameter = {};  // the parameter whose gradient it accumulates
    size_t depth = 0;            // the number of operators under way when it began
  };

  State(const NamedTensors& tensors, Options given) : options(given) {
    names.add(tensors.parameters);
  }

  // Returns the parameter that a tensor is or shows a part of; an empty name if there is none.
  std::string parameter_of(const at::Tensor& tensor) const {
    const auto index = names.find(tensor);
    return index ? names.name(*index) : "";
  }

  // --- Start of an operator ---

  void place(const at::RecordFunction& range, Operation& operation, bool records) {
    auto& as = operation.as;
    as.order = ++order;
    as.operation = range.name();
    const size_t depth = nodes.empty() ? 0 : nodes.back().depth;
    if (running.size() > depth && running[depth] != as.operation) as.within = running[depth];
    running.push_back(as.operation);
    const auto note = [&](const at::Tensor& tensor) {
      if (as.parameter.empty()) as.parameter = parameter_of(tensor);
    };
    for (const auto& input : operation.inputs) each_tensor(input, note);
    for (const auto& input : operation.written) each_tensor(input, note);

    if (!nodes.empty() && !nodes.back().around && records) nodes.back().recomputes = true;
    as.recomputed = !nodes.empty() && nodes.back().recomputes;
    as.backward = !as.recomputed && torch::autograd::get_current_graph_task_id() != -1;
    if (!as.backward) {
      if (as.parameter.empty()) {
        as.after = last_parameter;
      } else {
        last_parameter = as.parameter;
      }
      remember(records ? range.seqNr() : static_cast<int64_t>(at::sequence_number::peek()) - 1,
               !records, as);
      return;
    }
    place_in_backward(as);
  }

  // `inside`: a node's own forward function calls the operator; the first such operator counts.
  void remember(int64_t sequence, bool inside, const Anomaly& as) {
    if (sequence < 0) return;
    const bool known = !forward.empty() && forward.back().sequence >= sequence;
    if (known && forward.back().sequence == sequence && inside) {
      if (forward.back().parameter.empty()) forward.back().parameter = as.parameter;
      return;
    }
    if (known && forward.back().sequence > sequence) return;
    if (known) forward.pop_back();
    if (forward.size() >= kRemembered)
      forward.erase(forward.begin(), forward.begin() + static_cast<ptrdiff_t>(kRemembered / 2));
    forward.push_back({sequence, as.operation, as.parameter, as.after});
  }

  void place_in_backward(Anomaly& as) const {
    if (nodes.empty()) return;  // at the end of backward
    const auto& of = nodes.back();
    as.node = of.around ? fmt::format("a hook at {}", of.name) : of.name;
    if (!of.parameter.empty()) {
      as.parameter = of.parameter;
      return;
    }
    const auto* found = forward_of(of.sequence);
    if (found == nullptr) return;
    as.forward_operation = found->operation;
    if (as.parameter.empty()) {
      as.parameter = found->parameter;
      as.after = found->after;
    }
  }

  const Forward* forward_of(int64_t sequence) const {
    const auto found = std::lower_bound(
        forward.begin(), forward.end(), sequence,
        [](const Forward& entry, int64_t wanted) { return entry.sequence < wanted; });
    return found != forward.end() && found->sequence == sequence ? &*found : nullptr;
  }

  Node node_of(const torch::autograd::Node& node) const {
    Node result;
    result.name = short_name(node.name());
    result.sequence = static_cast<int64_t>(node.sequence_nr());
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node))
      result.parameter = parameter_of(leaf->variable);
    return result;
  }

  // A tensor that cannot be checked (a dtype without isfinite) is skipped, since callbacks must not
  // throw.
  std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& range) {
    const bool records = c10::GradMode::is_enabled();
    const Unobserved unobserved;
    try {
      return started(range, records);
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  std::unique_ptr<at::ObserverContext> started(const at::RecordFunction& range, bool records) {
    const bool around = std::string_view(range.name()).starts_with(kAround);
    const bool is_node = range.scope() == at::RecordScope::BACKWARD_FUNCTION;
    if (is_node && options.throws) throw_at_end();
    if (anomaly) return nullptr;
    auto operation = std::make_unique<Operation>();
    if (is_node || around) {
      start_node(range, *operation, around);
      return operation;
    }
    const auto inputs = range.inputs();
    const auto name = range.operator_name();
    const Traits* traits = nullptr;
    if (name) {
      auto found = known.find(*name);
      if (found == known.end()) {
        const auto schema = range.operator_schema();
        found = known.emplace(*name, schema ? traits_of(*schema) : Traits{}).first;
      }
      traits = &found->second;
      operation->shows_nothing = traits->shows_nothing;
      operation->copies = traits->copies;
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto role =
          traits != nullptr && i < traits->roles.size() ? traits->roles[i] : Role::read;
      if (role != Role::read) operation->written.push_back(inputs[i]);
      if (role == Role::read) operation->inputs.push_back(inputs[i]);
      // Without a schema the operator may overwrite any input.
      if (role == Role::overwritten || traits == nullptr) look_before(inputs[i], *operation);
    }
    place(range, *operation, records);
    return operation;
  }

  void look_before(const c10::IValue& value, Operation& operation) const {
    each_tensor(value, [&](const at::Tensor& tensor) {
      look(tensor, operation.before, operation.before_input);
    });
  }

  void look(const at::Tensor& tensor, Inputs& worst, std::string& name) const {
    auto found = Inputs::finite;
    if (absent(tensor)) {
      found = Inputs::absent;
    } else if (const auto count = count_of(tensor); count.nans > 0) {
      found = Inputs::nan;
    } else if (count.infinities > 0) {
      found = Inputs::infinity;
    }
    if (found == Inputs::finite || worse(worst, found) == worst) return;
    worst = found;
    name = parameter_of(tensor);
  }

  void start_node(const at::RecordFunction& range, Operation& operation, bool around) {
    operation.node = true;
    const auto current = torch::autograd::get_current_node();
    Node node;
    if (current) node = node_of(*current);
    if (!around && std::dynamic_pointer_cast<torch::autograd::AccumulateGrad>(current)) {
      for (const auto& input : range.inputs())
        each_tensor(input, [&](const at::Tensor& gradient) { arrive(gradient, node.parameter); });
    }
    node.depth = running.size();
    node.around = around;
    nodes.push_back(std::move(node));
  }

  // A leaf's gradient is complete. Either an operator has shown its cause, or no operator was seen.
  void arrive(const at::Tensor& gradient, const std::string& parameter) {
    const auto count = count_of(gradient);
    if (anomaly || (count.nans == 0 && count.infinities == 0)) return;
    infinite_gradient = infinite_gradient || count.infinities > 0;
    if (count.nans == 0 && infinity) return;
    Anomaly arrived{.operation = "", .backward = true, .parameter = parameter};
    arrived.order = ++order;
    take(arrived, gradient, count);
    anomaly = std::move(arrived);
  }

  // --- End of an operator ---

  static void take(Anomaly& as, const at::Tensor& tensor, const Count& count) {
    as.sizes = tensor.sizes().vec();
    as.dtype = tensor.scalar_type();
    as.elements = tensor.numel();
    as.nans = count.nans;
    as.infinities = count.infinities;
  }

  void end(const at::RecordFunction& range, at::ObserverContext& context) {
    const Unobserved unobserved;
    try {
      ended(range, static_cast<Operation&>(context));
    } catch (const std::exception&) {
      return;
    }
  }

  void ended(const at::RecordFunction& range, Operation& operation) {
    if (operation.node) {
      if (!nodes.empty()) nodes.pop_back();
      return;
    }
    if (!running.empty()) running.pop_back();
    if (anomaly || operation.shows_nothing) return;
    const auto visit = [&](const at::Tensor& tensor) { look_after(tensor, operation); };
    for (const auto& output : range.outputs()) each_tensor(output, visit);
    if (range.outputs().empty()) {
      for (const auto& output : operation.written) each_tensor(output, visit);
    }
  }

  void look_after(const at::Tensor& tensor, Operation& operation) {
    if (anomaly || !readable(tensor)) return;
    const auto count = count_of(tensor);
    if (count.nans == 0 && (count.infinities == 0 || infinity)) return;
    auto& as = operation.as;
    as.inputs = operation.before;
    as.input = operation.before_input;
    for (const auto& input : operation.inputs) look_at_input(input, as);
    if (count.nans == 0 && as.inputs != Inputs::finite) return;
    // A number that the program gives becomes a tensor of no dimension before it is used.
    const bool copies = operation.copies || (tensor.dim() == 0 && as.operation == "aten::fill_");
    if (copies && as.inputs == Inputs::nan) return;
    take(as, tensor, count);
    (count.nans > 0 ? anomaly : infinity) = as;
  }

  void look_at_input(const c10::IValue& value, Anomaly& as) const {
    each_tensor(value, [&](const at::Tensor& tensor) { look(tensor, as.inputs, as.input); });
    if (!value.isDouble()) return;
    const double number = value.toDouble();
    if (std::isnan(number)) as.inputs = worse(as.inputs, Inputs::nan);
    if (std::isinf(number)) as.inputs = worse(as.inputs, Inputs::infinity);
  }

  // --- The end of backward ---

  void throw_at_end() {
    const auto task = torch::autograd::get_current_graph_task_id();
    if (task == -1 || task == throwing_task) return;
    throwing_task = task;
    torch::autograd::Engine::get_default_engine().queue_callback([weak = self] {
      const auto state = weak.lock();
      if (!state || !state->first()) return;
      throw NotFinite(state->report());
    });
  }

  const std::optional<Anomaly>& first() const {
    return anomaly || !infinite_gradient ? anomaly : infinity;
  }

  std::string report() const {
    const auto& found = first();
    if (!found) return "";
    if (found->inputs != Inputs::infinity || !infinity) return found->text() + ".";
    return fmt::format("{}. The first NaN: {}.", infinity->text(), found->text());
  }

  Options options;
  ParameterNames names;
  std::unordered_map<c10::OperatorName, Traits> known;
  std::vector<Forward> forward;      // by sequence number, ascending
  std::vector<Node> nodes;           // the nodes that run, the innermost last
  std::vector<std::string> running;  // the operators that run, the innermost last
  std::string last_parameter;
  int64_t order = 0;
  std::optional<Anomaly> anomaly;
  std::optional<Anomaly> infinity;
  bool infinite_gradient = false;
  int64_t throwing_task = -1;
  std::weak_ptr<State> self;
  ThreadObserver<State> observer{
      *this,
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION},
      true,
      "A second zero::AnomalyWatch on this thread while another one lives: end that one first, or "
      "ask it."};
};

AnomalyWatch::AnomalyWatch(const NamedTensors& tensors, Options options)
    : state_(std::make_shared<State>(tensors, options)) {
  state_->self = state_;
}

AnomalyWatch::~AnomalyWatch() = default;

const std::optional<Anomaly>& AnomalyWatch::first() const { return state_->first(); }
const std::optional<Anomaly>& AnomalyWatch::first_infinity() const { return state_->infinity; }
std::string AnomalyWatch::report() const { return state_->report(); }

void AnomalyWatch::clear() {
  auto& state = *state_;
  state.anomaly.reset();
  state.infinity.reset();
  state.infinite_gradient = false;
  state.forward.clear();
  state.last_parameter.clear();
  state.order = 0;
}

}  // namespace zero
