#include "zero/comm/call_backend.h"

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/reduce_kernels.h"

namespace zero::comm {
namespace {

Collective counted_as(Op op) {
  switch (op) {
    case Op::all_gather:
      return Collective::all_gather;
    case Op::reduce_scatter:
      return Collective::reduce_scatter;
    case Op::all_reduce:
      return Collective::all_reduce;
    case Op::broadcast:
      return Collective::broadcast;
    case Op::all_to_all:
      return Collective::all_to_all;
    default:
      return Collective::control;
  }
}

const std::byte* first_byte(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() > 0 && b.numel() > 0 && first_byte(a) < first_byte(b) + b.nbytes() &&
         first_byte(b) < first_byte(a) + a.nbytes();
}

// Returns true if `part` is slice `rank` of `whole`, or does not touch it.
bool slice_or_apart(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return !overlap(part, whole) ||
         (part.scalar_type() == whole.scalar_type() &&
          first_byte(part) == first_byte(whole) + static_cast<size_t>(rank) * part.nbytes());
}

}  // namespace

void CallBackend::refuse(Op op, const std::string& why) {
  const auto announced = announcements_->take();
  const auto label = announced.label.view();
  throw CommError(fmt::format("{}{} on rank {}: {}", name(op),
                              label.empty() ? "" : fmt::format(" '{}'", label), getRank(), why));
}

void CallBackend::check(const at::Tensor& tensor, const char* what, Op op) {
  if (!tensor.defined()) refuse(op, fmt::format("the {} is an undefined tensor.", what));
  if (!tensor.device().is_cpu()) {
    refuse(op, fmt::format("the {} is on {}; libzero's own groups take CPU tensors.", what,
                           tensor.device().str()));
  }
  if (!tensor.is_contiguous()) {
    refuse(op, fmt::format("the {} is not contiguous; pass a contiguous tensor.", what));
  }
}

void CallBackend::check_sum(const at::Tensor& input, const at::Tensor& output,
                            const c10d::ReduceOp& reduce, Op op) {
  if (reduce.op_ != c10d::ReduceOp::SUM) {
    refuse(op, "only sums are reduced; use ReduceOp::SUM and scale afterwards.");
  }
  if (!can_sum(input.scalar_type(), output.scalar_type())) {
    refuse(op,
           fmt::format("{} cannot be summed into {}; Float, Double, BFloat16, Half, Int, Long and "
                       "Byte can be summed into themselves, BFloat16 and Half into Float too.",
                       c10::toString(input.scalar_type()), c10::toString(output.scalar_type())));
  }
}

template <class CallOptions>
c10::intrusive_ptr<c10d::Work> CallBackend::start(Call call, const CallOptions& options) {
  auto announced = announcements_->take();
  call.timeout = options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
  call.label = announced.label;
  call.wire = std::move(announced.wire);
  call.counted = announced.counted.value_or(counted_as(call.op));
  return issue(std::move(call), options.asyncOp, options.asyncOp && !announced.awaited);
}

c10::intrusive_ptr<c10d::Work> CallBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  constexpr auto op = Op::all_gather;
  check(input, "input", op);
  check(output, "output", op);
  if (input.scalar_type() != output.scalar_type() || output.numel() != input.numel() * getSize()) {
    refuse(op, fmt::format("the output must be {} times the input, of its dtype, but they have {} "
                           "elements of {} and {} of {}.",
                           getSize(), output.numel(), c10::toString(output.scalar_type()),
                           input.numel(), c10::toString(input.scalar_type())));
  }
  if (!slice_or_apart(input, output, getRank())) {
    refuse(op, "the input overlaps the output without being this rank's slice of it.");
  }
  return start({.op = op, .output = output, .input = input}, options);
}

c10::intrusive_ptr<c10d::Work> CallBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  constexpr auto op = Op::reduce_scatter;
  check(input, "input", op);
  check(output, "output", op);
  check_sum(input, output, options.reduceOp, op);
  if (input.numel() != output.numel() * getSize()) {
    refuse(op,
           fmt::format(
               "the input must have {} times the elements of the output, but they have {} and {}.",
               getSize(), input.numel(), output.numel()));
  }
  if (!slice_or_apart(output, input, getRank())) {
    refuse(op, "the output overlaps the input without being this rank's slice of it.");
  }
  return start({.op = op, .output = output, .input = input}, options);
}

c10::intrusive_ptr<c10d::Work> CallBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                      const c10d::AllreduceOptions& options) {
  constexpr auto op = Op::all_reduce;
  if (tensors.size() != 1) refuse(op, fmt::format("takes one tensor, not {}.", tensors.size()));
  check(tensors[0], "tensor", op);
  check_sum(tensors[0], tensors[0], options.reduceOp, op);
  return start({.op = op, .output = tensors[0], .input = tensors[0]}, options);
}

c10::intrusive_ptr<c10d::Work> CallBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                      const c10d::BroadcastOptions& options) {
  constexpr auto op = Op::broadcast;
  if (tensors.size() != 1) refuse(op, fmt::format("takes one tensor, not {}.", tensors.size()));
  check(tensors[0], "tensor", op);
  if (options.rootRank < 0 || options.rootRank >= getSize()) {
    refuse(op, fmt::format("root {} is not one of the {} ranks.", options.rootRank, getSize()));
  }
  return start({.op = op,
                .output = tensors[0],
                .input = tensors[0],
                .root = static_cast<int>(options.rootRank)},
               options);
}

c10::intrusive_ptr<c10d::Work> CallBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_splits,
                                                          std::vector<int64_t>& input_splits,
                                                          const c10d::AllToAllOptions& options) {
  constexpr auto op = Op::all_to_all;
  check(input, "input", op);
  check(output, "output", op);
  if (!output_splits.empty() || !input_splits.empty()) {
    refuse(op, "only equal slices are exchanged; pass no split sizes.");
  }
  if (input.scalar_type() != output.scalar_type() || output.numel() != input.numel() ||
      input.numel() % getSize() != 0) {
    refuse(op, fmt::format("input and output must have one dtype and one number of elements, a "
                           "multiple of {}, but they have {} elements of {} and {} of {}.",
                           getSize(), input.numel(), c10::toString(input.scalar_type()),
                           output.numel(), c10::toString(output.scalar_type())));
  }
  if (overlap(input, output)) refuse(op, "the input overlaps the output.");
  return start({.op = op, .output = output, .input = input}, options);
}

c10::intrusive_ptr<c10d::Work> CallBackend::barrier(const c10d::BarrierOptions& options) {
  return start({.op = Op::barrier}, options);
}

}  // namespace zero::comm
