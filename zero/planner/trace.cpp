#include "zero/planner/trace.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ceil_div.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/base/host_allocator.h"
#include "zero/base/traced.h"
#include "zero/engine/operator_cost.h"
#include "zero/engine/trained_dtype.h"
#include "zero/optim/sweeps.h"
#include "zero/planner/autocast_calls.h"
#include "zero/planner/meta_kernels.h"
#include "zero/planner/operator_speed.h"
#include "zero/planner/value_tensors.h"

namespace zero::plan {
namespace {

constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

using Kind = TraceEvent::Kind;

/// All that one trace writes down.
struct Recording {
  /// A block of memory that lives.
  struct Block {
    int64_t bytes = 0;
    int64_t op = 0;
    std::optional<at::ScalarType> dtype;
  };

  void memory(int64_t bytes) {
    if (!running || bytes == 0) return;
    trace.events.push_back({Kind::memory, bytes, op});
    held += bytes;
    if (held <= trace.peak) return;
    trace.peak = held;
    trace.peak_at = op;
  }
  void add(Kind kind, int64_t value) { trace.events.push_back({kind, value, op}); }
  /// Memory of an operator's own that comes and goes.
  void scratch(int64_t bytes) {
    memory(bytes);
    memory(-bytes);
  }
  int64_t rounded(size_t bytes) const {
    // A CPU's large blocks take whole pages (host_allocator.h), a device's blocks 512 bytes.
    const size_t to = !host ? 512 : bytes >= HostAllocator::kPaged ? 4096 : 1;
    return static_cast<int64_t>((bytes + to - 1) / to * to);
  }
  int64_t index(std::vector<std::string>& list, std::map<std::string, int64_t, std::less<>>& known,
                std::string_view name) {
    const auto found = known.find(name);
    if (found != known.end()) return found->second;
    list.emplace_back(name);
    return known[std::string(name)] = static_cast<int64_t>(list.size()) - 1;
  }

