// Mistakes on one device: between streams, with host memory, of lifetimes, in hooks.
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using c10::Event;
using c10::StreamGuard;

Tensor pinned(double value) {
  return torch::full({kNumel}, value, torch::TensorOptions().pinned_memory(true));
}
Range bytes_of(const Tensor& host, bool write) { return {host.data_ptr(), host.nbytes(), write}; }

// ---- between streams

void reads_before_it_is_written(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  x.add_(1);
  if (!mistake) order(s.side, s.main);
  const StreamGuard guard(s.side);
  const auto y = x * 2;
  synchronize();
}

void overwrites_what_is_read(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  order(s.side, s.main);
  Tensor y;
  {
    const StreamGuard guard(s.side);
    y = x * 2;
  }
  if (!mistake) order(s.main, s.side);
  x.fill_(0);
  synchronize();
}

void two_streams_write(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  order(s.side, s.main);
  {
    const StreamGuard guard(s.side);
    x.fill_(2);
  }
  if (!mistake) order(s.main, s.side);
  x.fill_(3);
  synchronize();
}

void event_is_recorded_too_early(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  Event event(c10::kPrivateUse1);
  if (mistake) event.record(s.main);
  x.add_(1);
  if (!mistake) event.record(s.main);
  event.block(s.side);
  const StreamGuard guard(s.side);
  const auto y = x * 2;
  synchronize();
}

void another_stream_waits(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  order(mistake ? s.third : s.side, s.main);
  const StreamGuard guard(s.side);
  const auto y = x * 2;
  synchronize();
}

void waits_after_the_use(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  if (!mistake) order(s.side, s.main);
  Tensor y;
  {
    const StreamGuard guard(s.side);
    y = x * 2;
  }
  if (mistake) order(s.side, s.main);
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
  {
    const StreamGuard guard(s.third);
    b.add_(1);
    (mistake ? first : second).record(s.third);
  }
  first.block(s.side);
  const StreamGuard guard(s.side);
  const auto y = a * 2;
  synchronize();
}

// ---- host memory

void pinned_buffer_is_filled_again(bool mistake) {
  const ThreeStreams s;
  const auto batch = pinned(1);
  const auto x = filled(0);
  x.copy_(batch, /*non_blocking=*/true);
  if (!mistake) s.main.synchronize();
  host_access("fill the next batch", bytes_of(batch, true));
  batch.fill_(2);
  synchronize();
}

void loss_is_read_before_it_came(bool mistake) {
  const ThreeStreams s;
  const auto loss = filled(1);
  const auto seen = pinned(0);
  seen.copy_(loss, /*non_blocking=*/true);
  const auto came = record(s.main);
  if (!mistake) came.synchronize();
  host_access("read the loss", bytes_of(seen, false));
  synchronize();
}

void host_waits_for_another_stream(bool mistake) {
  const ThreeStreams s;
  const auto x = filled(1);
  const auto seen = pinned(0);
  order(s.side, s.main);
  {
    const StreamGuard guard(s.side);
    seen.copy_(x, /*non_blocking=*/true);
  }
  (mistake ? s.main : s.side).synchronize();
  host_access("read the gradient", bytes_of(seen, false));
  synchronize();
}

void host_update_before_the_gradient_came(bool mistake) {
  const ThreeStreams s;
  const auto weight = pinned(1), gradient = pinned(0);
  const auto on_device = filled(1);
  order(s.side, s.main);
  Event came(c10::kPrivateUse1);
  {
    const StreamGuard guard(s.side);
    if (mistake) came.record(s.side);
    gradient.copy_(on_device, /*non_blocking=*/true);
    if (!mistake) came.record(s.side);
  }
  came.synchronize();
  host_access("update on the host", bytes_of(gradient, false));
  host_access("update on the host", bytes_of(weight, true));
  synchronize();
}

void two_streams_copy_to_one_buffer(bool mistake) {
  const ThreeStreams s;
  const auto a = filled(1), b = filled(2);
  const auto buffer = pinned(0);
  synchronize();
  {
    const StreamGuard guard(s.side);
    buffer.copy_(a, /*non_blocking=*/true);
  }
  if (!mistake) order(s.third, s.side);
  {
    const StreamGuard guard(s.third);
    buffer.copy_(b, /*non_blocking=*/true);
  }
  synchronize();
}

