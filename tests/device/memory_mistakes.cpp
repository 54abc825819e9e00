// Mistakes with the life of device memory that several streams use.
#include <array>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using c10::Event;

// ---- record_stream is forgotten

void freed_while_another_stream_reads(bool mistake) {
  const ThreeStreams s;
  auto x = filled(1);
  order(s.side, s.main);
  const auto y = on(s.side, [&] { return x * 2; });
  if (!mistake) x.record_stream(s.side);
  x = Tensor();
  synchronize();
}

// meta-pytorch/torchrec pull request 4231.
void activation_is_freed_before_it_went_down(bool mistake) {
  const ThreeStreams s;
  auto activation = filled(1);
  const auto kept = pinned(0);
  order(s.side, s.main);
  on(s.side, [&] { kept.copy_(activation, /*non_blocking=*/true); });
  if (!mistake) activation.record_stream(s.side);
  activation = Tensor();
  synchronize();
}

// NVIDIA/Megatron-LM issue 5788: the storage goes, the tensor stays.
void storage_is_emptied_while_it_is_used(bool mistake) {
  const ThreeStreams s;
  auto x = filled(1);
  order(s.side, s.main);
  on(s.side, [&] { return x * 2; });
  if (!mistake) order(s.main, s.side);
  x.set_();
  synchronize();
}

// The whole is freed, and with it the memory of the slice.
void whole_is_freed_while_a_slice_is_read(bool mistake) {
  const ThreeStreams s;
  auto bucket = filled(1, 0, 2 * kNumel);
  order(s.side, s.main);
  auto slice = bucket.narrow(0, kNumel, kNumel);
  on(s.side, [&] { return slice * 2; });
  if (!mistake) slice.record_stream(s.side);
  bucket = slice = Tensor();
  synchronize();
}

// The side stream does not read the matrix but the copy that `contiguous` made.
void contiguous_copy_is_not_recorded(bool mistake) {
  const ThreeStreams s;
  const auto matrix = filled(1).view({16, 16});
  {
    const auto columns = matrix.t().contiguous();
    order(s.side, s.main);
    on(s.side, [&] { return columns * 2; });
    (mistake ? matrix : columns).record_stream(s.side);
  }
  synchronize();
}

void second_consumer_is_not_recorded(bool mistake) {
  const ThreeStreams s;
  auto gradient = filled(1);
  order(s.side, s.main);
  order(s.third, s.main);
  on(s.side, [&] { return gradient * 2; });
  on(s.third, [&] { return gradient.norm(); });
  gradient.record_stream(s.side);
  if (!mistake) gradient.record_stream(s.third);
  gradient = Tensor();
  synchronize();
}

// The stream that owns the memory is recorded, which says nothing.
void owner_is_recorded_and_not_the_user(bool mistake) {
  const ThreeStreams s;
  auto x = filled(1);
  order(s.side, s.main);
  on(s.side, [&] { return x * 2; });
  x.record_stream(mistake ? s.main : s.side);
  x = Tensor();
  synchronize();
}

// The cast slice belongs to the stream that casts, and the gather reads it on another.
// pytorch/pytorch pull request 91096.
void cast_slice_is_freed_while_the_gather_reads_it(bool mistake) {
  const ThreeStreams s;
  const auto shard = filled(1), unit = filled(0);
  synchronize();
  auto cast = on(s.side, [&] { return shard.to(at::kHalf); });
  order(s.third, s.side);
  on(s.third, [&] { unit.copy_(cast); });
  if (!mistake) cast.record_stream(s.third);
  cast = Tensor();
  synchronize();
}

// The batch belongs to the stream of the copies. NVIDIA/apex issue 304.
void prefetched_batch_is_replaced_while_it_is_read(bool mistake) {
  const ThreeStreams s;
  const auto in_memory = pinned(1);
  const auto fetch = [&] {
    return on(s.side, [&] { return in_memory.to(device(), /*non_blocking=*/true); });
  };
  Tensor batch = fetch();
  for (int step = 0; step < 2; ++step) {
    order(s.main, s.side);
    if (!mistake) batch.record_stream(s.main);
    const auto loss = batch * 2;
    batch = fetch();
  }
  synchronize();
}

// It is used on the main stream alone, but was allocated where the scope of the other had begun.
// pytorch/pytorch pull request 132445 allocates before the scope.
void allocated_within_the_scope_of_another_stream(bool mistake) {
  const ThreeStreams s;
  const auto gradient = filled(1), weight = filled(1);
  const auto empty = [&] { return at::empty_like(gradient); };
  Tensor sum;
  if (!mistake) sum = empty();
  order(s.side, s.main);
  on(s.side, [&] {
    if (mistake) sum = empty();
    sum.copy_(gradient);
  });
  order(s.main, s.side);
  weight.sub_(sum);
  sum = Tensor();
  synchronize();
}