  Trace trace;
  bool host = false;
  bool running = false;                 // a step runs: memory counts
  bool backward = false;                // the step is in backward
  bool uncounted = false;               // what is allocated now is no memory of the step
  int depth = 0;                        // operators under way, each called by the one before
  std::function<void()> rethrow;        // NamedTensors::rethrow
  std::function<std::string()> reason;  // TraceOptions::reason
  int64_t held = 0;
  int64_t op = 0;
  int64_t module = 0;
  std::map<std::string, int64_t, std::less<>> names, modules;
  std::unordered_map<const c10::StorageImpl*, int64_t> parameters;
  std::vector<int64_t> module_of_parameter;
  std::set<Block*> blocks;  // that live, of this step
  // Casts of parameters that autocast keeps for the operators of its scope.
  std::unordered_map<const c10::TensorImpl*, at::Tensor> casts;
  bool casts_dropped = false;  // TraceOptions::casts_dropped
  int nesting = 0;             // scopes of autocast around the step
  std::shared_ptr<OperatorCalls> calls;
  // Note [Kernels of Python]: those of the kernel under way, which count once it has ended.
  std::set<Block*>* of_kernel = nullptr;
  std::unordered_map<c10::OperatorName, bool> python_kernels;
};

thread_local std::shared_ptr<Recording> recording;

c10::DeviceType device_of(const Recording& r) { return r.host ? at::kCPU : at::kCUDA; }

// --- Memory ---

// The memory behind a tensor: its bytes, and the trace that counts them.
struct CountedBlock : Recording::Block {
  std::shared_ptr<Recording> owner;
  static void release(void* context) {
    const std::unique_ptr<CountedBlock> block(static_cast<CountedBlock*>(context));
    auto& of = *block->owner;
    if (of.of_kernel != nullptr && of.of_kernel->erase(block.get()) > 0) return;
    of.blocks.erase(block.get());
    of.memory(-block->bytes);
  }
};

class MetaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device meta(c10::DeviceType::Meta);
    if (!recording || !recording->running || recording->uncounted || bytes == 0)
      return {nullptr, meta};
    auto block = std::make_unique<CountedBlock>();
    block->bytes = recording->rounded(bytes);
    block->op = recording->op;
    block->owner = recording;
    if (recording->of_kernel != nullptr) {
      recording->of_kernel->insert(block.get());
    } else {
      recording->memory(block->bytes);
      recording->blocks.insert(block.get());
    }
    return {nullptr, block.release(), &CountedBlock::release, meta};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {}
};

// --- Operators ---

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// FLOPs of operators of backward that operator_cost does not know.
double backward_flops(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  const auto tensor = [&](size_t i) { return inputs[i].toTensor(); };
  if (name.find("dot_product") != std::string_view::npos) {
    // Five products where forward has two.
    const auto cost =
        operator_cost("scaled_dot_product_attention", {inputs[1], inputs[2], inputs[3]});
    return cost ? 2.5 * static_cast<double>(cost->total_flops(0)) : 0;
  }
  if (name.find("convolution") == std::string_view::npos) return 0;
  const auto weight = tensor(2);
  const int64_t met = weight.size(0) > 0 ? weight.numel() / weight.size(0) : 0;
  return 4.0 * static_cast<double>(tensor(0).numel()) * static_cast<double>(met);
}

// Attention's kernel of the traced device, without the scores; false if it has none for these
// inputs, and computes them.
bool fused_attention(torch::jit::Stack& stack) {
  const size_t first = stack.size() - 8;
  const auto queries = stack[first].toTensor();
  const auto keys = stack[first + 1].toTensor();  // of as many heads or fewer
  const auto values = stack[first + 2].toTensor();
  const auto mask = stack[first + 3].toOptional<at::Tensor>();
  const double dropout = stack[first + 4].toDouble();
  const bool causal = stack[first + 5].toBool();
  const auto scale = stack[first + 6].toOptional<double>();
  const bool masks = mask && mask->defined();
  if (queries.dim() != 4 || (recording->host && dropout > 0)) return false;
  if (masks && mask->requires_grad()) return false;
  if (recording->host) {
    // Each thread has tiles of scores and a row of sums.
    const int64_t rows = queries.size(2) >= 768 ? 256 : queries.size(2) >= 192 ? 64 : 32;
    const int64_t columns = std::min<int64_t>(512, keys.size(2));
    recording->scratch(at::get_num_threads() * rows * (columns + queries.size(3) + 2) * 4);
  }
  auto result = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
      queries, keys, values, dropout, causal, mask, scale));
  torch::jit::drop(stack, 8);
  torch::jit::push(stack, std::move(result));
  return true;
}

