// Mistakes with the life of device memory that several streams use.
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

// ---- memory is handed on by the host, who is ahead

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

// ---- which bytes

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
      {"storage_is_emptied_while_it_is_used", storage_is_emptied_while_it_is_used, record_of(1)},
      {"whole_is_freed_while_a_slice_is_read", whole_is_freed_while_a_slice_is_read, record_of(1)},
      {"contiguous_copy_is_not_recorded", contiguous_copy_is_not_recorded, record_of(1)},
      {"second_consumer_is_not_recorded", second_consumer_is_not_recorded, record_of(2)},
      {"owner_is_recorded_and_not_the_user", owner_is_recorded_and_not_the_user, record_of(1)},
      {"allocated_within_the_scope_of_another_stream", allocated_within_the_scope_of_another_stream,
       record_of(0)},
      {"limiter_frees_before_the_event", limiter_frees_before_the_event, record_of(0)},
      {"slices_overlap_by_one_element", slices_overlap_by_one_element, wait_of(2, 1)},
      {"kernel_uses_what_was_freed", kernel_uses_what_was_freed,
       "memory that is not allocated: fill"},
      {"table_of_addresses_outlives_a_swap", table_of_addresses_outlives_a_swap,
       "memory that is not allocated: fused update"},
  };
}

}  // namespace zero::simulated
