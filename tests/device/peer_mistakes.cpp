// Mistakes with memory that ranks read and write in place at each other's.
#include <array>
#include <barrier>
#include <vector>

#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using c10::Event;

// A kernel on this rank's device, which may touch memory of another's.
void reads(const char* name, const Tensor& from) {
  launch(name, {bytes_of(from, false)}, [] {});
}
void writes(const char* name, const Tensor& to) {
  launch(name, {bytes_of(to, true)}, [] {});
}

// This rank knows that its stream is done, and so do the others from then on.
void finish(int rank) {
  stream(0, rank).synchronize();
  hosts_met();
}

std::array<Event, 4> four_events() {
  return {Event(c10::kPrivateUse1), Event(c10::kPrivateUse1), Event(c10::kPrivateUse1),
          Event(c10::kPrivateUse1)};
}

// ---- ranks that meet on the host

// The owner has waited, but they have not met.
void peer_is_read_before_the_ranks_met(bool mistake) {
  const auto slice = filled(1, 1);
  synchronize();
  std::barrier meeting(2);
  run_ranks(2, [&](int r) {
    if (r == 1) {
      slice.add_(1);
      stream(0, 1).synchronize();
      if (!mistake) hosts_met();
    }
    meeting.arrive_and_wait();
    if (r == 0) reads("read the peer", slice);
    stream(0, r).synchronize();
  });
}

// The owner meets the others first and then waits for its own work.
void owner_waits_after_the_meeting(bool mistake) {
  const auto slice = filled(1, 1);
  synchronize();
  std::barrier meeting(2);
  run_ranks(2, [&](int r) {
    if (r == 1) {
      slice.add_(1);
      if (mistake) {
        hosts_met();
        stream(0, 1).synchronize();
      } else {
        finish(1);
      }
    }
    meeting.arrive_and_wait();
    if (r == 0) reads("read the peer", slice);
    stream(0, r).synchronize();
  });
}

void window_is_overwritten_before_all_have_read(bool mistake) {
  const auto window = filled(0, 0);
  synchronize();
  std::barrier meeting(2);
  run_ranks(2, [&](int r) {
    for (int epoch = 0; epoch < 2; ++epoch) {
      if (r == 0) {
        writes("publish", window);
        finish(0);
      }
      meeting.arrive_and_wait();
      if (r == 1) {
        reads("gather", window);
        if (!mistake) finish(1);
      }
      meeting.arrive_and_wait();
    }
    stream(0, r).synchronize();
  });
}

// A rank that is done frees its slice, which another one is still to read.
void rank_leaves_before_its_peers_have_read(bool mistake) {
  std::array slices{filled(0, 0), filled(1, 1)};
  synchronize();
  std::barrier meeting(2);
  run_ranks(2, [&](int r) {
    if (r == 0) {
      reads("read the peer", slices[1]);
      if (!mistake) finish(0);
    }
    meeting.arrive_and_wait();
    if (r == 1) slices[1] = Tensor();
    meeting.arrive_and_wait();
    stream(0, r).synchronize();
  });
}

// ---- ranks whose streams wait for each other's events

// Each peer has a place of its own in the owner's memory, unless the number is the wrong one.
void two_peers_push_into_one_place(bool mistake) {
  const auto places = filled(0, 0, 4 * kNumel);
  synchronize();
  std::barrier meeting(3);
  run_ranks(3, [&](int r) {
    for (int turn = 1; turn < 3; ++turn) {
      if (turn == r) {
        writes("push a gradient", places.narrow(0, (mistake ? 1 : r) * kNumel, kNumel));
      }
      meeting.arrive_and_wait();
    }
    stream(0, r).synchronize();
  });
}

// The owner may read what was pushed when each peer has said so, and not when the first has.
void owner_adds_up_before_all_have_pushed(bool mistake) {
  const auto places = filled(0, 0, 4 * kNumel);
  synchronize();
  auto pushed = four_events();
  std::barrier meeting(3);
  run_ranks(3, [&](int r) {
    if (r > 0) {
      writes("push a gradient", places.narrow(0, r * kNumel, kNumel));
      pushed.at(static_cast<size_t>(r)).record(stream(0, r));
    }
    meeting.arrive_and_wait();
    if (r == 0) {
      pushed[1].block(stream(0, 0));
      if (!mistake) pushed[2].block(stream(0, 0));
      reads("add up", places);
    }
    meeting.arrive_and_wait();
    stream(0, r).synchronize();
  });
}

}  // namespace

std::vector<Mistake> mistakes_with_peers() {
  return {
      {"peer_is_read_before_the_ranks_met", peer_is_read_before_the_ranks_met, wait_of(0, 0, 0, 1)},
      {"owner_waits_after_the_meeting", owner_waits_after_the_meeting, wait_of(0, 0, 0, 1)},
      {"window_is_overwritten_before_all_have_read", window_is_overwritten_before_all_have_read,
       wait_of(0, 0, 0, 1)},
      {"rank_leaves_before_its_peers_have_read", rank_leaves_before_its_peers_have_read,
       record_of(0)},
      {"two_peers_push_into_one_place", two_peers_push_into_one_place, wait_of(0, 0, 2, 1)},
      {"owner_adds_up_before_all_have_pushed", owner_adds_up_before_all_have_pushed,
       wait_of(0, 0, 0, 2)},
  };
}

}  // namespace zero::simulated