// Returns whether an operator reads or writes elements: views and new memory do not.
bool moves(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  if (name.starts_with("aten::empty") || name.starts_with("aten::new_empty") ||
      name == "aten::reshape" || name == "aten::contiguous")
    return false;
  return std::ranges::none_of(schema.returns(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

struct Unbounded {
  std::string_view name;
  const char* why;
};
// Their results have as many elements as values decide, at most those of the input.
constexpr std::array kUnbounded{Unbounded{"aten::masked_select", "its size depends on values"},
                                Unbounded{"aten::nonzero", "its size depends on values"}};

bool bounded(std::string_view name, torch::jit::Stack& stack) {
  if (name == "aten::masked_select") {
    const auto self = stack[stack.size() - 2].toTensor();
    torch::jit::drop(stack, 2);
    torch::jit::push(stack, self.reshape({-1}).clone());
    return true;
  }
  if (name == "aten::nonzero") {
    const auto self = torch::jit::pop(stack).toTensor();
    torch::jit::push(stack, at::empty({self.numel(), self.dim()}, self.options().dtype(at::kLong)));
    return true;
  }
  return false;
}

void note_bound(Recording& r, std::string_view name, int64_t bytes, const char* why) {
  auto& bounds = r.trace.bounds;
  const auto& module = r.trace.modules[static_cast<size_t>(r.module)];
  const auto same = std::ranges::find_if(
      bounds, [&](const Bound& b) { return b.name == name && b.module == module; });
  if (same == bounds.end()) bounds.push_back({std::string(name), module, bytes, why});
}

// Returns the most bytes that a kernel of recurrent layers keeps for backward besides its results:
// for each layer and direction its four gates, states and states of cells, and a page at the end of
// each. oneDNN keeps 62 bytes an element of a result in fp32, and 44 in bf16 (measured, with 256
// and 128 elements of a state).
int64_t recurrent_workspace(c10::ArrayRef<const c10::IValue> inputs) {
  if (inputs.size() != 9 || !inputs[0].isTensor()) return 0;  // packed sequences
  const auto x = inputs[0].toTensor();
  const auto states = inputs[1].isTensorList() ? inputs[1].toTensorList().get(0) : at::Tensor();
  const auto state = inputs[1].isTensor() ? inputs[1].toTensor() : states;
  if (!state.defined()) return 0;
  constexpr int64_t kBytes = 64;
  constexpr int64_t kPages = 32768;
  const int64_t batch = state.dim() == 3 ? state.size(1) : 1;
  const int64_t rows = x.numel() / x.size(-1) + batch;
  return state.size(0) * (kBytes * rows * at::round_up<int64_t>(state.size(-1), 16) + kPages);
}

// Returns the bytes of a convolution's operands, which with those of its results are the most that
// it takes besides. On a CPU oneDNN copies operands to layouts of its own; in fp32 that was not
// seen to raise the most. The workspaces of a device's kernels follow from no size.
struct ConvolutionBound {
  int64_t bytes = 0;
  const char* why = nullptr;  ///< null: it takes nothing
};
ConvolutionBound convolution_workspace(std::string_view name, bool host,
                                       c10::ArrayRef<const c10::IValue> inputs) {
  if (!name.starts_with("aten::conv") && !name.starts_with("aten::_conv")) return {};
  if (!host)
    return {.why = "its workspace depends on the kernel that the device's library chooses"};
  int64_t bytes = 0;
  bool narrow = false;
  for (const auto& input : inputs) {
    if (!input.isTensor() || !input.toTensor().defined()) continue;
    bytes += static_cast<int64_t>(input.toTensor().nbytes());
    narrow = narrow || input.toTensor().element_size() == 2;
  }
  if (!narrow) return {};
  return {.bytes = bytes, .why = "the kernel copies operands to other layouts"};
}

// --- Values ---

// Returns whether an operator reads values, which tensors that were made before a trace have.
bool reads_values(std::string_view name) {
  constexpr std::array<std::string_view, 4> kReaders{"aten::_local_scalar_dense", "aten::item",
                                                     "aten::is_nonzero", "aten::equal"};
  return std::ranges::find(kReaders, name) != kReaders.end();
}

// Returns whether the operator makes memory that Python's torch fills from numbers without another
// operator (torch.tensor), in a scope in which it keeps the modes of others away.
bool filled_by_python(std::string_view name) {
  return name == "aten::empty" && c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Fake) &&
         c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::DeferredInit);
}

bool has_values(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() && tensor.layout() == at::kStrided &&
         !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// Returns a tensor on meta like one that has values. `keys` are those of the operator that gets it.
at::Tensor without_values(const at::Tensor& tensor, c10::DispatchKeySet& keys) {
  keys = keys.remove_backend(tensor.key_set().highestBackendKey()) |
         c10::DispatchKeySet(c10::BackendComponent::MetaBit);
  const c10::impl::ExcludeDispatchKeyGuard once(kMode);
  const bool counted = recording && !std::exchange(recording->uncounted, true);
  auto like = at::empty_strided(tensor.sizes(), tensor.strides(),
                                tensor.options().device(c10::DeviceType::Meta));
  if (counted) recording->uncounted = false;
  if (tensor.requires_grad() && tensor.is_leaf()) like.set_requires_grad(true);
  return like;
}

// Tensors of an operator that were made before the trace give way to such on meta.
void take_values_away(torch::jit::Stack& stack, size_t first, c10::DispatchKeySet& keys) {
  for (size_t i = first; i < stack.size(); ++i) {
    auto& value = stack[i];
    bool any = false;
    for_each_tensor(value, [&](const at::Tensor& tensor) { any = any || has_values(tensor); });
    if (!any) continue;
    const auto of = [&](const at::Tensor& tensor) {
      return has_values(tensor) ? without_values(tensor, keys) : tensor;
    };
    value = with_tensors(value, of);
  }
}

// Note [Kernels of Python]
// Python's torch has kernels for meta that are written in Python, and come in place of those of
// C++. They find the shape of a result by other operators, whose memory no device takes. So memory
// that such a kernel gives back before it ends does not count. Composite operators call them too;
// in such a process a trace goes on inside of operators, where it looks for them alone.

bool has_kernels_of_python() {
  static const bool there = [] {
    const auto op = c10::Dispatcher::singleton().findSchema({"aten::native_layer_norm", ""});
    return op && op->hasKernelForDispatchKey(c10::DispatchKey::Meta);
  }();
  return there;
}

bool is_of_python(Recording& r, const c10::OperatorHandle& op) {
  const auto [found, is_new] = r.python_kernels.try_emplace(op.operator_name(), false);
  if (!is_new) return found->second;
  // A kernel of Python says that it was registered at a line of a file of Python's, or of none.
  const auto table = "\n" + op.dumpComputedTable();
  const auto line = table.find("\nMeta: ");
  if (line == std::string::npos) return false;
  const auto row = std::string_view(table).substr(line + 1, table.find('\n', line + 1) - line - 1);
  found->second =
      row.find("/dev/null") != std::string_view::npos || row.find(".py:") != std::string_view::npos;
  return found->second;
}

// While it lives, memory counts that is still there at its end.
class KernelOfPython {
 public:
  explicit KernelOfPython(Recording& r) : r_(r) { r_.of_kernel = &made_; }
  ~KernelOfPython() {
    r_.of_kernel = nullptr;
    for (auto* block : made_) {
      r_.memory(block->bytes);
      r_.blocks.insert(block);
    }
  }
  KernelOfPython(const KernelOfPython&) = delete;
  KernelOfPython& operator=(const KernelOfPython&) = delete;

 private:
  Recording& r_;
  std::set<Recording::Block*> made_;
};

// Calls the operator's own kernels.
void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Autocast casts inside of composite operators, too.
  const bool goes_on =
      recording && recording->running &&
      (has_kernels_of_python() || at::autocast::is_autocast_enabled(device_of(*recording)));
  if (!goes_on) {
    const c10::impl::ExcludeDispatchKeyGuard once(kMode);
    return op.callBoxed(stack);
  }
  auto& r = *recording;
  if (is_of_python(r, op)) {
    const c10::impl::ExcludeDispatchKeyGuard once(kMode);
    const KernelOfPython kernel(r);
    return op.callBoxed(stack);
  }
  struct Depth {
    explicit Depth(int& depth) : depth(depth) { ++depth; }
    ~Depth() { --depth; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
    int& depth;
  };
  const Depth inside(r.depth);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kMode), stack);
}

