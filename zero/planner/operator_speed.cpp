#include "zero/planner/operator_speed.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>

#include "zero/base/error.h"
#include "zero/models/layers/matmul.h"
#include "zero/planner/simulate.h"
#include "zero/planner/value_tensors.h"

namespace zero::plan {
namespace {

constexpr double kUnknown = -1;

void add_key(std::string& key, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    key += "-;";
    return;
  }
  key += fmt::format("{}[{}][{}];", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ","), fmt::join(tensor.strides(), ","));
}

std::string key_of(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> inputs) {
  auto key = c10::toString(op.operator_name()) + " ";
  for (const auto& input : inputs) {
    const bool tensors = input.isTensor() || input.isTensorList() || input.isOptionalTensorList();
    if (tensors) {
      (void)with_tensors(input, [&](const at::Tensor& tensor) {
        add_key(key, tensor);
        return tensor;
      });
      key += '|';
      continue;
    }
    std::ostringstream text;
    text << input;
    key += text.str() + "|";
  }
  return key;
}

// Values that neither overflow nor vanish in any operator: a processor's time does not depend on
// others. Indices are 0, which every table has.
at::Tensor with_values(const at::Tensor& shape) {
  auto tensor = at::empty_strided(shape.sizes(), shape.strides(),
                                  at::TensorOptions(shape.scalar_type()).device(at::kCPU));
  constexpr double kValue = 0.05;
  if (at::isFloatingType(tensor.scalar_type())) {
    // A tensor that was expanded has elements at the same place, which cannot be written at once.
    auto elements = at::empty({0}, tensor.options());
    elements.set_(tensor.storage(), 0,
                  {static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size())}, {1});
    elements.fill_(kValue);
  } else {
    std::fill_n(static_cast<char*>(tensor.storage().mutable_data()), tensor.storage().nbytes(), 0);
  }
  return tensor;
}

// Layers multiply fp32 on some processors by another library than at::mm does (Note [Which library
// multiplies]), which a traced tensor cannot show.
bool multiplied_as_layers_do(const std::string& name, torch::jit::Stack& stack) {
  if (name == "aten::mm" && stack.size() == 2) {
    stack = {product(stack[0].toTensor(), stack[1].toTensor())};
    return true;
  }
  if (name == "aten::addmm" && stack.size() == 5) {
    stack = {product(stack[1].toTensor(), stack[2].toTensor(), stack[0].toTensor())};
    return true;
  }
  return false;
}

/// One thread does this again and again: it runs a call, each time with the next of several sets of
/// inputs. In a step an operator's inputs are not in the nearest caches either, since other
/// operators came between.
class Repeated {
 public:
  explicit Repeated(const OperatorCall& call) : call_(call) {
    constexpr int64_t kFarther = int64_t{16} << 20;  // bytes of all sets
    constexpr int64_t kMost = 32;
    int64_t bytes = 0;
    for (const auto& input : call.inputs) {
      (void)with_tensors(input, [&](const at::Tensor& tensor) {
        bytes += static_cast<int64_t>(tensor.storage().nbytes());
        return tensor;
      });
    }
    const int64_t sets = std::clamp<int64_t>(kFarther / std::max<int64_t>(bytes, 1), 1, kMost);
    for (int64_t set = 0; set < sets; ++set) sets_.push_back(inputs());
  }
  void once() {
    auto stack = sets_[next_];
    next_ = (next_ + 1) % sets_.size();
    if (!multiplied_as_layers_do(call_.op.schema().name(), stack)) call_.op.callBoxed(&stack);
  }

 private:
  torch::jit::Stack inputs() const {
    torch::jit::Stack made;
    for (size_t i = 0; i < call_.inputs.size(); ++i) {
      const auto& argument = call_.op.schema().arguments()[i];
      made.push_back(argument.name() == "device" ? c10::IValue(c10::Device(at::kCPU))
                                                 : with_tensors(call_.inputs[i], with_values));
    }
    return made;
  }

  const OperatorCall& call_;
  std::vector<torch::jit::Stack> sets_;
  size_t next_ = 0;
};

}  // namespace

int64_t OperatorCalls::index(const c10::OperatorHandle& op,
                             c10::ArrayRef<const c10::IValue> inputs) {
  // A storage is memory, which would live as long as the trace.
  if (std::ranges::any_of(inputs, [](const c10::IValue& input) { return input.isStorage(); }))
    return -1;
  auto key = key_of(op, inputs);
  if (const auto found = known_.find(key); found != known_.end()) return found->second;
  OperatorCall call{.key = key, .op = op, .inputs = {}};
  for (const auto& input : inputs) {
    call.inputs.push_back(with_tensors(input, [](const at::Tensor& tensor) {
      return at::empty_strided(tensor.sizes(), tensor.strides(),
                               tensor.options().device(at::kMeta).requires_grad(std::nullopt));
    }));
  }
  all_.push_back(std::move(call));
  return known_[std::move(key)] = static_cast<int64_t>(all_.size()) - 1;
}

double OperatorSpeed::seconds_of(const OperatorCall& call) const {
  try {
    return seconds_as_ranks(
        ranks_,
        [&]() -> Work {
          return [repeated = std::make_shared<Repeated>(call)] { repeated->once(); };
        },
        hosts_);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    return kUnknown;
  }
}

void OperatorSpeed::check_hosts_measure(const OperatorCall& call) const {
  if (!hosts_) return;
  constexpr size_t kExact = size_t{1} << 53;  // whole numbers that a double holds
  const auto all = hosts_(static_cast<double>(std::hash<std::string>()(call.key) % kExact));
  if (std::ranges::adjacent_find(all, std::ranges::not_equal_to()) == all.end()) return;
  throw ConfigError(
      "The hosts would measure different operators, because they have different memory or numbers "
      "of processors. Plan the run from figures: zero plan --hardware.");
}

void OperatorSpeed::measure(Trace& trace, const Device& device, at::ScalarType dtype) {
  // Long operators are large products, which reach what `device` says.
  constexpr double kLongest = 0.25;
  constexpr double kAll = 30;
  if (trace.calls == nullptr) return;
  for (auto& op : trace.operators) {
    if (op.call < 0) continue;
    const auto& call = trace.calls->all()[static_cast<size_t>(op.call)];
    const double modelled =
        operator_seconds({.dtype = op.dtype, .flops = op.flops, .bytes = op.bytes}, device, dtype);
    auto found = known_.find(call.key);
    if (found == known_.end()) {
      if (modelled > kLongest || spent_ > kAll) continue;
      check_hosts_measure(call);
      const auto begin = std::chrono::steady_clock::now();
      found = known_.emplace(call.key, seconds_of(call)).first;
      const double spent =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      // The first host's time counts, so that all hosts stop measuring at the same call.
      spent_ += hosts_ ? hosts_(spent).front() : spent;
    }
    if (found->second < 0) continue;
    op.modelled = modelled;
    op.seconds = found->second;
  }
}

}  // namespace zero::plan
