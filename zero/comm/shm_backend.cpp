#include "zero/comm/shm_backend.h"

#include <fmt/format.h>

#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/memory_block.h"
#include "zero/comm/reduce_kernels.h"
#include "zero/comm/shm_window.h"

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

// Whether `part` is slice `rank` of `whole`, or does not touch it.
bool slice_or_apart(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return !overlap(part, whole) ||
         (part.scalar_type() == whole.scalar_type() &&
          first_byte(part) == first_byte(whole) + static_cast<size_t>(rank) * part.nbytes());
}

}  // namespace

ShmBackend::ShmBackend(Meeting meeting, std::chrono::milliseconds timeout, const Accounts& accounts)
    : c10d::Backend(meeting.peers->rank(), meeting.peers->size()),
      peers_(std::move(meeting.peers)),
      health_(std::make_shared<Health>(peers_)),
      arena_(std::make_shared<Arena>(std::move(meeting.mapping), getRank())),
      accounts_(accounts),
      timeout_(timeout),
      collectives_(peers_, arena_, accounts.ledger, accounts.traffic),
      queue_(std::make_shared<CallQueue>([this](Call& call) { return run(call); })) {}

ShmBackend::~ShmBackend() {
  if (!owner_.here()) {  // a forked child, without the queue's thread, which it would wait for
    (void)std::make_unique<std::shared_ptr<CallQueue>>(std::move(queue_)).release();
    return;
  }
  // While an exception passes, what is still queued would wait for peers that this rank is about to
  // leave.
  if (std::uncaught_exceptions() > 0) health_->abandon("it left because of an exception");
  queue_->close();
  peers_->post_left();
}

c10::intrusive_ptr<IssuedCall> ShmBackend::issue(Call call, const Announcement& announced,
                                                 bool asynchronous,
                                                 std::chrono::milliseconds timeout) {
  call.timeout = timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
  call.label = announced.label;
  call.counted = announced.counted.value_or(counted_as(call.op));
  health_->check();
  auto issued = c10::make_intrusive<IssuedCall>(std::move(call), queue_);
  queue_->push(issued, asynchronous && !announced.awaited);
  if (!asynchronous) issued->wait(kNoTimeout);
  return issued;
}

std::exception_ptr ShmBackend::run(Call& call) noexcept {
  try {
    health_->check();
    collectives_.run(call);
    return nullptr;
  } catch (...) {
    auto error = std::current_exception();
    health_->fail(error);
    return error;
  }
}

void ShmBackend::refuse(Op op, const std::string& why) {
  const auto announced = announcements_->take();
  const auto label = announced.label.view();
  throw CommError(fmt::format("{}{} on rank {}: {}", name(op),
                              label.empty() ? "" : fmt::format(" '{}'", label), getRank(), why));
}

void ShmBackend::check(const at::Tensor& tensor, const char* what, Op op) {
  if (!tensor.defined()) refuse(op, fmt::format("the {} is an undefined tensor.", what));
  if (!tensor.device().is_cpu()) {
    refuse(op, fmt::format("the {} is on {}; the shared-memory group takes CPU tensors.", what,
                           tensor.device().str()));
  }
  if (!tensor.is_contiguous()) {
    refuse(op, fmt::format("the {} is not contiguous; pass a contiguous tensor.", what));
  }
}

void ShmBackend::check_sum(const at::Tensor& input, const at::Tensor& output,
                           const c10d::ReduceOp& reduce, Op op) {
  if (reduce.op_ != c10d::ReduceOp::SUM) {
    refuse(op, "only sums are reduced; use ReduceOp::SUM and scale afterwards.");
  }
  if (!can_sum(input.scalar_type(), output.scalar_type())) {
    refuse(op,
           fmt::format("{} cannot be summed into {}; Float, Double, BFloat16, Half, Int, Long and "
                       "Byte can be summed "
                       "into themselves, BFloat16 and Half into Float too.",
                       c10::toString(input.scalar_type()), c10::toString(output.scalar_type())));
  }
}