// Computes an operator whose memory on the traced device is not that of its kernels for meta.
bool computed_here(Recording& r, std::string_view name, torch::jit::Stack& stack) {
  const bool attention = name == "aten::scaled_dot_product_attention";
  if (!attention && std::ranges::find(kUnbounded, name, &Unbounded::name) == kUnbounded.end())
    return false;
  const c10::impl::ExcludeDispatchKeyGuard once(kMode);
  std::optional<KernelOfPython> kernel;
  if (has_kernels_of_python()) kernel.emplace(r);
  return attention ? fused_attention(stack) : bounded(name, stack);
}

// A tensor that `resize_` makes larger has other memory then, which the kernel for meta leaves out.
// `before` are the bytes of its storage.
void grow(const at::Tensor& tensor, size_t before) {
  const auto& storage = tensor.storage();
  if (storage.nbytes() > before) {
    storage.set_data_ptr_noswap(
        c10::GetAllocator(c10::DeviceType::Meta)->allocate(storage.nbytes()));
  }
}

// Throws an Error, or what the program's language knows in its place.
[[noreturn]] void refuse(const Recording& r, const std::string& message) {
  try {
    throw Error(message);
  } catch (const Error&) {
    if (r.rethrow) r.rethrow();
    throw;
  }
}

// --- Autocast ---

