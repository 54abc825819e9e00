#include "zero/engine/gradient_presence.h"

#include <algorithm>
#include <vector>

#include "zero/comm/gather_records.h"

namespace zero {
namespace {

constexpr int32_t kBegan = 1;
constexpr int32_t kDropped = 2;

}  // namespace

GradientPresence::GradientPresence(const partition::Layout& layout)
    : layout_(layout),
      here_(layout.parameters().size(), 0),
      anywhere_(here_.size(), 0),
      before_(here_.size(), 0) {}

void GradientPresence::note_everywhere(int64_t parameter) {
  note(parameter);
  anywhere_[static_cast<size_t>(parameter)] = 1;
}

void GradientPresence::forget(int64_t parameter) {
  here_[static_cast<size_t>(parameter)] = 0;
  anywhere_[static_cast<size_t>(parameter)] = 0;
}

bool GradientPresence::any(int64_t unit, const std::vector<uint8_t>& parameters) const {
  return std::ranges::any_of(layout_.unit(unit).segments, [&](const auto& segment) {
    return parameters[static_cast<size_t>(segment.parameter)] != 0;
  });
}

bool GradientPresence::complete_here(int64_t unit) const {
  return std::ranges::all_of(layout_.unit(unit).segments, [&](const auto& segment) {
    return here_[static_cast<size_t>(segment.parameter)] != 0;
  });
}

// A rank's message has a word for each parameter (whether it had a gradient, and how the rank could
// give it), a flag for each unit, the order, and two words: whether it refuses early reductions,
// and what became of those of this step.
GradientPresence::Agreement GradientPresence::agree(const Placement& placement,
                                                    ReductionOrder& order, const Report& mine) {
  const size_t parameters = here_.size();
  const size_t units = mine.late.size();
  const size_t ordered = order.units().size();
  const size_t numel = parameters + units + ordered + 2;
  std::vector<int32_t> sent(numel, 0);
  for (size_t p = 0; p < parameters; ++p) {
    const auto use = mine.look_ups.empty() ? LookUpUse::none : mine.look_ups[p];
    sent[p] = here_[p] | static_cast<int32_t>(use) << 1;
  }
  auto to = sent.begin() + static_cast<ptrdiff_t>(parameters);
  to = std::ranges::copy(mine.late, to).out;
  if (!order.known()) std::ranges::copy(order.seen(), to);
  to += static_cast<ptrdiff_t>(ordered);
  to[0] = mine.refuses_early ? 1 : 0;
  to[1] = (mine.began_early ? kBegan : 0) | (mine.dropped ? kDropped : 0);

  const auto all = comm::gather_arrays<int32_t>(*placement.all, sent, "gradients present");
  int dropped = 0;  // ranks
  Agreement agreed{.late = std::vector<uint8_t>(units, 0), .look_ups = mine.look_ups};
  agreed.look_ups.resize(parameters, LookUpUse::none);
  std::ranges::fill(anywhere_, uint8_t{0});
  for (size_t rank = 0; rank * numel < all.size(); ++rank) {
    const auto* from = &all[rank * numel];
    for (size_t p = 0; p < parameters; ++p) {
      const int32_t word = *from++;
      anywhere_[p] |= static_cast<uint8_t>(word & 1);
      if (word >> 1 != static_cast<int32_t>(agreed.look_ups[p]))
        agreed.look_ups[p] = LookUpUse::none;
    }
    for (auto& unit : agreed.late) unit |= static_cast<uint8_t>(*from++);
    if (rank == 0) order.adopt({from, ordered});
    from += ordered;
    agreed.refuses_early |= from[0] != 0;
    agreed.began_early |= (from[1] & kBegan) != 0;
    dropped += (from[1] & kDropped) != 0 ? 1 : 0;
  }
  agreed.dropped_by_some = dropped > 0 && dropped < placement.all->size();
  return agreed;
}

void GradientPresence::clear(bool completed) {
  if (completed) before_ = anywhere_;
  std::ranges::fill(here_, uint8_t{0});
  std::ranges::fill(anywhere_, uint8_t{0});
}

}  // namespace zero
