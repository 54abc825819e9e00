// Mistakes with pinned memory that the host and copies use.
#include <array>
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

// Two staging buffers go up on two streams by turns; one event stands for the last copy alone.
void one_event_for_two_staging_buffers(bool mistake) {
  const ThreeStreams s;
  const std::array staging{pinned(1), pinned(2)};
  const std::array streams{s.side, s.third};
  const auto states = filled(0, 0, 2 * kNumel);
  synchronize();
  std::vector<Event> went_up;
  for (int i = 0; i < (mistake ? 1 : 2); ++i) went_up.emplace_back(c10::kPrivateUse1);
  for (size_t i = 0; i < 2; ++i) {
    on(streams.at(i), [&] {
      start_copy(states.narrow(0, static_cast<int64_t>(i) * kNumel, kNumel), staging.at(i));
    });
    went_up[i % went_up.size()].record(streams.at(i));
  }
  for (size_t i = 0; i < 2; ++i) {
    went_up[i % went_up.size()].synchronize();
    host_writes("read the next states from disk", staging.at(i));
  }
  synchronize();
}

void host_fills_gradients_that_go_up(bool mistake) {
  const ThreeStreams s;
  const auto gradients = pinned(1);
  const auto on_device = filled(0);
  synchronize();
  on(s.side, [&] { start_copy(on_device, gradients); });
  const Event went_up = record(s.side);
  order(s.main, s.side);
  const auto norm = on_device.norm();
  if (!mistake) went_up.synchronize();
  host_writes("clear the gradients", gradients);
  synchronize();
}

void host_updates_states_that_go_up(bool mistake) {
  const ThreeStreams s;
  const auto moments = pinned(1);
  const auto on_device = filled(0);
  synchronize();
  on(s.side, [&] { start_copy(on_device, moments); });
  if (!mistake) s.side.synchronize();
  host_reads("update on the host", moments);
  host_writes("update on the host", moments);
  synchronize();
}

// A delayed update runs beside the next forward, whose gathers take the parameters up.
void delayed_update_writes_parameters_that_go_up(bool mistake) {
  const ThreeStreams s;
  const std::array slices{pinned(1), pinned(2)};
  const auto unit = filled(0, 0, 2 * kNumel);
  synchronize();
  std::vector<Event> went_up;
  for (size_t i = 0; i < 2; ++i) {
    on(s.side,
       [&] { start_copy(unit.narrow(0, static_cast<int64_t>(i) * kNumel, kNumel), slices.at(i)); });
    went_up.push_back(record(s.side));
  }
  order(s.main, s.side);
  const auto y = unit * 2;
  for (size_t i = 0; i < 2; ++i) {
    went_up[mistake ? 0 : i].synchronize();
    host_writes("delayed update", slices.at(i));
  }
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

void pinned_buffer_goes_back_to_its_pool_too_early(bool mistake) {
  const ThreeStreams s;
  std::deque<Tensor> pool{pinned(0)};
  const auto x = filled(0);
  for (int unit = 0; unit < 2; ++unit) {
    const auto buffer = pool.front();
    pool.pop_front();
    host_writes("fill a unit", buffer);
    start_copy(x, buffer);
    if (!mistake) s.main.synchronize();
    pool.push_back(buffer);
  }
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

void disk_fills_a_buffer_that_goes_up(bool mistake) {
  const ThreeStreams s;
  const auto buffer = pinned(0);
  const auto states = filled(0);
  Event went_up(c10::kPrivateUse1);
  for (int unit = 0; unit < 2; ++unit) {
    if (unit > 0 && !mistake) went_up.synchronize();
    host_writes("read from disk", buffer);
    start_copy(states, buffer);
    went_up.record(s.main);
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

// facebookresearch/fairscale pull request 496.
void host_update_before_the_gradient_came(bool mistake) {
  const ThreeStreams s;
  const auto weight = pinned(1), gradient = pinned(0);
  const auto on_device = filled(1);
  order(s.side, s.main);
  Event came(c10::kPrivateUse1);
  on(s.side, [&] {
    if (mistake) came.record(s.side);
    start_copy(gradient, on_device);
    if (!mistake) came.record(s.side);
  });
  came.synchronize();
  host_reads("update on the host", gradient);
  host_writes("update on the host", weight);
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

// The next micro-batch's gradient comes down to where the host still reads the one before.
void host_adds_up_while_the_next_gradient_comes_down(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1);
  const auto staging = pinned(0), sum = pinned(0);
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    start_copy(staging, gradient);
    const Event came = record(s.main);
    if (micro_batch == 0 || !mistake) came.synchronize();
    host_reads("add up on the host", staging);
    host_writes("add up on the host", sum);
  }
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

void disk_takes_what_has_not_come_down(bool mistake) {
  const ThreeStreams s;
  const auto states = filled(1);
  const auto buffer = pinned(0);
  synchronize();
  states.add_(1);
  order(s.side, s.main);
  on(s.side, [&] { start_copy(buffer, states); });
  (mistake ? s.main : s.side).synchronize();
  host_reads("write to disk", buffer);
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

void parameters_come_up_while_they_are_used(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1);
  const auto updated = pinned(2);
  synchronize();
  const auto y = weight * 2;
  if (!mistake) order(s.side, s.main);
  on(s.side, [&] { start_copy(weight, updated); });
  synchronize();
}

void activation_is_used_before_it_is_back(bool mistake) {
  const ThreeStreams s;
  const auto kept = pinned(1);
  const auto activation = on(s.side, [&] {
    auto back = filled(0);
    start_copy(back, kept);
    return back;
  });
  if (!mistake) order(s.main, s.side);
  const auto y = activation * 2;
  synchronize();
}

// deepspeedai/DeepSpeed pull request 1219: copies that overlap raced with the reduction.
void gradient_goes_down_before_it_is_reduced(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1), kept = pinned(0);
  synchronize();
  on(s.side, [&] { gradient.div_(2); });
  order(s.third, s.main);
  if (!mistake) order(s.third, s.side);
  on(s.third, [&] { start_copy(kept, gradient); });
  synchronize();
}

void gradient_is_overwritten_while_it_goes_down(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(0), kept = pinned(0);
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    if (micro_batch > 0 && !mistake) order(s.main, s.side);
    gradient.fill_(micro_batch);
    order(s.side, s.main);
    on(s.side, [&] { start_copy(kept, gradient); });
  }
  synchronize();
}

// An asynchronous checkpoint copies the weights down beside the next step.
void weights_are_updated_while_a_snapshot_is_taken(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1), snapshot = pinned(0);
  order(s.side, s.main);
  on(s.side, [&] { start_copy(snapshot, weight); });
  const auto y = weight * 2;  // forward may run beside it
  if (!mistake) order(s.main, s.side);
  weight.sub_(0.5);
  synchronize();
}

// The next layer's activation goes to the pinned memory of one that is still coming back.
void activation_store_is_overwritten_before_it_came_back(bool mistake) {
  const ThreeStreams s;
  const auto first = filled(1), second = filled(2), store = pinned(0);
  synchronize();
  on(s.side, [&] { start_copy(store, first); });
  order(s.third, s.side);
  const auto back = on(s.third, [&] { return store.to(device(), /*non_blocking=*/true); });
  if (!mistake) order(s.side, s.third);
  on(s.side, [&] { start_copy(store, second); });
  synchronize();
}

// Parameters on the host, updated on the device: they go up for the next gather on another stream.
void parameter_goes_up_before_its_update_came_down(bool mistake) {
  const ThreeStreams s;
  const auto updated = filled(1), slice = pinned(0), unit = filled(0);
  synchronize();
  updated.sub_(0.5);
  order(s.side, s.main);
  on(s.side, [&] { start_copy(slice, updated); });
  order(s.third, mistake ? s.main : s.side);
  on(s.third, [&] { start_copy(unit, slice); });
  synchronize();
}

}  // namespace