// Casts a tensor as autocast does: once in its outermost scope, if it is a leaf that is trained.
at::Tensor autocast_to(Recording& r, const at::Tensor& tensor, at::ScalarType dtype,
                       at::ScalarType lower) {
  if (tensor.scalar_type() == dtype) return tensor;
  r.trace.casts_parameters |= r.parameters.contains(storage_of(tensor));
  if (r.depth > 0 && dtype == lower) r.trace.operators[static_cast<size_t>(r.op)].dtype = dtype;
  const bool keeps = !r.casts_dropped && dtype == lower && tensor.scalar_type() == at::kFloat &&
                     tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view() &&
                     at::autocast::is_autocast_cache_enabled();
  if (!keeps) return tensor.to(dtype);
  const auto* key = tensor.unsafeGetTensorImpl();
  if (const auto found = r.casts.find(key); found != r.casts.end()) return found->second;
  auto cast = tensor.to(dtype);
  r.casts.emplace(key, cast);
  return cast;
}

int autocast_nesting() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

// Ends with autocast's outermost scope in the step, as torch.autocast does.
void drop_casts(Recording& r) {
  if (!r.casts.empty() && autocast_nesting() <= r.nesting) r.casts.clear();
}

void run_traced(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Runs an operator as autocast of the traced device calls it.
void run_cast(Recording& r, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
              torch::jit::Stack* stack) {
  const auto device = device_of(r);
  const auto lower = at::autocast::get_autocast_dtype(device);
  const auto count = op.schema().arguments().size();
  auto called = op;
  std::vector<c10::IValue> inputs;
  const c10::impl::ExcludeDispatchKeyGuard inside(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  try {
    const AutocastCall asked(op, torch::jit::last(*stack, count), device);
    called = asked.op();
    for (const auto& input : asked.inputs()) {
      inputs.push_back(with_tensors(input, [&](const at::Tensor& tensor) {
        const auto* original = asked.original(tensor);
        return original == nullptr ? tensor
                                   : autocast_to(r, *original, tensor.scalar_type(), lower);
      }));
    }
  } catch (const std::exception& error) {
    const std::string reason = error.what();
    refuse(r, fmt::format("The operator {} cannot be traced under autocast: {}", op.schema().name(),
                          reason.substr(0, reason.find('\n'))));
  }
  torch::jit::drop(*stack, count);
  for (auto& input : inputs) stack->push_back(std::move(input));
  run_traced(called, keys, stack);
}

void run_traced(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (AutocastCall::asks()) return AutocastCall::answer(op, stack);
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  if (filled_by_python(name)) {
    const c10::impl::ExcludeDispatchKeyGuard once(kMode);
    return op.callBoxed(stack);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "device") (*stack)[first + i] = c10::Device(c10::DeviceType::Meta);
  }
  if (!reads_values(name)) take_values_away(*stack, first, keys);
  if (!recording || !recording->running) return call(op, keys, stack);
  auto& r = *recording;
  drop_casts(r);
  if (autocast_casts(op, device_of(r))) return run_cast(r, op, keys, stack);
  if (r.depth > 0) return call(op, keys, stack);
  const c10::ArrayRef<const c10::IValue> inputs(stack->data() + first, arguments.size());
  TracedOperator traced{.name = r.index(r.trace.names, r.names, name), .backward = r.backward};
  r.op = static_cast<int64_t>(r.trace.operators.size());
  for (const auto& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      traced.bytes += static_cast<double>(tensor.nbytes());
      if (traced.dtype == at::ScalarType::Undefined && tensor.is_floating_point())
        traced.dtype = tensor.scalar_type();
      const auto found = r.parameters.find(storage_of(tensor));
      if (found == r.parameters.end()) return;
      r.add(Kind::use, found->second);
      r.module = r.module_of_parameter[static_cast<size_t>(found->second)];
    });
  }
  traced.module = r.module;
  traced.attention = name.find("dot_product") != std::string::npos;
  if (r.calls != nullptr && !reads_values(name)) {
    const c10::impl::ExcludeDispatchKeyGuard once(kMode);
    r.uncounted = true;
    traced.call = r.calls->index(op, inputs);
    r.uncounted = false;
  }
  const auto cost = operator_cost(name, inputs);
  if (!cost && name.find("_backward") != std::string::npos)
    traced.flops = backward_flops(name, inputs);
  r.trace.operators.push_back(traced);
  const auto* unbounded = std::ranges::find(kUnbounded, name, &Unbounded::name);
  if (unbounded != kUnbounded.end()) note_bound(r, name, 0, unbounded->why);
  bool done = false;
  const bool recurrent = name == "aten::lstm" || name == "aten::gru";
  const int64_t workspace = recurrent ? recurrent_workspace(inputs) : 0;
  const auto convolution = convolution_workspace(name, r.host, inputs);
  const bool resizes = name == "aten::resize_";
  const size_t bytes_before = resizes ? inputs[0].toTensor().storage().nbytes() : 0;
  try {
    done = computed_here(r, name, *stack);
    if (!done) call(op, keys, stack);
  } catch (const Error&) {
    if (r.rethrow) r.rethrow();
    throw;
  } catch (const std::exception& error) {
    std::string reason = r.reason ? r.reason() : std::string(error.what());
    reason = reason.substr(0, reason.find('\n'));
    if (!reason.ends_with('.')) reason += '.';
    const auto& module = r.trace.modules[static_cast<size_t>(r.module)];
    refuse(r,
           fmt::format(
               "The operator {} cannot be traced without values{}: {} Give the planner a module "
               "whose forward pass does not read values, or measure a real step of it "
               "(memory_budget).",
               name, module.empty() ? "" : fmt::format(" (near the module '{}')", module), reason));
  }
  if (resizes) grow(stack->back().toTensor(), bytes_before);
  int64_t elements = 0;
  double written = 0;
  const size_t results = done ? 1 : schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      elements = std::max(elements, tensor.numel());
      written += static_cast<double>(tensor.nbytes());
      const auto* storage = storage_of(tensor);
      if (storage == nullptr || storage->data_ptr().get_deleter() != &CountedBlock::release) return;
      auto& block = *static_cast<CountedBlock*>(storage->data_ptr().get_context());
      if (!block.dtype) block.dtype = tensor.scalar_type();
    });
  }
  auto& written_down = r.trace.operators[static_cast<size_t>(r.op)];
  written_down.bytes = moves(schema) ? written_down.bytes + written : 0;
  if (cost) written_down.flops = static_cast<double>(cost->total_flops(elements));
  if (convolution.why != nullptr) {
    const auto results_too = convolution.bytes > 0 ? static_cast<int64_t>(written) : 0;
    note_bound(r, name, convolution.bytes + results_too, convolution.why);
  }
  if (recurrent) {
    note_bound(r, name, workspace, "the device's kernel keeps a workspace for backward");
  }
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    (void)has_kernels_of_python();  // before there are others
    static MetaAllocator allocator;
    constexpr uint8_t kPriority = 100;
    c10::SetAllocator(c10::DeviceType::Meta, &allocator, kPriority);
    // Kept for the life of the process, as a registration at its start would be.
    static auto* const library =
        new torch::Library(torch::Library::IMPL, "_", kMode,  // NOLINT: never freed
                           __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&run_traced>());
    add_meta_kernels();
  });
}

