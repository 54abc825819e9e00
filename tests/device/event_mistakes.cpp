// Mistakes between streams: who waits for whom, and when the event is recorded.
#include <vector>

#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using c10::Event;

// ---- a wait is missing

void reads_before_it_is_written(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  x.add_(1);
  if (!mistake) order(s.side, s.main);
  on(s.side, [&] { return x * 2; });
  synchronize();
}

void overwrites_what_is_read(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  order(s.side, s.main);
  const auto y = on(s.side, [&] { return x * 2; });
  if (!mistake) order(s.main, s.side);
  x.fill_(0);
  synchronize();
}

void two_streams_write(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  order(s.side, s.main);
  on(s.side, [&] { x.fill_(2); });
  if (!mistake) order(s.main, s.side);
  x.fill_(3);
  synchronize();
}

// A bucket that two streams fill.
void two_producers_and_one_is_waited_for(bool mistake) {
  const ThreeStreams s;
  const auto bucket = filled(0, 0, 2 * kNumel);
  synchronize();
  bucket.narrow(0, 0, kNumel).add_(1);
  on(s.third, [&] { bucket.narrow(0, kNumel, kNumel).add_(2); });
  order(s.side, s.main);
  if (!mistake) order(s.side, s.third);
  on(s.side, [&] { return bucket * 2; });
  synchronize();
}

// An array is copied in pieces, on two streams by turns.
// ROCm/hcc pull request 643: pieces after the first did not wait.
void only_the_first_piece_waits(bool mistake) {
  const ThreeStreams s;
  const auto source = filled(1, 0, 4 * kNumel), copy = filled(0, 0, 4 * kNumel);
  synchronize();
  source.add_(1);
  for (int piece = 0; piece < 4; ++piece) {
    const auto& stream = piece % 2 == 0 ? s.side : s.third;
    if (piece == 0 || !mistake) order(stream, s.main);
    on(stream, [&] {
      copy.narrow(0, piece * kNumel, kNumel).copy_(source.narrow(0, piece * kNumel, kNumel));
    });
  }
  synchronize();
}

// ---- the event stands for something else

void event_is_recorded_too_early(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  Event event(c10::kPrivateUse1);
  if (mistake) event.record(s.main);
  x.add_(1);
  if (!mistake) event.record(s.main);
  event.block(s.side);
  on(s.side, [&] { return x * 2; });
  synchronize();
}

// Whoever waits for an event that nobody has recorded goes on at once.
void event_is_never_recorded(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  Event event(c10::kPrivateUse1);
  x.add_(1);
  if (!mistake) event.record(s.main);
  event.block(s.side);
  on(s.side, [&] { return x * 2; });
  synchronize();
}

// One event for two buffers: the second record takes the place of the first.
void event_is_recorded_again(bool mistake) {
  const ThreeStreams s;
  const auto a = filled(1), b = filled(1);
  synchronize();
  Event first(c10::kPrivateUse1), second(c10::kPrivateUse1);
  a.add_(1);
  first.record(s.main);
  on(s.third, [&] { b.add_(1); });
  (mistake ? first : second).record(s.third);
  first.block(s.side);
  on(s.side, [&] { return a * 2; });
  synchronize();
}

// One event is recorded on each stream of a list and waited for once: it stands for the last.
// torch/cutorch pull request 222.
void one_event_for_a_list_of_streams(bool mistake) {
  const ThreeStreams s;
  const auto a = filled(1), b = filled(1);
  synchronize();
  a.add_(1);
  on(s.third, [&] { b.add_(1); });
  Event event(c10::kPrivateUse1);
  for (const auto& producer : {s.main, s.third}) {
    event.record(producer);
    if (!mistake) event.block(s.side);
  }
  if (mistake) event.block(s.side);
  on(s.side, [&] { return a + b; });
  synchronize();
}

void event_of_the_step_before_is_waited_for(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1);
  Event updated(c10::kPrivateUse1);
  for (int step = 0; step < 3; ++step) {
    if (mistake) updated.block(s.side);
    order(s.main, s.side);
    weight.sub_(0.5);
    updated.record(s.main);
    if (!mistake) updated.block(s.side);
    on(s.side, [&] { return weight * 2; });
  }
  synchronize();
}

// ---- the stream is another one

void another_stream_waits(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  order(mistake ? s.third : s.side, s.main);
  on(s.side, [&] { return x * 2; });
  synchronize();
}

// The current stream is marked when the scope of the producer has ended.
void event_is_recorded_outside_of_the_scope(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  order(s.side, s.main);
  Event done(c10::kPrivateUse1);
  on(s.side, [&] {
    x.add_(1);
    if (!mistake) done.record(current_stream());
  });
  if (mistake) done.record(current_stream());
  done.block(s.third);
  on(s.third, [&] { return x * 2; });
  synchronize();
}

// ---- a wait that others are to imply

// The gather waits for the copy-in, which is to have waited for the update.
void relay_does_not_wait(bool mistake) {
  const ThreeStreams s;
  const auto shard = filled(1), other = filled(1);
  synchronize();
  shard.sub_(0.5);
  if (!mistake) order(s.third, s.main);
  on(s.third, [&] { other.add_(1); });
  order(s.side, s.third);
  on(s.side, [&] { return shard + other; });
  synchronize();
}

void relay_is_marked_before_it_has_waited(bool mistake) {
  const ThreeStreams s;
  const auto shard = filled(1);
  synchronize();
  Event relayed(c10::kPrivateUse1);
  shard.sub_(0.5);
  if (mistake) relayed.record(s.third);
  order(s.third, s.main);
  if (!mistake) relayed.record(s.third);
  relayed.block(s.side);
  on(s.side, [&] { return shard * 2; });
  synchronize();
}

}  // namespace

std::vector<Mistake> mistakes_with_events() {
  return {
      {"reads_before_it_is_written", reads_before_it_is_written, wait_of(1, 0)},
      {"overwrites_what_is_read", overwrites_what_is_read,
       "is not ordered after the read by aten::mul"},
      {"two_streams_write", two_streams_write, "is not ordered after the write by aten::fill_"},
      {"two_producers_and_one_is_waited_for", two_producers_and_one_is_waited_for, wait_of(1, 2)},
      {"only_the_first_piece_waits", only_the_first_piece_waits, wait_of(2, 0)},
      {"event_is_recorded_too_early", event_is_recorded_too_early, wait_of(1, 0)},
      {"event_is_never_recorded", event_is_never_recorded, wait_of(1, 0)},
      {"event_is_recorded_again", event_is_recorded_again, wait_of(1, 0)},
      {"one_event_for_a_list_of_streams", one_event_for_a_list_of_streams, wait_of(1, 0)},
      {"event_of_the_step_before_is_waited_for", event_of_the_step_before_is_waited_for,
       wait_of(1, 0)},
      {"another_stream_waits", another_stream_waits, wait_of(1, 0)},
      {"event_is_recorded_outside_of_the_scope", event_is_recorded_outside_of_the_scope,
       wait_of(2, 1)},
      {"relay_does_not_wait", relay_does_not_wait, wait_of(1, 0)},
      {"relay_is_marked_before_it_has_waited", relay_is_marked_before_it_has_waited, wait_of(1, 0)},
  };
}

}  // namespace zero::simulated