std::vector<Mistake> mistakes_with_the_host() {
  return {
      {"pinned_buffer_is_filled_again", pinned_buffer_is_filled_again,
       "host memory: the write by fill the next batch"},
      {"one_event_for_two_staging_buffers", one_event_for_two_staging_buffers, host_wait_for(1)},
      {"host_fills_gradients_that_go_up", host_fills_gradients_that_go_up, host_wait_for(1)},
      {"host_updates_states_that_go_up", host_updates_states_that_go_up,
       "the write by update on the host"},
      {"delayed_update_writes_parameters_that_go_up", delayed_update_writes_parameters_that_go_up,
       "the write by delayed update"},
      {"copy_up_is_enqueued_before_the_update", copy_up_is_enqueued_before_the_update,
       host_wait_for(0)},
      {"pinned_buffer_goes_back_to_its_pool_too_early",
       pinned_buffer_goes_back_to_its_pool_too_early, "the write by fill a unit"},
      {"pinned_memory_is_unregistered_while_a_copy_reads_it",
       pinned_memory_is_unregistered_while_a_copy_reads_it, "the write by unregister"},
      {"learning_rate_changes_while_the_update_reads_it",
       learning_rate_changes_while_the_update_reads_it, "the write by set the learning rate"},
      {"disk_fills_a_buffer_that_goes_up", disk_fills_a_buffer_that_goes_up,
       "the write by read from disk"},
      {"loss_is_read_before_it_came", loss_is_read_before_it_came, "the read by read the loss"},
      {"host_waits_for_another_stream", host_waits_for_another_stream, host_wait_for(1)},
      {"host_update_before_the_gradient_came", host_update_before_the_gradient_came,
       "the read by update on the host"},
      {"host_waits_for_the_first_of_two_pieces", host_waits_for_the_first_of_two_pieces,
       "race on 512 bytes, host memory: the read by update on the host"},
      {"host_waits_for_one_of_two_streams", host_waits_for_one_of_two_streams, host_wait_for(2)},
      {"host_adds_up_while_the_next_gradient_comes_down",
       host_adds_up_while_the_next_gradient_comes_down, "the read by add up on the host"},
      {"host_polls_a_flag_that_the_device_writes", host_polls_a_flag_that_the_device_writes,
       "the read by skip the step"},
      {"disk_takes_what_has_not_come_down", disk_takes_what_has_not_come_down,
       "the read by write to disk"},
      {"two_streams_copy_to_one_buffer", two_streams_copy_to_one_buffer,
       "host memory: the write by copy to the host"},
      {"parameters_come_up_while_they_are_used", parameters_come_up_while_they_are_used,
       wait_of(1, 0)},
      {"activation_is_used_before_it_is_back", activation_is_used_before_it_is_back, wait_of(0, 1)},
      {"gradient_goes_down_before_it_is_reduced", gradient_goes_down_before_it_is_reduced,
       wait_of(2, 1)},
      {"gradient_is_overwritten_while_it_goes_down", gradient_is_overwritten_while_it_goes_down,
       wait_of(0, 1)},
      {"weights_are_updated_while_a_snapshot_is_taken",
       weights_are_updated_while_a_snapshot_is_taken, wait_of(0, 1)},
      {"activation_store_is_overwritten_before_it_came_back",
       activation_store_is_overwritten_before_it_came_back, wait_of(1, 2)},
      {"parameter_goes_up_before_its_update_came_down",
       parameter_goes_up_before_its_update_came_down, wait_of(2, 1)},
  };
}

}  // namespace zero::simulated