// --- Gradients ---

// Takes the gradient of a parameter as an engine does.
class Hook final : public torch::autograd::PostAccumulateGradHook, public GradientPlace {
 public:
  Hook(std::shared_ptr<Recording> r, int64_t parameter, const at::Tensor& shape, bool apart)
      : recording_(std::move(r)),
        parameter_(parameter),
        shape_(shape.sizes().vec()),
        strides_(shape.strides().vec()),
        options_(shape.options()),
        apart_(apart) {}
  void operator()(const torch::autograd::Variable& variable) override {
    recording_->add(Kind::arrival, parameter_);
    variable.mutable_grad() = at::Tensor();
  }
  at::Tensor place() override {
    if (apart_ || std::exchange(given_, true)) return {};
    recording_->add(Kind::place, parameter_);
    recording_->uncounted = true;
    auto place = at::empty_strided(shape_, strides_, options_.requires_grad(std::nullopt));
    recording_->uncounted = false;
    return place;
  }

 private:
  std::shared_ptr<Recording> recording_;
  int64_t parameter_;
  std::vector<int64_t> shape_, strides_;
  at::TensorOptions options_;
  bool apart_;
  bool given_ = false;
};

std::string module_of(const std::string& name) {
  const auto dot = name.rfind('.');
  return dot == std::string::npos ? std::string() : name.substr(0, dot);
}

