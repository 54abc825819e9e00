// Mistakes of ranks around their collectives.
#include <c10/core/StreamGuard.h>

#include <array>
#include <barrier>
#include <functional>
#include <string>
#include <vector>

#include "tests/device/collectives.h"
#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using c10::StreamGuard;

// What a rank has: streams, and tensors of its device, there when its part begins.
struct Rank : ThreeStreams {
  explicit Rank(int r)
      : ThreeStreams(r),
        index(r),
        whole(filled(1, r)),
        slice(filled(2, r).narrow(0, 0, kNumel / 2)) {}
  int index;
  Tensor whole, slice;
};
void two_ranks(const std::function<void(Rank&, Collectives&)>& body) {
  Collectives collectives(2);
  run_ranks(2, [&](int r) {
    Rank rank(r);
    stream(0, r).synchronize();  // what it starts from is there
    body(rank, collectives);
    stream(0, r).synchronize();
    stream(1, r).synchronize();
  });
}

void reduced_before_the_gradient(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto gradient = r.whole * 2;
    if (!mistake) order(r.side, r.main);
    const StreamGuard guard(r.side);
    collectives.reduce_scatter(r.index, gradient, r.slice);
    r.side.synchronize();
  });
}

void bucket_is_freed_before_it_was_reduced(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    auto bucket = r.whole * 2;
    order(r.side, r.main);
    const StreamGuard guard(r.side);
    collectives.reduce_scatter(r.index, bucket, r.slice);
    if (!mistake) bucket.record_stream(r.side);
    bucket = Tensor();
  });
}

void bucket_is_filled_again_before_it_was_reduced(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto bucket = r.whole * 0;
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      if (micro_batch > 0 && !mistake) order(r.main, r.side);
      bucket.copy_(r.whole);
      order(r.side, r.main);
      const StreamGuard guard(r.side);
      collectives.reduce_scatter(r.index, bucket, r.slice);
    }
    r.side.synchronize();
  });
}

void gradients_are_cleared_before_they_were_reduced(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto gradient = r.whole * 2;
    order(r.side, r.main);
    {
      const StreamGuard guard(r.side);
      collectives.all_reduce(r.index, gradient);
    }
    if (!mistake) order(r.main, r.side);
    gradient.zero_();
    r.side.synchronize();
  });
}

void accumulated_while_it_is_reduced(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto sum = r.whole * 2, next = r.whole * 3;
    order(r.side, r.main);
    {
      const StreamGuard guard(r.side);
      collectives.all_reduce(r.index, sum);
    }
    if (!mistake) order(r.main, r.side);
    sum.add_(next);
    r.side.synchronize();
  });
}

void gathered_before_the_update(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    r.slice.sub_(0.5);
    if (!mistake) order(r.side, r.main);
    const StreamGuard guard(r.side);
    collectives.all_gather(r.index, r.slice, r.whole);
  });
}

void updated_before_the_sum_is_there(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto weight = r.slice.clone();
    order(r.side, r.main);
    {
      const StreamGuard guard(r.side);
      collectives.reduce_scatter(r.index, r.whole, r.slice);
    }
    if (!mistake) order(r.main, r.side);
    weight.sub_(r.slice);
    r.side.synchronize();
  });
}

void norm_before_all_sums_are_there(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto norm = r.whole.norm();
    order(r.side, r.main);
    {
      const StreamGuard guard(r.side);
      collectives.all_reduce(r.index, norm);
    }
    if (!mistake) order(r.main, r.side);
    const auto clip = norm.reciprocal();
    r.side.synchronize();
  });
}

void broadcast_before_it_is_initialised(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    r.whole.fill_(r.index);
    if (!mistake) order(r.side, r.main);
    const StreamGuard guard(r.side);
    collectives.broadcast(r.index, r.whole, 0);
  });
}

void two_collectives_share_a_buffer(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    {
      const StreamGuard guard(r.side);
      collectives.all_gather(r.index, r.slice, r.whole);
    }
    if (!mistake) order(r.third, r.side);
    {
      const StreamGuard guard(r.third);
      collectives.all_gather(r.index, r.slice, r.whole);
    }
    r.third.synchronize();
  });
}

// One rank reads the other's slice where it lies; the owner has waited, but they have not met.
void peer_is_read_before_the_ranks_met(bool mistake) {
  const auto slices = std::array{filled(1, 0), filled(1, 1)};
  synchronize();
  std::barrier meeting(2);
  run_ranks(2, [&](int r) {
    if (r == 1) {
      slices[1].add_(1);
      stream(0, 1).synchronize();
      if (!mistake) hosts_met();
    }
    meeting.arrive_and_wait();
    if (r == 0) {
      launch("read the peer", {{slices[1].const_data_ptr(), slices[1].nbytes(), false}}, [] {});
      stream(0, 0).synchronize();
    }
  });
}

const std::vector<Mistake> kMistakes{
    {"reduced_before_the_gradient", reduced_before_the_gradient,
     "the read by reduce_scatter of rank"},
    {"bucket_is_freed_before_it_was_reduced", bucket_is_freed_before_it_was_reduced,
     "record_stream(stream 1 of device"},
    {"bucket_is_filled_again_before_it_was_reduced", bucket_is_filled_again_before_it_was_reduced,
     "has to wait for an event recorded on"},
    {"gradients_are_cleared_before_they_were_reduced",
     gradients_are_cleared_before_they_were_reduced, "has to wait for an event recorded on"},
    {"accumulated_while_it_is_reduced", accumulated_while_it_is_reduced,
     "has to wait for an event recorded on"},
    {"gathered_before_the_update", gathered_before_the_update, "the read by all_gather of rank"},
    {"updated_before_the_sum_is_there", updated_before_the_sum_is_there,
     "has to wait for an event recorded on"},
    {"norm_before_all_sums_are_there", norm_before_all_sums_are_there,
     "has to wait for an event recorded on"},
    {"broadcast_before_it_is_initialised", broadcast_before_it_is_initialised,
     "has to wait for an event recorded on"},
    {"two_collectives_share_a_buffer", two_collectives_share_a_buffer,
     "has to wait for an event recorded on"},
    {"peer_is_read_before_the_ranks_met", peer_is_read_before_the_ranks_met,
     "the read by read the peer"},
};

class RankMistakes : public testing::TestWithParam<Mistake> {};

TEST_P(RankMistakes, AreReportedInEveryRun) { expect_reported_in_every_run(GetParam()); }

INSTANTIATE_TEST_SUITE_P(ByHand, RankMistakes, testing::ValuesIn(kMistakes),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zero::simulated
