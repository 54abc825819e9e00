// Stage 3 without copies inside a host: slices lie side by side in a window, an array that the
// ranks of a host share, and a gather only waits for the slices' owners.
//
// Note [Kept on a host]
// With ZeRO++'s hpZ (2306.10209, section 3.2) each of several hosts keeps all parameters from one
// update to the next. In the paper ranks keep a second partition to gather from; here a host has
// one array, which its ranks read in place (comm::Window). So parameters cross between hosts once a
// step, however many micro-batches it has, and nothing is gathered inside a host. The array holds a
// unit that crosses quantised with the values of its messages, and the unit's slices have memory of
// their own.
#include <ATen/ceil_div.h>

#include <exception>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/timeline.h"
#include "zero/comm/flight.h"
#include "zero/device/memory.h"
#include "zero/engine/parameter_source.h"

namespace zero {

namespace {

class WindowUnits final : public PagedSource {
 public:
  explicit WindowUnits(const SourceParts& parts);
  ~WindowUnits() override;

  paging::UnitSource* start(PendingUpdates& /*updates*/) override { return this; }
  void publish(int64_t unit) override;
  void settle() override { window_.settle(); }
  void forget() override { window_.discard(); }
  at::Tensor full(int64_t unit) override;

  bool in_place() const override { return true; }
  void* view(int64_t unit) override;
  void gather(int64_t /*unit*/, void* /*destination*/) override { refuse(); }
  void finish(int64_t /*unit*/) override { refuse(); }

 private:
  static void refuse() { ensure(false, "units in a window are read in place"); }
  std::pair<int64_t, int64_t> units_on_pages_of(int64_t unit) const;

  comm::Window& window_;
  at::Tensor view_;                 // a view of the window, for this rank's operators
  std::vector<at::Tensor> places_;  // the units' memory in the window
  std::vector<uint64_t> epoch_;     // by unit, the same on all ranks
};

WindowUnits::WindowUnits(const SourceParts& parts)
    : PagedSource(parts),
      window_(*table().window()),
      view_(window_.view()),
      epoch_(static_cast<size_t>(layout().unit_count()), 0) {
  const auto memory = window_.memory();
  for (int64_t u = 0; u < layout().unit_count(); ++u) {
    places_.push_back(memory.narrow(0, table().window_offset(u), layout().unit(u).bytes())
                          .view(table().plan(u).dtype));
  }
}

// Peers may still read the window, so it is freed when all ranks are here. While an error unwinds
// this does not wait, since some ranks may never come.
WindowUnits::~WindowUnits() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    settle();
    table().wait_for_copies();
    group().barrier("end of the engine");
  } catch (const CommError&) {  // a peer is gone, and reads nothing any more
  }
}

void WindowUnits::publish(int64_t unit) {
  const auto u = static_cast<size_t>(unit);
  window_.publish(unit, ++epoch_[u],
                  {.whole = places_[u],
                   .slice = table().memory(unit, State::parameters),
                   .label = label(unit),
                   .wire = table().plan(unit).parameter_link.wire()});
}

at::Tensor WindowUnits::full(int64_t unit) {
  // Between hosts the window may have the values of quantised messages.
  const auto& plan = table().plan(unit);
  if (group().topology().hosts > 1 && plan.parameter_link.quantised())
    return PagedSource::full(unit);
  return tensor_at(view(unit), layout().unit(unit).numel, plan.dtype, c10::kCPU);
}

// Returns units [first, last), which have bytes on the pages of memory that this unit lies on. If
// the user writes to the unit, these pages do not follow the window any more (comm::Window::view),
// so their other units must be valid by then too.
std::pair<int64_t, int64_t> WindowUnits::units_on_pages_of(int64_t unit) const {
  constexpr int64_t kPage = 4096;
  const auto begin_of = [&](int64_t u) { return table().window_offset(u); };
  const auto end_of = [&](int64_t u) { return begin_of(u) + layout().unit(u).bytes(); };
  int64_t first = unit;
  while (first > 0 && end_of(first - 1) > begin_of(unit) / kPage * kPage) --first;
  int64_t last = unit + 1;
  while (last < layout().unit_count() && begin_of(last) < at::round_up(end_of(unit), kPage)) ++last;
  return {first, last};
}

// The gather only waits, since the slices lie side by side already.
void* WindowUnits::view(int64_t unit) {
  const auto& accounts = group().accounts();
  const auto bytes = layout().unit(unit).bytes();
  const auto sent = partition::share_sent(bytes, group().local_size());
  comm::Flight flight(accounts,
                      {.collective = comm::Collective::all_gather,
                       .ranks = group().size(),
                       .in_place = true,
                       .label = label(unit),
                       .message = bytes},
                      sent);
  const Timeline::Scope waiting(*accounts.timeline, Activity::wait_gather, label(unit));
  const auto [first, last] = units_on_pages_of(unit);
  for (int64_t u = first; u < last; ++u) {
    for (int rank = 0; rank < group().size(); ++rank)
      window_.wait(u, rank, epoch_[static_cast<size_t>(u)], label(u));
  }
  group().traffic().add(comm::Collective::all_gather, sent, 0);
  flight.end();
  return static_cast<std::byte*>(view_.data_ptr()) + table().window_offset(unit);
}

}  // namespace

std::unique_ptr<ParameterSource> window_units(const SourceParts& parts) {
  return std::make_unique<WindowUnits>(parts);
}

}  // namespace zero
