#include "zero/comm/shm_backend.h"

#include <fmt/format.h>

#include <array>
#include <exception>
#include <memory>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/memory_block.h"
#include "zero/comm/shm_window.h"

namespace zero::comm {

ShmBackend::ShmBackend(Meeting meeting, const GroupOptions& options, const Accounts& accounts)
    : CallBackend(meeting.peers->rank(), meeting.peers->size(), options.timeout),
      peers_(std::move(meeting.peers)),
      health_(std::make_shared<Health>(peers_)),
      arena_(std::make_shared<Arena>(std::move(meeting.mapping), getRank(),
                                     peers_->number(getRank()))),
      accounts_(accounts),
      collectives_(peers_, arena_, accounts.ledger, accounts.traffic, options.sum_block),
      queue_(std::make_shared<CallQueue>([this](Call& call) { return run(call); })) {}

ShmBackend::~ShmBackend() {
  if (!owner_.here()) {  // a forked child does not have the queue's thread, and would wait for it
    (void)std::make_unique<std::shared_ptr<CallQueue>>(std::move(queue_)).release();
    return;
  }
  // While an exception passes, queued calls would wait for peers that this rank is about to leave.
  if (std::uncaught_exceptions() > 0) health_->abandon("it left because of an exception");
  queue_->close();
  peers_->post_left();
}

c10::intrusive_ptr<IssuedCall> ShmBackend::push(Call call, bool asynchronous, bool wake) {
  health_->check();
  auto issued = c10::make_intrusive<IssuedCall>(std::move(call), queue_);
  queue_->push(issued, wake);
  if (!asynchronous) issued->wait(kNoTimeout);
  return issued;
}

c10::intrusive_ptr<c10d::Work> ShmBackend::issue(Call call, bool asynchronous, bool wake) {
  return push(std::move(call), asynchronous, wake);
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
  call.timeout = timeout_;
  const auto issued = push(std::move(call), false, false);
  auto& done = issued->call();
  return std::make_unique<ShmWindow>(
      peers_, health_, arena_->mapping(), std::move(done.window_block),
      std::move(done.window_offsets), shape,
      std::array{Charge(accounts_.ledger, category, bytes / getSize()),
                 Charge(accounts_.ledger, Category::communication, shape.epochs_bytes())},
      timeout_, accounts_.clock);
}

namespace {

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

Transport shared_memory_transport(Meeting meeting, const GroupOptions& options,
                                  const Accounts& accounts) {
  const auto backend = c10::make_intrusive<ShmBackend>(std::move(meeting), options, accounts);
  return {.data = backend,
          .control = backend,
          .memory = std::make_shared<ArenaMemory>(backend->arena(), accounts.ledger),
          .windows = std::make_shared<ShmWindows>(backend),
          .liveness = backend->health(),
          .activity = backend->activity(),
          .announcements = backend->announcements()};
}

}  // namespace zero::comm
