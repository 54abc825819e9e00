// Mistakes between streams: who waits for whom, and when the event is recorded.
#include <array>
#include <vector>

#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;
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

// A slot that is filled and used by turns: there is a wait for each filling and none for its use.
void waits_in_one_direction_only(bool mistake) {
  const ThreeStreams s;
  const auto slot = filled(0);
  for (int round = 0; round < 3; ++round) {
    if (!mistake) order(s.main, s.side);
    slot.fill_(round);
    order(s.side, s.main);
    on(s.side, [&] { return slot * 2; });
  }
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

void two_consumers_and_one_is_waited_for(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1);
  synchronize();
  on(s.side, [&] { return weight * 2; });
  on(s.third, [&] { return weight * 3; });
  order(s.main, s.side);
  if (!mistake) order(s.main, s.third);
  weight.sub_(1);
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

void first_step_does_not_wait_for_the_initialisation(bool mistake) {
  const ThreeStreams s;
  const auto weight = on(s.side, [] { return filled(1); });
  for (int step = 0; step < 2; ++step) {
    if (step > 0 || !mistake) order(s.main, s.side);
    weight.sub_(0.5);
    order(s.side, s.main);
    on(s.side, [&] { return weight * 2; });
  }
  synchronize();
}

// Each step's beginning waits for the update, and after the last step none begins.
void evaluation_does_not_wait_for_the_last_update(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1);
  for (int step = 0; step < 2; ++step) {
    order(s.main, s.side);
    const auto loss = weight * 2;
    order(s.side, s.main);
    on(s.side, [&] { weight.sub_(0.5); });
  }
  if (!mistake) order(s.main, s.side);
  const auto score = weight * 3;
  synchronize();
}

// The stream that used the unit first has waited; "present" says nothing to another.
void unit_is_present_for_its_first_user_alone(bool mistake) {
  const ThreeStreams s;
  const auto unit = filled(0), shard = filled(1);
  synchronize();
  on(s.side, [&] { unit.copy_(shard); });
  const Event gathered = record(s.side);
  bool present = false;
  for (const auto& user : {s.main, s.third}) {
    if (!present || !mistake) gathered.block(user);
    present = true;
    on(user, [&] { return unit * 2; });
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

// An event goes back to the pool when its first consumer has waited; there is a second one.
void event_goes_back_to_its_pool_too_early(bool mistake) {
  const ThreeStreams s;
  const auto fourth = stream(3);
  const auto a = filled(1), b = filled(1);
  synchronize();
  std::array<Event, 2> pool{Event(c10::kPrivateUse1), Event(c10::kPrivateUse1)};
  a.add_(1);
  pool[0].record(s.main);
  pool[0].block(s.side);
  on(s.side, [&] { return a * 2; });
  on(s.third, [&] { b.add_(1); });
  pool[mistake ? 0 : 1].record(s.third);
  pool[0].block(fourth);
  on(fourth, [&] { return a * 3; });
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

void consumer_waits_for_the_piece_before(bool mistake) {
  const ThreeStreams s;
  const auto array = filled(0, 0, 4 * kNumel);
  synchronize();
  std::vector<Event> written;
  for (int piece = 0; piece < 4; ++piece) {
    on(s.side, [&] { array.narrow(0, piece * kNumel, kNumel).add_(1); });
    written.push_back(record(s.side));
  }
  for (int piece = 0; piece < 4; ++piece) {
    const int awaited = mistake ? piece - 1 : piece;
    if (awaited >= 0) written[static_cast<size_t>(awaited)].block(s.main);
    const auto y = array.narrow(0, piece * kNumel, kNumel) * 2;
  }
  synchronize();
}

// Two buffers by turns; with three events by turns each stands for the use before the last one.
void events_are_counted_differently_from_buffers(bool mistake) {
  const ThreeStreams s;
  const std::array buffers{filled(0), filled(0)};
  std::vector<Event> used;
  for (int i = 0; i < (mistake ? 3 : 2); ++i) used.emplace_back(c10::kPrivateUse1);
  for (size_t i = 0; i < 6; ++i) {
    const auto& buffer = buffers.at(i % 2);
    Event& event = used[i % used.size()];
    event.block(s.main);
    buffer.fill_(static_cast<double>(i));
    order(s.side, s.main);
    on(s.side, [&] { return buffer * 2; });
    event.record(s.side);
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

void waits_after_the_use(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  if (!mistake) order(s.side, s.main);
  const auto y = on(s.side, [&] { return x * 2; });
  if (mistake) order(s.side, s.main);
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

// The current stream waits before the scope of the consumer begins.
void wait_is_enqueued_outside_of_the_scope(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  synchronize();
  on(s.third, [&] { x.add_(1); });
  const Event done = record(s.third);
  if (mistake) done.block(current_stream());
  on(s.side, [&] {
    if (!mistake) done.block(current_stream());
    return x * 2;
  });
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
      {"waits_in_one_direction_only", waits_in_one_direction_only, wait_of(0, 1)},
      {"two_producers_and_one_is_waited_for", two_producers_and_one_is_waited_for, wait_of(1, 2)},
      {"two_consumers_and_one_is_waited_for", two_consumers_and_one_is_waited_for, wait_of(0, 2)},
      {"only_the_first_piece_waits", only_the_first_piece_waits, wait_of(2, 0)},
      {"first_step_does_not_wait_for_the_initialisation",
       first_step_does_not_wait_for_the_initialisation, wait_of(0, 1)},
      {"evaluation_does_not_wait_for_the_last_update", evaluation_does_not_wait_for_the_last_update,
       wait_of(0, 1)},
      {"unit_is_present_for_its_first_user_alone", unit_is_present_for_its_first_user_alone,
       wait_of(2, 1)},
      {"event_is_recorded_too_early", event_is_recorded_too_early, wait_of(1, 0)},
      {"event_is_never_recorded", event_is_never_recorded, wait_of(1, 0)},
      {"event_is_recorded_again", event_is_recorded_again, wait_of(1, 0)},
      {"one_event_for_a_list_of_streams", one_event_for_a_list_of_streams, wait_of(1, 0)},
      {"event_goes_back_to_its_pool_too_early", event_goes_back_to_its_pool_too_early,
       wait_of(3, 0)},
      {"event_of_the_step_before_is_waited_for", event_of_the_step_before_is_waited_for,
       wait_of(1, 0)},
      {"consumer_waits_for_the_piece_before", consumer_waits_for_the_piece_before, wait_of(0, 1)},
      {"events_are_counted_differently_from_buffers", events_are_counted_differently_from_buffers,
       wait_of(0, 1)},
      {"another_stream_waits", another_stream_waits, wait_of(1, 0)},
      {"waits_after_the_use", waits_after_the_use, wait_of(1, 0)},
      {"event_is_recorded_outside_of_the_scope", event_is_recorded_outside_of_the_scope,
       wait_of(2, 1)},
      {"wait_is_enqueued_outside_of_the_scope", wait_is_enqueued_outside_of_the_scope,
       wait_of(1, 2)},
      {"relay_does_not_wait", relay_does_not_wait, wait_of(1, 0)},
      {"relay_is_marked_before_it_has_waited", relay_is_marked_before_it_has_waited, wait_of(1, 0)},
  };
}

}  // namespace zero::simulated