std::vector<KeptBytes> kept_of(const Recording& r) {
  std::vector<const Recording::Block*> blocks(r.blocks.begin(), r.blocks.end());
  std::ranges::stable_sort(blocks, {}, &Recording::Block::op);
  std::vector<KeptBytes> kept;
  for (const auto* block : blocks) {
    const auto& module = r.trace.module_of(block->op);
    const auto dtype = block->dtype.value_or(at::ScalarType::Undefined);
    const auto same = std::ranges::find_if(
        kept, [&](const KeptBytes& k) { return k.module == module && k.dtype == dtype; });
    if (same != kept.end()) {
      same->bytes += block->bytes;
    } else {
      kept.push_back({module, dtype, block->bytes});
    }
  }
  return kept;
}

}  // namespace

int64_t Trace::parameters() const {
  int64_t sum = 0;
  for (const auto& parameter : model.parameters) sum += parameter.numel();
  return sum;
}
double Trace::flops() const {
  double sum = 0;
  for (const auto& op : operators) sum += op.flops;
  return sum;
}

struct Tracing::State {
  explicit State(const TraceOptions& given) : options(given) {
    if (recording) throw Error("A trace is under way on this thread; wait until it has ended.");
    install();
    recording = std::make_shared<Recording>();
    recording->host = options.host;
    recording->casts_dropped = options.casts_dropped;
    recording->reason = options.reason;
    recording->index(recording->trace.modules, recording->modules, "");
    if (options.host) {
      recording->calls = std::make_shared<OperatorCalls>();
      recording->trace.calls = recording->calls;
    }
    as.emplace(device_of(*recording));
    mode.emplace(kMode);
  }
  ~State() {
    recording->running = false;
    recording->casts.clear();
    recording.reset();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  TraceOptions options;
  std::optional<TracedAs> as;
  std::optional<c10::impl::IncludeDispatchKeyGuard> mode;
};

Tracing::Tracing(const TraceOptions& options) : state_(std::make_unique<State>(options)) {}
Tracing::~Tracing() = default;

void Tracing::begin(const NamedTensors& tensors) {
  auto& r = *recording;
  const auto& options = state_->options;
  r.rethrow = tensors.rethrow;
  std::set<std::string> fp32;
  for (const auto& [name, buffer] : tensors.buffers) {
    if (!buffer.defined()) continue;
    r.trace.buffers += static_cast<int64_t>(buffer.nbytes());
    if (name.ends_with("running_mean")) fp32.insert(module_of(name));
  }
  for (const auto& [name, tensor] : tensors.parameters) {
    if (!tensor.defined() || r.parameters.contains(storage_of(tensor))) continue;
    if (!tensor.is_meta()) {
      throw ConfigError(fmt::format(
          "Parameter '{}' of a traced module is on {}. Build the module in the function that the "
          "trace is given, so that it has no memory.",
          name, tensor.device().str()));
    }
    const auto index = static_cast<int64_t>(r.trace.model.parameters.size());
    const bool stays = fp32.contains(module_of(name));
    const auto given = tensor.scalar_type();
    check_trained_dtype(name, given);
    auto parameter = tensor;
    if (given == at::kFloat && !stays && options.dtype != at::kFloat)
      parameter.set_data(tensor.detach().to(options.dtype));
    r.parameters[storage_of(parameter)] = index;
    r.module_of_parameter.push_back(r.index(r.trace.modules, r.modules, module_of(name)));
    r.trace.model.parameters.push_back(
        {.name = name,
         .sizes = tensor.sizes().vec(),
         .strides = tensor.strides().vec(),
         .dtype = given,
         .trainable = tensor.requires_grad(),
         .stays_fp32 = stays,
         .optimizer = optim::optimizer_for(options.optimizer, name, tensor.dim())});
    if (!tensor.requires_grad()) continue;
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter, std::make_unique<Hook>(recording, index, parameter, options.gradients_apart));
  }
  r.trace.model.own_memory = !options.host;
}