// A block that is replaced on the reductions' stream belongs to the main one, whose next work takes
// the memory. NVIDIA/Megatron-LM pull request 6187.
void sum_is_replaced_on_the_stream_that_does_not_own_it(bool mistake) {
  const ThreeStreams s;
  auto sum = on(mistake ? s.main : s.side, [] { return filled(1); });
  order(s.side, s.main);
  on(s.side, [&] {
    sum.add_(1);
    sum = sum.to(at::kHalf);
  });
  synchronize();
}

// ---- memory is handed on by the host, who is ahead

// The gathered parameter belongs to the stream that gathers.
void resharded_while_it_is_used(bool mistake) {
  const ThreeStreams s;
  const auto shard = filled(1);
  synchronize();
  auto gathered = on(s.side, [&] { return shard * 1; });
  order(s.main, s.side);
  const auto y = gathered * 2;
  if (!mistake) order(s.side, s.main);
  gathered = Tensor();
  on(s.side, [&] { return shard * 3; });  // takes the same memory
  synchronize();
}

void slot_is_gathered_into_while_it_is_used(bool mistake) {
  const ThreeStreams s;
  const auto slot = filled(0), first = filled(1), second = filled(2);
  synchronize();
  on(s.side, [&] { slot.copy_(first); });
  order(s.main, s.side);
  const auto y = slot * 2;
  if (!mistake) order(s.side, s.main);
  on(s.side, [&] { slot.copy_(second); });
  synchronize();
}

void operator_does_not_wait_for_its_gather(bool mistake) {
  const ThreeStreams s;
  const auto slot = filled(0), shard = filled(1);
  synchronize();
  on(s.side, [&] { slot.copy_(shard); });
  if (!mistake) order(s.main, s.side);
  const auto y = slot * 2;
  synchronize();
}

// A pool of buckets without marks: the next one who takes a bucket is another stream.
void pool_hands_out_in_the_order_of_the_host(bool mistake) {
  const ThreeStreams s;
  struct Bucket {
    Tensor memory;
    Event used{c10::kPrivateUse1};
  };
  std::deque<Bucket> free;
  for (int i = 0; i < 2; ++i) free.emplace_back().memory = filled(0);
  for (int unit = 0; unit < 4; ++unit) {
    Bucket bucket = std::move(free.front());
    free.pop_front();
    if (!mistake) bucket.used.block(s.main);
    bucket.memory.fill_(unit);
    order(s.side, s.main);
    on(s.side, [&] { return bucket.memory * 2; });
    bucket.used.record(s.side);
    free.push_back(std::move(bucket));
  }
  synchronize();
}

// A branch on another stream reads the frame too; the mark is of the stream that gives it back.
void frame_goes_back_before_its_last_reader(bool mistake) {
  const ThreeStreams s;
  const auto frame = filled(1), next = filled(2);
  synchronize();
  on(s.third, [&] { return frame * 2; });
  const auto y = frame * 3;
  record(s.main).block(s.side);
  if (!mistake) record(s.third).block(s.side);
  on(s.side, [&] { frame.copy_(next); });
  synchronize();
}

// The input of a reduction is held until the next one begins, which has to wait for it first.
void input_is_not_held_until_it_was_reduced(bool mistake) {
  const ThreeStreams s;
  const auto loss = filled(1), sum = filled(0);
  synchronize();
  Tensor held;
  Event reduced(c10::kPrivateUse1);
  for (int unit = 0; unit < 3; ++unit) {
    const auto gradient = loss * 2;
    if (!mistake) reduced.block(s.main);
    held = gradient;
    order(s.side, s.main);
    on(s.side, [&] { sum.add_(gradient); });
    reduced.record(s.side);
  }
  synchronize();
}

// At most two units are gathered ahead: the host waits until the first of them was used.
void limiter_frees_before_the_event(bool mistake) {
  const ThreeStreams s;
  const auto shard = filled(1);
  synchronize();
  std::deque<std::pair<Tensor, Event>> gathered;
  for (int unit = 0; unit < 4; ++unit) {
    if (gathered.size() == 2) {
      if (!mistake) gathered.front().second.synchronize();
      gathered.pop_front();
    }
    auto whole = on(s.side, [&] { return shard * 1; });
    order(s.main, s.side);
    const auto y = whole * 2;
    gathered.emplace_back(std::move(whole), record(s.main));
  }
  synchronize();
}

// pytorch/pytorch issue 6962: one handle of a library, whose scratch memory both streams use.
void two_streams_share_a_workspace(bool mistake) {
  const ThreeStreams s;
  const auto first = filled(0), second = filled(0);
  synchronize();
  const auto multiply = [](const Tensor& workspace) {
    launch("multiply", {bytes_of(workspace, true)}, [] {});
  };
  multiply(first);
  on(s.side, [&] { multiply(mistake ? first : second); });
  synchronize();
}