void parameters_come_up_while_they_are_used(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1);
  const auto updated = pinned(2);
  synchronize();
  const auto y = weight * 2;
  if (!mistake) order(s.side, s.main);
  {
    const StreamGuard guard(s.side);
    weight.copy_(updated, /*non_blocking=*/true);
  }
  synchronize();
}

void activation_is_used_before_it_is_back(bool mistake) {
  const ThreeStreams s;
  const auto kept = pinned(1);
  Tensor activation;
  {
    const StreamGuard guard(s.side);
    activation = filled(0);
    activation.copy_(kept, /*non_blocking=*/true);
  }
  if (!mistake) order(s.main, s.side);
  const auto y = activation * 2;
  synchronize();
}

// ---- lifetimes

void freed_while_another_stream_reads(bool mistake) {
  const ThreeStreams s;
  auto x = filled(1);
  order(s.side, s.main);
  const StreamGuard guard(s.side);
  const auto y = x * 2;
  if (!mistake) x.record_stream(s.side);
  x = Tensor();
  synchronize();
}

void activation_is_freed_before_it_went_down(bool mistake) {
  const ThreeStreams s;
  auto activation = filled(1);
  const auto kept = pinned(0);
  order(s.side, s.main);
  {
    const StreamGuard guard(s.side);
    kept.copy_(activation, /*non_blocking=*/true);
  }
  if (!mistake) activation.record_stream(s.side);
  activation = Tensor();
  synchronize();
}

// The gathered parameter belongs to the stream that gathers.
void resharded_while_it_is_used(bool mistake) {
  const ThreeStreams s;
  const auto shard = filled(1);
  synchronize();
  Tensor gathered;
  {
    const StreamGuard guard(s.side);
    gathered = shard * 1;
  }
  order(s.main, s.side);
  const auto y = gathered * 2;
  if (!mistake) order(s.side, s.main);
  gathered = Tensor();
  const StreamGuard guard(s.side);
  const auto next = shard * 3;  // takes the same memory
  synchronize();
}

void storage_is_emptied_while_it_is_used(bool mistake) {
  const ThreeStreams s;
  auto x = filled(1);
  order(s.side, s.main);
  {
    const StreamGuard guard(s.side);
    const auto y = x * 2;
  }
  if (!mistake) order(s.main, s.side);
  x.set_();  // the storage goes, the tensor stays
  synchronize();
}

void kernel_uses_what_was_freed(bool mistake) {
  void* memory = allocate(1024);
  const auto fill = [&] {
    launch("fill", {{memory, 1024, true}},
           [data = backing(memory)] { std::memset(data, 0, 1024); });
  };
  fill();
  if (mistake) release(memory);
  fill();
  if (!mistake) release(memory);
  synchronize();
}

void slot_is_gathered_into_while_it_is_used(bool mistake) {
  const ThreeStreams s;
  const auto slot = filled(0), first = filled(1), second = filled(2);
  synchronize();
  const auto gather = [&](const Tensor& shard) {
    const StreamGuard guard(s.side);
    slot.copy_(shard);
  };
  gather(first);
  order(s.main, s.side);
  const auto y = slot * 2;
  if (!mistake) order(s.side, s.main);
  gather(second);
  synchronize();
}

void operator_does_not_wait_for_its_gather(bool mistake) {
  const ThreeStreams s;
  const auto slot = filled(0), shard = filled(1);
  synchronize();
  {
    const StreamGuard guard(s.side);
    slot.copy_(shard);
  }
  if (!mistake) order(s.main, s.side);
  const auto y = slot * 2;
  synchronize();
}

// ---- autograd

// A hook runs on the stream of its parameter's operators, which need not be the default one.
void hook_takes_the_default_stream(bool mistake) {
  const auto weight = filled(1).requires_grad_();
  synchronize();
  Tensor norm;
  weight.register_hook([&](const Tensor& gradient) {
    const StreamGuard guard(mistake ? stream(0) : current_stream());
    norm = gradient.norm();
  });
  const StreamGuard guard(stream(2));
  const auto loss = (weight * weight).sum();
  loss.backward();
  synchronize();
}