Trace Tracing::run(const std::function<at::Tensor()>& loss) {
  auto& r = *recording;
  const Autocast none(std::nullopt, device_of(r));  // the caller's scopes cast nothing
  r.nesting = autocast_nesting();
  r.running = true;
  {
    auto value = [&] {
      const Autocast casts(state_->options.autocast, device_of(r));
      return loss();
    }();
    drop_casts(r);
    if (!value.defined() || value.numel() != 1 || !value.requires_grad()) {
      throw ConfigError(fmt::format(
          "The loss of the traced module {}; it must be one number that depends on a parameter "
          "which is trained.",
          !value.defined()     ? "is no tensor"
          : value.numel() != 1 ? fmt::format("has {} elements", value.numel())
                               : std::string("depends on no parameter that is trained")));
    }
    r.trace.kept = kept_of(r);
    r.add(Kind::loss, 0);
    r.backward = true;
    value.backward();
  }
  r.running = false;
  return std::move(r.trace);
}

Trace trace(const LanguageModelConfig& model, int64_t batch, int64_t sequence, int64_t recompute,
            const TraceOptions& options) {
  Tracing tracing(options);
  const auto built = model.build();
  built->recompute({.every = recompute});
  built->module().train();
  tracing.begin(named_tensors(built->module()));
  const auto tokens = at::zeros({batch, sequence}, at::TensorOptions(at::kLong));
  const auto targets = model.head() == Head::classes ? tokens.select(1, 0) : tokens;
  auto traced = tracing.run([&] { return built->loss(tokens, targets); });
  const bool tied = !built->tied_names().empty();
  if (!options.host || (tied && model.head() != Head::next_token)) return traced;
  const auto& parameters = traced.model.parameters;
  const auto found = std::ranges::find(parameters, built->embedding(), &ParameterShape::name);
  if (found != parameters.end() && found->trainable) {
    traced.look_up = {.parameter = found - parameters.begin(),
                      .use = tied ? LookUpUse::tied : LookUpUse::alone,
                      .rows = batch * sequence,
                      .columns = found->sizes.back()};
  }
  return traced;
}

}  // namespace zero::plan