// ---- which bytes

// The arena begins again at its start: the new unit lies over the end of one and the start of
// another.
void arena_wraps_over_two_units_and_waits_for_one(bool mistake) {
  const ThreeStreams s;
  const auto arena = filled(0, 0, 4 * kNumel);
  synchronize();
  on(s.side, [&] { return arena.narrow(0, 0, 2 * kNumel) * 2; });
  on(s.third, [&] { return arena.narrow(0, 2 * kNumel, 2 * kNumel) * 2; });
  order(s.main, s.side);
  if (!mistake) order(s.main, s.third);
  arena.narrow(0, kNumel, 2 * kNumel).fill_(1);
  synchronize();
}

// Neighbours that no wait orders, since they share nothing; padding is counted wrongly.
void slices_overlap_by_one_element(bool mistake) {
  const ThreeStreams s;
  const auto flat = filled(0, 0, 2 * kNumel);
  synchronize();
  on(s.side, [&] { flat.narrow(0, 0, kNumel + (mistake ? 1 : 0)).add_(1); });
  on(s.third, [&] { flat.narrow(0, kNumel, kNumel).add_(1); });
  synchronize();
}

// ---- after its end

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

// A fused update keeps a table of addresses; then a parameter gets other memory.
void table_of_addresses_outlives_a_swap(bool mistake) {
  auto weight = filled(1);
  const auto row = [&] { return bytes_of(weight, true); };
  Range table = row();
  weight.set_data(filled(2));
  if (!mistake) table = row();
  launch("fused update", {table}, [] {});
  synchronize();
}

}  // namespace

std::vector<Mistake> mistakes_with_memory() {
  return {
      {"freed_while_another_stream_reads", freed_while_another_stream_reads, record_of(1)},
      {"activation_is_freed_before_it_went_down", activation_is_freed_before_it_went_down,
       record_of(1)},
      {"storage_is_emptied_while_it_is_used", storage_is_emptied_while_it_is_used, record_of(1)},
      {"whole_is_freed_while_a_slice_is_read", whole_is_freed_while_a_slice_is_read, record_of(1)},
      {"contiguous_copy_is_not_recorded", contiguous_copy_is_not_recorded, record_of(1)},
      {"second_consumer_is_not_recorded", second_consumer_is_not_recorded, record_of(2)},
      {"owner_is_recorded_and_not_the_user", owner_is_recorded_and_not_the_user, record_of(1)},
      {"cast_slice_is_freed_while_the_gather_reads_it",
       cast_slice_is_freed_while_the_gather_reads_it, record_of(2)},
      {"prefetched_batch_is_replaced_while_it_is_read",
       prefetched_batch_is_replaced_while_it_is_read, record_of(0)},
      {"allocated_within_the_scope_of_another_stream", allocated_within_the_scope_of_another_stream,
       record_of(0)},
      {"sum_is_replaced_on_the_stream_that_does_not_own_it",
       sum_is_replaced_on_the_stream_that_does_not_own_it, record_of(1)},
      {"resharded_while_it_is_used", resharded_while_it_is_used, record_of(0)},
      {"slot_is_gathered_into_while_it_is_used", slot_is_gathered_into_while_it_is_used,
       wait_of(1, 0)},
      {"operator_does_not_wait_for_its_gather", operator_does_not_wait_for_its_gather,
       wait_of(0, 1)},
      {"pool_hands_out_in_the_order_of_the_host", pool_hands_out_in_the_order_of_the_host,
       wait_of(0, 1)},
      {"frame_goes_back_before_its_last_reader", frame_goes_back_before_its_last_reader,
       wait_of(1, 2)},
      {"input_is_not_held_until_it_was_reduced", input_is_not_held_until_it_was_reduced,
       record_of(1)},
      {"limiter_frees_before_the_event", limiter_frees_before_the_event, record_of(0)},
      {"two_streams_share_a_workspace", two_streams_share_a_workspace, wait_of(1, 0)},
      {"arena_wraps_over_two_units_and_waits_for_one", arena_wraps_over_two_units_and_waits_for_one,
       wait_of(0, 2)},
      {"slices_overlap_by_one_element", slices_overlap_by_one_element, wait_of(2, 1)},
      {"kernel_uses_what_was_freed", kernel_uses_what_was_freed,
       "memory that is not allocated: fill"},
      {"table_of_addresses_outlives_a_swap", table_of_addresses_outlives_a_swap,
       "memory that is not allocated: fused update"},
  };
}

}  // namespace zero::simulated