c10::intrusive_ptr<c10d::Work> ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
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
  Call call;
  call.op = op;
  call.output = output;
  call.input = input;
  return issue(std::move(call), announcements_->take(), options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::_reduce_scatter_base(
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
  Call call;
  call.op = op;
  call.output = output;
  call.input = input;
  return issue(std::move(call), announcements_->take(), options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceOptions& options) {
  constexpr auto op = Op::all_reduce;
  if (tensors.size() != 1) refuse(op, fmt::format("takes one tensor, not {}.", tensors.size()));
  check(tensors[0], "tensor", op);
  check_sum(tensors[0], tensors[0], options.reduceOp, op);
  Call call;
  call.op = op;
  call.output = tensors[0];
  call.input = tensors[0];
  return issue(std::move(call), announcements_->take(), options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                     const c10d::BroadcastOptions& options) {
  constexpr auto op = Op::broadcast;
  if (tensors.size() != 1) refuse(op, fmt::format("takes one tensor, not {}.", tensors.size()));
  check(tensors[0], "tensor", op);
  if (options.rootRank < 0 || options.rootRank >= getSize()) {
    refuse(op, fmt::format("root {} is not one of the {} ranks.", options.rootRank, getSize()));
  }
  Call call;
  call.op = op;
  call.output = tensors[0];
  call.input = tensors[0];
  call.root = static_cast<int>(options.rootRank);
  return issue(std::move(call), announcements_->take(), options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
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
                           "multiple of {}, but they have "
                           "{} elements of {} and {} of {}.",
                           getSize(), input.numel(), c10::toString(input.scalar_type()),
                           output.numel(), c10::toString(output.scalar_type())));
  }
  if (overlap(input, output)) refuse(op, "the input overlaps the output.");
  Call call;
  call.op = op;
  call.output = output;
  call.input = input;
  return issue(std::move(call), announcements_->take(), options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::barrier(const c10d::BarrierOptions& options) {
  Call call;
  call.op = Op::barrier;
  return issue(std::move(call), announcements_->take(), options.asyncOp, options.timeout);
}

std::unique_ptr<Window> ShmBackend::window(int64_t bytes, int64_t slots, Category category) {
  if (bytes % getSize() != 0) {
    throw CommError(fmt::format("A window of {} bytes cannot be shared equally by {} ranks.", bytes,
                                getSize()));
  }
  const ShmWindow::Shape shape{bytes, slots};
  Call call;
  call.op = Op::window;
  call.window_bytes = bytes;
  call.window_slots = slots;
  for (int r = 0; r < getSize(); ++r) call.window_block_bytes.push_back(shape.block_bytes(r));
  // What is announced is another thread's collective.
  const auto issued = issue(std::move(call), {}, false, c10d::kUnsetTimeout);
  auto& done = issued->call();
  return std::make_unique<ShmWindow>(
      peers_, health_, arena_->mapping(), std::move(done.window_block),
      std::move(done.window_offsets), shape,
      std::array{Charge(accounts_.ledger, category, bytes / getSize()),
                 Charge(accounts_.ledger, Category::communication, shape.epochs_bytes())},
      timeout_, accounts_.clock);
}

namespace {

class ArenaMemory final : public Memory {
 public:
  ArenaMemory(std::shared_ptr<Arena> arena, std::shared_ptr<Ledger> ledger)
      : arena_(std::move(arena)), ledger_(std::move(ledger)) {}
  at::Tensor empty(int64_t numel, at::ScalarType dtype, Category category) override {
    return shared_tensor(arena_, numel, dtype, ledger_, category);
  }

 private:
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Ledger> ledger_;
};

class ShmWindows final : public Windows {
 public:
  explicit ShmWindows(c10::intrusive_ptr<ShmBackend> backend) : backend_(std::move(backend)) {}
  std::unique_ptr<Window> make(int64_t bytes, int64_t slots, Category category) override {
    return backend_->window(bytes, slots, category);
  }

 private:
  c10::intrusive_ptr<ShmBackend> backend_;
};

}  // namespace

Transport shared_memory_transport(Meeting meeting, std::chrono::milliseconds timeout,
                                  const Accounts& accounts) {
  const auto backend = c10::make_intrusive<ShmBackend>(std::move(meeting), timeout, accounts);
  return {.data = backend,
          .control = backend,
          .memory = std::make_shared<ArenaMemory>(backend->arena(), accounts.ledger),
          .windows = std::make_shared<ShmWindows>(backend),
          .liveness = backend->health(),
          .announcements = backend->announcements()};
}

}  // namespace zero::comm
