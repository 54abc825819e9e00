// Mistakes with pinned memory that the host and copies use.
#include <deque>
#include <vector>

#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using c10::Event;

void start_copy(const Tensor& to, const Tensor& from) { to.copy_(from, /*non_blocking=*/true); }

// ---- the host writes what a copy reads

void pinned_buffer_is_filled_again(bool mistake) {
  const ThreeStreams s;
  const auto batch = pinned(1);
  const auto x = filled(0);
  start_copy(x, batch);
  if (!mistake) s.main.synchronize();
  host_writes("fill the next batch", batch);
  synchronize();
}

// The copy is enqueued before the update of the host that it is to bring up.
void copy_up_is_enqueued_before_the_update(bool mistake) {
  const ThreeStreams s;
  const auto updated = pinned(1);
  const auto weight = filled(0);
  if (mistake) start_copy(weight, updated);
  host_writes("update on the host", updated);
  if (!mistake) start_copy(weight, updated);
  synchronize();
}

// The system may take the pages when they are no longer registered.
void pinned_memory_is_unregistered_while_a_copy_reads_it(bool mistake) {
  const ThreeStreams s;
  struct Registration {
    Tensor memory = pinned(1);
    ~Registration() { host_writes("unregister", memory); }
  };
  const auto x = filled(0);
  {
    const Registration registration;
    start_copy(x, registration.memory);
    if (!mistake) s.main.synchronize();
  }
  synchronize();
}

// A kernel reads the learning rate where the host keeps it.
void learning_rate_changes_while_the_update_reads_it(bool mistake) {
  const ThreeStreams s;
  const auto rate = pinned(0.1);
  const auto weight = filled(1);
  for (int step = 0; step < 2; ++step) {
    host_writes("set the learning rate", rate);
    launch("update", {bytes_of(rate, false), bytes_of(weight, true)}, [] {});
    if (!mistake) s.main.synchronize();
  }
  synchronize();
}

// ---- the host reads what has not come down

// deepspeedai/DeepSpeed pull request 501: the sum that says whether a gradient is finite.
void loss_is_read_before_it_came(bool mistake) {
  const ThreeStreams s;
  const auto loss = filled(1);
  const auto seen = pinned(0);
  start_copy(seen, loss);
  const auto came = record(s.main);
  if (!mistake) came.synchronize();
  host_reads("read the loss", seen);
  synchronize();
}

// deepspeedai/DeepSpeed pull request 3097: another stream is waited for than that of the copies.
void host_waits_for_another_stream(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  const auto seen = pinned(0);
  order(s.side, s.main);
  on(s.side, [&] { start_copy(seen, x); });
  (mistake ? s.main : s.side).synchronize();
  host_reads("read the gradient", seen);
  synchronize();
}

// A gradient comes down in two pieces with an event between them.
void host_waits_for_the_first_of_two_pieces(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1), kept = pinned(0);
  std::vector<Event> came;
  for (int64_t piece = 0; piece < 2; ++piece) {
    const int64_t half = kNumel / 2;
    start_copy(kept.narrow(0, piece * half, half), gradient.narrow(0, piece * half, half));
    came.push_back(record(s.main));
  }
  came[mistake ? 0 : 1].synchronize();
  host_reads("update on the host", kept);
  synchronize();
}

void host_waits_for_one_of_two_streams(bool mistake) {
  const ThreeStreams s;
  const auto a = filled(1), b = filled(2);
  const auto norm_of_a = pinned(0), norm_of_b = pinned(0);
  synchronize();
  on(s.side, [&] { start_copy(norm_of_a, a); });
  on(s.third, [&] { start_copy(norm_of_b, b); });
  s.side.synchronize();
  if (!mistake) s.third.synchronize();
  host_reads("add up the norms", norm_of_a);
  host_reads("add up the norms", norm_of_b);
  synchronize();
}

void host_polls_a_flag_that_the_device_writes(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1), flag = pinned(0);
  launch("find an overflow", {bytes_of(gradient, false), bytes_of(flag, true)}, [] {});
  if (!mistake) s.main.synchronize();
  host_reads("skip the step", flag);
  synchronize();
}

// ---- copies that race with work of the device

void two_streams_copy_to_one_buffer(bool mistake) {
  const ThreeStreams s;
  const auto a = filled(1), b = filled(2);
  const auto buffer = pinned(0);
  synchronize();
  on(s.side, [&] { start_copy(buffer, a); });
  if (!mistake) order(s.third, s.side);
  on(s.third, [&] { start_copy(buffer, b); });
  synchronize();
}

}  // namespace

std::vector<Mistake> mistakes_with_the_host() {
  return {
      {"pinned_buffer_is_filled_again", pinned_buffer_is_filled_again,
       "host memory: the write by fill the next batch"},
      {"copy_up_is_enqueued_before_the_update", copy_up_is_enqueued_before_the_update,
       host_wait_for(0)},
      {"pinned_memory_is_unregistered_while_a_copy_reads_it",
       pinned_memory_is_unregistered_while_a_copy_reads_it, "the write by unregister"},
      {"learning_rate_changes_while_the_update_reads_it",
       learning_rate_changes_while_the_update_reads_it, "the write by set the learning rate"},
      {"loss_is_read_before_it_came", loss_is_read_before_it_came, "the read by read the loss"},
      {"host_waits_for_another_stream", host_waits_for_another_stream, host_wait_for(1)},
      {"host_waits_for_the_first_of_two_pieces", host_waits_for_the_first_of_two_pieces,
       "race on 512 bytes, host memory: the read by update on the host"},
      {"host_waits_for_one_of_two_streams", host_waits_for_one_of_two_streams, host_wait_for(2)},
      {"host_polls_a_flag_that_the_device_writes", host_polls_a_flag_that_the_device_writes,
       "the read by skip the step"},
      {"two_streams_copy_to_one_buffer", two_streams_copy_to_one_buffer,
       "host memory: the write by copy to the host"},
  };
}

}  // namespace zero::simulated