void updated_while_backward_reads_it(bool mistake) {
  const ThreeStreams s;
  const auto weight = filled(1), gradient = filled(1);
  synchronize();
  const auto y = weight * 2;
  if (!mistake) order(s.side, s.main);
  {
    const StreamGuard guard(s.side);
    weight.sub_(gradient);
  }
  synchronize();
}

void finite_flag_is_read_too_early(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1), weight = filled(1);
  synchronize();
  Tensor finite;
  {
    const StreamGuard guard(s.side);
    finite = gradient.isfinite().all();
  }
  if (!mistake) order(s.main, s.side);
  weight.mul_(finite);
  synchronize();
}

const std::vector<Mistake> kMistakes{
    {"reads_before_it_is_written", reads_before_it_is_written,
     "stream 1 of device 0 has to wait for an event recorded on stream 0"},
    {"overwrites_what_is_read", overwrites_what_is_read,
     "is not ordered after the read by aten::mul"},
    {"two_streams_write", two_streams_write, "is not ordered after the write by aten::fill_"},
    {"event_is_recorded_too_early", event_is_recorded_too_early,
     "stream 1 of device 0 has to wait"},
    {"another_stream_waits", another_stream_waits, "stream 1 of device 0 has to wait"},
    {"waits_after_the_use", waits_after_the_use, "stream 1 of device 0 has to wait"},
    {"event_is_recorded_again", event_is_recorded_again,
     "has to wait for an event recorded on stream 0 of device 0"},
    {"pinned_buffer_is_filled_again", pinned_buffer_is_filled_again,
     "host memory: the write by fill the next batch"},
    {"loss_is_read_before_it_came", loss_is_read_before_it_came, "the read by read the loss"},
    {"host_waits_for_another_stream", host_waits_for_another_stream,
     "has to wait for stream 1 of device 0"},
    {"host_update_before_the_gradient_came", host_update_before_the_gradient_came,
     "the read by update on the host"},
    {"two_streams_copy_to_one_buffer", two_streams_copy_to_one_buffer,
     "host memory: the write by copy to the host"},
    {"parameters_come_up_while_they_are_used", parameters_come_up_while_they_are_used,
     "has to wait for an event recorded on"},
    {"activation_is_used_before_it_is_back", activation_is_used_before_it_is_back,
     "has to wait for an event recorded on"},
    {"freed_while_another_stream_reads", freed_while_another_stream_reads,
     "record_stream(stream 1 of device 0)"},
    {"activation_is_freed_before_it_went_down", activation_is_freed_before_it_went_down,
     "record_stream(stream 1 of device 0)"},
    {"resharded_while_it_is_used", resharded_while_it_is_used,
     "record_stream(stream 0 of device 0)"},
    {"storage_is_emptied_while_it_is_used", storage_is_emptied_while_it_is_used,
     "record_stream(stream 1 of device 0)"},
    {"kernel_uses_what_was_freed", kernel_uses_what_was_freed,
     "memory that is not allocated: fill"},
    {"slot_is_gathered_into_while_it_is_used", slot_is_gathered_into_while_it_is_used,
     "has to wait for an event recorded on"},
    {"operator_does_not_wait_for_its_gather", operator_does_not_wait_for_its_gather,
     "has to wait for an event recorded on"},
    {"hook_takes_the_default_stream", hook_takes_the_default_stream,
     "has to wait for an event recorded on"},
    {"updated_while_backward_reads_it", updated_while_backward_reads_it,
     "has to wait for an event recorded on"},
    {"finite_flag_is_read_too_early", finite_flag_is_read_too_early,
     "has to wait for an event recorded on"},
};

class Mistakes : public testing::TestWithParam<Mistake> {};

TEST_P(Mistakes, AreReportedInEveryRun) { expect_reported_in_every_run(GetParam()); }

INSTANTIATE_TEST_SUITE_P(ByHand, Mistakes, testing::ValuesIn(kMistakes),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zero::simulated
