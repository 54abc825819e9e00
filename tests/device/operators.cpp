#include "tests/device/operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "tests/device/effects.h"
#include "tests/device/machine.h"
#include "tests/device/random.h"

namespace zero::simulated {

namespace {

// A number or an index of the host among the arguments: its value at the launch. As on a GPU, other
// tensors of the host are an error.
at::Tensor host_copy(const at::Tensor& tensor, const std::string& name, bool indexes) {
  TORCH_CHECK(tensor.dim() == 0 || indexes, "simulated device: ", name,
              " is given a tensor of the host of sizes ", tensor.sizes(),
              " beside those of the device. Move it to the device.");
  auto copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// One operator on its way to a stream.
class OperatorLaunch {
 public:
  OperatorLaunch(const c10::OperatorHandle& op, torch::jit::Stack arguments)
      : op_(op),
        name_(toString(op.operator_name())),
        arguments_(std::move(arguments)),
        random_(op, arguments_) {
    for (const auto& result : op.schema().returns()) {
      TORCH_CHECK(result.alias_info() == nullptr || result.alias_info()->isWrite(),
                  "simulated device: ", name_, " is a view and needs a kernel of its own");
    }
    look_at_tensors();
  }

  void run(torch::jit::Stack& results) {
    const c10::DeviceGuard guard(device(index_));
    stream_ = current_actor(index_);
    std::optional<Effect> effect;
    if (!depends_on_data(op_, arguments_) && !random_.hidden()) {
      effect = effect_of(op_, arguments_, !random_.random());
      if (effect) {
        random_.use_copy(arguments_);
      } else {
        random_.restore();
      }
    }
    if (effect) {
      enqueue(*effect, results);
    } else {
      enqueue_and_wait(results);
    }
  }

 private:
  // The device of the operator, and what it writes.
  void look_at_tensors() {
    std::optional<int> index;
    for (const auto& value : arguments_) {  // of an operator that makes a tensor out of nothing
      if (value.isDevice() && value.toDevice().has_index()) index = value.toDevice().index();
    }
    map_tensors(op_.schema(), arguments_,
                [&](const at::Tensor& tensor, bool write, bool /*indexes*/) {
                  if (write) written_.push_back(tensor);
                  if (on_device(tensor)) {
                    TORCH_CHECK(!index || *index == tensor.device().index(),
                                "simulated device: ", name_, " is given tensors of the devices ",
                                *index, " and ", static_cast<int>(tensor.device().index()));
                    index = tensor.device().index();
                  }
                  return tensor;
                });
    index_ = index.value_or(current_device());
  }

  // The arguments as the task sees them: addresses as they are now.
  torch::jit::Stack capture() {
    auto captured = arguments_;
    map_tensors(op_.schema(), captured, [&](const at::Tensor& tensor, bool write, bool indexes) {
      if (on_device(tensor)) {
        ranges_.push_back(range_of(tensor, write));
        return shown_to_tasks(tensor);
      }
      TORCH_CHECK(!write, "simulated device: ", name_, " would write a tensor of the host");
      return host_copy(tensor, name_, indexes);
    });
    for (const size_t i : written_unsaid(op_, arguments_)) {
      if (!arguments_[i].isTensor()) continue;
      const at::Tensor& tensor = arguments_[i].toTensor();
      if (on_device(tensor)) ranges_.push_back(range_of(tensor, true));
    }
    return captured;
  }

  void enqueue(const Effect& effect, torch::jit::Stack& results) {
    for (size_t i = 0; i < written_.size(); ++i) {
      if (effect.written[i] == Geometry::of(written_[i])) continue;
      TORCH_CHECK(on_device(written_[i]), "simulated device: ", name_,
                  " would resize a tensor of the host");
      at::native::resize_(written_[i], effect.written[i].sizes);
    }
    auto captured = capture();
    std::vector<at::Tensor> fresh, places;
    for (const Geometry& g : effect.returned) {
      fresh.push_back(g.defined
                          ? at::empty_strided(g.sizes, g.strides,
                                              at::TensorOptions(g.type).device(device(index_)))
                          : at::Tensor());
      places.push_back(g.defined ? shown_to_tasks(fresh.back()) : at::Tensor());
      if (g.defined) ranges_.push_back(range_of(fresh.back(), true));
    }
    Machine::instance().launch(stream_, name_, ranges_,
                               [op = op_, grad = grad_mode_, captured = std::move(captured),
                                places = std::move(places)]() mutable {
                                 const at::AutoGradMode as_launched(grad);
                                 call_on_cpu(op, captured);
                                 copy_results(op, captured, places);
                               });
    push_results(fresh, results);
  }

  static void copy_results(const c10::OperatorHandle& op, const torch::jit::Stack& computed,
                           const std::vector<at::Tensor>& places) {
    size_t next = 0;
    const auto put = [&](const at::Tensor& tensor) {
      const at::Tensor& place = places[next++];
      if (place.defined()) place.copy_(tensor);
    };
    const auto& returns = op.schema().returns();
    for (size_t i = 0; i < returns.size(); ++i) {
      if (returns[i].alias_info() != nullptr) continue;
      if (computed[i].isTensor()) {
        put(computed[i].toTensor());
      } else {
        for (const at::Tensor& tensor : computed[i].toTensorVector()) put(tensor);
      }
    }
  }

  void push_results(std::vector<at::Tensor>& fresh, torch::jit::Stack& results) {
    size_t next_written = 0, next_fresh = 0;
    for (const auto& result : op_.schema().returns()) {
      if (result.alias_info() != nullptr) {
        results.emplace_back(written_.at(next_written++));
      } else if (result.type()->kind() == c10::TypeKind::TensorType) {
        results.emplace_back(fresh.at(next_fresh++));
      } else {  // a list, which is the only result then
        c10::List<at::Tensor> list;
        while (next_fresh < fresh.size()) list.push_back(fresh[next_fresh++]);
        results.emplace_back(std::move(list));
      }
    }
  }

  // The host must see what comes out.
  void enqueue_and_wait(torch::jit::Stack& results) {
    const auto computed = std::make_shared<torch::jit::Stack>(capture());
    const auto failure = std::make_shared<std::string>();
    auto& machine = Machine::instance();
    machine.launch(stream_, name_, ranges_, [op = op_, grad = grad_mode_, computed, failure] {
      try {
        const at::AutoGradMode as_launched(grad);
        call_on_cpu(op, *computed);
      } catch (const c10::Error& error) {
        *failure = error.what_without_backtrace();
      } catch (const std::exception& error) {
        *failure = error.what();
      }
    });
    machine.host_wait_for_stream(stream_, name_, false);
    TORCH_CHECK(failure->empty(), name_, ": ", *failure);
    const auto& returns = op_.schema().returns();
    size_t next_written = 0;
    for (size_t i = 0; i < returns.size(); ++i) {
      const c10::IValue& value = (*computed)[i];
      if (returns[i].alias_info() != nullptr) {
        results.emplace_back(written_[next_written++]);
      } else if (value.isTensor() && value.toTensor().defined()) {
        results.emplace_back(to_device(value.toTensor()));
      } else {
        TORCH_CHECK(!value.isTensorList(), "simulated device: ", name_,
                    " returns a list whose sizes depend on data");
        results.push_back(value);
      }
    }
  }

  // The result of a task in memory of the host. Reading it is no wait, which would be counted.
  at::Tensor to_device(const at::Tensor& computed) {
    auto result =
        at::empty_strided(computed.sizes(), computed.strides(),
                          at::TensorOptions(computed.scalar_type()).device(device(index_)));
    if (computed.numel() == 0) return result;
    Machine::instance().launch(
        stream_, name_, {range_of(result, true)},
        [place = shown_to_tasks(result), computed] { place.copy_(computed); });
    return result;
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  torch::jit::Stack arguments_;
  RandomArgument random_;
  std::vector<at::Tensor> written_;
  std::vector<Range> ranges_;
  // Some kernels keep more for backward where it is on.
  bool grad_mode_ = at::GradMode::is_enabled();
  int index_ = 0;
  Actor stream_ = 0;
};

}  // namespace

Range range_of(const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0) return {nullptr, 0, write};
  Range range{tensor.const_data_ptr(),
              at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()),
              write};
  // Dimensions from the innermost on: those that are dense make a row, the next may be rows of it.
  std::vector<std::pair<size_t, size_t>> steps;  // of bytes, how many
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) > 0) {
      steps.emplace_back(static_cast<size_t>(tensor.stride(d)) * tensor.itemsize(),
                         static_cast<size_t>(tensor.size(d)));
    }
  }
  std::sort(steps.begin(), steps.end());
  size_t row = tensor.itemsize(), stride = 0, next = 0;
  for (const auto& [step, count] : steps) {
    if (stride == 0 && step == row) {
      row *= count;
    } else if (stride == 0 && step > row) {
      stride = step;
      next = step * count;
    } else if (stride > 0 && step == next) {
      next *= count;
    } else {
      return range;  // more irregular than rows: all the bytes
    }
  }
  if (stride > 0) {
    range.row_bytes = row;
    range.row_stride = stride;
  }
  return range;
}

at::Tensor shown_to_tasks(const at::Tensor& tensor) {
  void* data = nullptr;
  if (tensor.numel() > 0) {
    data = const_cast<void*>(tensor.const_data_ptr());
    TORCH_CHECK(Machine::instance().owns(data),
                "simulated device: a tensor of the device shows no memory of the device");
    data = Memory::backing(data);
  }
  return at::from_blob(data, tensor.sizes(), tensor.strides(),
                       at::TensorOptions(tensor.scalar_type()));
}

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Machine::instance().count_operator();
  const size_t count = op.schema().arguments().size();
  torch::jit::Stack arguments(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  OperatorLaunch(op, std::move(arguments)).run(*stack);
}

}  // namespace zero::simulated
