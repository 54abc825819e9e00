#include "zero/comm/hosts_window.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/link_codec.h"
#include "zero/comm/wait_clock.h"

namespace zero::comm {

HostsWindow::HostsWindow(std::shared_ptr<Group> host, std::unique_ptr<Window> local, int64_t slots,
                         c10::intrusive_ptr<HostsBackend> backend, const Topology& topology,
                         Accounts accounts)
    : host_(std::move(host)),
      local_(std::move(local)),
      backend_(std::move(backend)),
      topology_(topology),
      accounts_(std::move(accounts)),
      coming_(static_cast<size_t>(slots)) {}

void HostsWindow::publish(int64_t slot, uint64_t epoch, const Published& what) {
  if (slot < 0 || slot >= static_cast<int64_t>(coming_.size())) {
    throw CommError(fmt::format("A window of {} slots has no slot {}.", coming_.size(), slot));
  }
  const int ranks = topology_.hosts * topology_.local_size;
  if (!what.whole.defined() || !what.slice.defined() ||
      what.whole.numel() != ranks * what.slice.numel()) {
    throw CommError(
        fmt::format("Slot {} of a window on {} hosts is published without its slices, one for each "
                    "of {} ranks: they must go to the other hosts.",
                    slot, topology_.hosts, ranks));
  }
  await(slot);
  const auto bytes = static_cast<int64_t>(what.slice.nbytes());
  const int64_t others = topology_.hosts - 1;
  accounts_.traffic->add(Collective::all_gather, others * bytes, 0);
  const auto codec = make_codec(what.wire, what.slice.scalar_type());
  accounts_.traffic->add_link(Collective::all_gather,
                              others * codec->message_bytes(what.slice.numel()));
  auto flight =
      std::make_shared<Flight>(accounts_,
                               CallTime{.collective = Collective::all_gather,
                                        .ranks = ranks,
                                        .label = what.label,
                                        .message = static_cast<int64_t>(what.whole.nbytes())},
                               others * bytes);
  auto work = backend_->gather_to_host(
      what, [local = local_, slot, epoch] { local->publish(slot, epoch); });
  const std::lock_guard lock(mutex_);
  coming_[static_cast<size_t>(slot)] = {std::move(work), std::move(flight)};
}

void HostsWindow::settle() {
  for (size_t slot = 0; slot < coming_.size(); ++slot) await(static_cast<int64_t>(slot));
}

void HostsWindow::wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) {
  const int place = rank % topology_.local_size;
  if (place == topology_.local_rank) await(slot);
  local_->wait(slot, place, epoch, label);
}

// Waits for this rank's own exchange of `slot`.
void HostsWindow::await(int64_t slot) {
  Coming coming;
  std::string label;
  std::optional<Activity> activity;
  {
    const std::lock_guard lock(mutex_);
    coming = coming_[static_cast<size_t>(slot)];
    if (!coming.work) return;
    if (*coming.flight) {  // another thread that waits may end it
      label = coming.flight->label();
      activity = coming.flight->waiting();
    }
  }
  const ClockedScope clocked(*accounts_.clock);
  std::optional<Timeline::Scope> waiting;
  if (activity) waiting.emplace(*accounts_.timeline, *activity, label);
  coming.work->wait();
  waiting.reset();
  const std::lock_guard lock(mutex_);
  auto& now = coming_[static_cast<size_t>(slot)];
  if (now.work != coming.work) return;  // another thread has waited for it
  end_flight(*coming.flight, *coming.work);
  now = {};
}

}  // namespace zero::comm
