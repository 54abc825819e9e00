#include "zero/engine/step_profile.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/chrome_trace.h"
#include "zero/engine/thread_observer.h"

namespace zero {

class StepProfile::Operators {
 public:
  explicit Operators(Timeline& timeline) : timeline_(timeline) {}
  std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& /*range*/) const {
    return std::make_unique<Begun>();
  }
  void end(const at::RecordFunction& range, const at::ObserverContext& context) const {
    timeline_.add(Activity::operation, range.name(), static_cast<const Begun&>(context).at,
                  Timeline::now());
  }

 private:
  struct Begun : at::ObserverContext {
    int64_t at = Timeline::now();
  };
  Timeline& timeline_;
  ThreadObserver<Operators> observer_{
      *this,
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION},
      false,
      "A second zero::StepProfile on this thread while another one keeps its operators: stop that "
      "one first."};
};

StepProfile::StepProfile(comm::Group& group, Options options)
    : group_(group), timeline_(group.accounts().timeline) {
  if (timeline_->keeps()) {
    throw Error(
        "A second zero::StepProfile of a group while another one keeps spans: stop that one, or "
        "write it, first.");
  }
  if (options.operators) operators_ = std::make_unique<Operators>(*timeline_);
  timeline_->start(options.most);
}

StepProfile::~StepProfile() {
  stop();
  timeline_->clear();
}

void StepProfile::stop() {
  operators_.reset();
  if (timeline_->keeps()) timeline_->stop();
}

namespace {

// Returns how far this host's clock is ahead of the first host's. Ranks read their clocks as they
// leave a barrier, a few times, and the median counts.
int64_t clock_ahead(comm::Group& group) {
  const auto& topology = group.topology();
  if (topology.hosts == 1) return 0;
  const auto leader = static_cast<size_t>(topology.host) * static_cast<size_t>(topology.local_size);
  std::array<int64_t, 5> ahead{};
  for (auto& each : ahead) {
    group.barrier("clocks");
    const auto clocks = comm::gather_records(group, Timeline::now(), "clocks");
    each = clocks[leader] - clocks[0];
  }
  std::sort(ahead.begin(), ahead.end());
  return ahead[ahead.size() / 2];
}

struct Kept {
  int64_t spans = 0;
  int64_t dropped = 0;
  int64_t clock = 0;
};

// Gathers every rank's spans on rank 0, in pieces, so that the other ranks need little memory.
std::vector<RankSpans> gather_spans(comm::Group& group, const std::vector<Span>& mine,
                                    const std::vector<Kept>& all) {
  constexpr int64_t kPiece = 4096;
  int64_t most = 0;
  for (const auto& each : all) most = std::max(most, each.spans);
  std::vector<RankSpans> ranks(all.size());
  for (size_t r = 0; r < all.size(); ++r)
    ranks[r] = {.rank = static_cast<int>(r), .clock = all[r].clock, .spans = {}};
  if (group.size() == 1) {
    ranks[0].spans = mine;
    return ranks;
  }
  const auto bytes = static_cast<int64_t>(sizeof(Span));
  const auto input = at::empty({kPiece * bytes}, at::kByte);
  const auto output = at::empty({group.size() * kPiece * bytes}, at::kByte);
  for (int64_t begin = 0; begin < most; begin += kPiece) {
    const auto here = [&](const Kept& kept) {
      return static_cast<size_t>(std::clamp<int64_t>(kept.spans - begin, 0, kPiece));
    };
    const size_t count = here(all[static_cast<size_t>(group.rank())]);
    if (count > 0)
      std::memcpy(input.data_ptr(), &mine[static_cast<size_t>(begin)], count * sizeof(Span));
    group.all_gather_control(output, input, "spans");
    if (group.rank() != 0) continue;
    const auto* theirs = static_cast<const Span*>(output.const_data_ptr());
    for (size_t r = 0; r < all.size(); ++r) {
      const auto* first = theirs + static_cast<int64_t>(r) * kPiece;
      ranks[r].spans.insert(ranks[r].spans.end(), first, first + here(all[r]));
    }
  }
  return ranks;
}

}  // namespace

StepProfile::Written StepProfile::write(const std::string& file) {
  stop();
  const auto mine = timeline_->spans();
  const Kept kept{.spans = static_cast<int64_t>(mine.size()),
                  .dropped = timeline_->dropped(),
                  .clock = clock_ahead(group_)};
  timeline_->clear();
  const auto all = comm::gather_records(group_, kept, "spans");
  Written written;
  for (const auto& each : all) {
    written.spans += each.spans;
    written.dropped += each.dropped;
  }
  const auto ranks = gather_spans(group_, mine, all);
  comm::agree_on_rank_zero(group_, "Writing the profile", [&] {
    write_file(file, chrome_trace(ranks, written.dropped, group_.link_speed()), fail<Error>);
  });
  return written;
}

}  // namespace zero
