// Mistakes of ranks around their collectives.
#include <array>
#include <functional>
#include <vector>

#include "tests/device/collectives.h"
#include "tests/device/mistakes.h"

namespace zero::simulated {
namespace {

using at::Tensor;
using c10::Event;

// The streams and device tensors that a rank has when its part begins.
struct Rank : ThreeStreams {
  explicit Rank(int r)
      : ThreeStreams(r),
        index(r),
        whole(filled(1, r)),
        slice(filled(2, r).narrow(0, 0, kNumel / 2)) {}
  Tensor empty(int64_t numel) const { return at::empty({numel}, whole.options()); }
  int index;
  Tensor whole, slice;
};

void ranks(int number, const std::function<void(Rank&)>& body) {
  run_ranks(number, [&](int r) {
    Rank rank(r);
    rank.main.synchronize();  // what it starts from is there
    body(rank);
    for (const auto& stream : {rank.main, rank.side, rank.third}) stream.synchronize();
  });
}
void two_ranks(const std::function<void(Rank&, Collectives&)>& body) {
  Collectives collectives(2);
  ranks(2, [&](Rank& r) { body(r, collectives); });
}

// Two hosts of two ranks each: ranks of a host, and the ranks of the same number on both.
struct TwoHosts {
  std::array<Collectives, 2> of_host{Collectives(2), Collectives(2)};
  std::array<Collectives, 2> across{Collectives(2), Collectives(2)};
};
void four_ranks(const std::function<void(Rank&, TwoHosts&)>& body) {
  TwoHosts hosts;
  ranks(4, [&](Rank& r) { body(r, hosts); });
}

// ---- what is sent is not there yet

void reduced_before_the_gradient(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto gradient = r.whole * 2;
    if (!mistake) order(r.side, r.main);
    on(r.side, [&] { collectives.reduce_scatter(r.index, gradient, r.slice); });
    r.side.synchronize();
  });
}

// Hooks copy into the bucket on several streams; the reduction waits for the current one.
// deepspeedai/DeepSpeed issue 8061.
void reduced_before_all_streams_have_filled_the_bucket(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto bucket = r.whole.clone(), gradient = r.slice.clone();
    order(r.third, r.main);
    bucket.narrow(0, 0, kNumel / 2).copy_(gradient);
    on(r.third, [&] { bucket.narrow(0, kNumel / 2, kNumel / 2).copy_(gradient); });
    order(r.side, r.main);
    if (!mistake) order(r.side, r.third);
    on(r.side, [&] { collectives.reduce_scatter(r.index, bucket, r.slice); });
    r.side.synchronize();
  });
}

// pytorch/pytorch pull request 83665 waits for the optimizer before the gathers of a step.
void gathered_before_the_update(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    r.slice.sub_(0.5);
    if (!mistake) order(r.side, r.main);
    on(r.side, [&] { collectives.all_gather(r.index, r.slice, r.whole); });
  });
}

void broadcast_before_it_is_initialised(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    r.whole.fill_(r.index);
    if (!mistake) order(r.side, r.main);
    on(r.side, [&] { collectives.broadcast(r.index, r.whole, 0); });
  });
}

// ---- what is received is not there yet

void gathered_parameter_is_used_before_it_came(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    on(r.side, [&] { collectives.all_gather(r.index, r.slice, r.whole); });
    if (!mistake) order(r.main, r.side);
    const auto y = r.whole * 2;
  });
}

// `wait` of a collective lets the current stream follow, and operators run on another.
// deepspeedai/DeepSpeed pull request 1170.
void work_is_waited_for_on_another_stream(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    on(r.side, [&] { collectives.all_gather(r.index, r.slice, r.whole); });
    const Event done = record(r.side);
    on(mistake ? r.third : r.main, [&] { done.block(current_stream(r.index)); });
    const auto y = r.whole * 2;
  });
}

// Two gathers, one handle: the one of the second is kept, and the first unit's user waits for none.
void handle_of_the_first_gather_is_lost(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const std::array units{r.empty(kNumel), r.empty(kNumel)};
    const std::array streams{r.side, r.third};
    std::array<Event, 2> handles{Event(c10::kPrivateUse1), Event(c10::kPrivateUse1)};
    for (size_t i = 0; i < 2; ++i) {
      order(streams.at(i), r.main);
      on(streams.at(i), [&] { collectives.all_gather(r.index, r.slice, units.at(i)); });
      handles.at(mistake ? 0 : i).record(streams.at(i));
    }
    for (size_t i = 0; i < 2; ++i) {
      handles.at(i).block(r.main);
      const auto y = units.at(i) * 2;
    }
    r.main.synchronize();
  });
}

void updated_before_the_sum_is_there(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto weight = r.slice.clone();
    order(r.side, r.main);
    on(r.side, [&] { collectives.reduce_scatter(r.index, r.whole, r.slice); });
    if (!mistake) order(r.main, r.side);
    weight.sub_(r.slice);
    r.side.synchronize();
  });
}

void clip_reads_the_norm_before_the_ranks_have_added_it(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto norm = r.slice.pow(2).sum().view({1});
    order(r.side, r.main);
    on(r.side, [&] { collectives.all_reduce(r.index, norm); });
    if (!mistake) order(r.main, r.side);
    r.slice.mul_(1 / norm.sqrt());
    r.side.synchronize();
  });
}

// ---- memory of a collective is used again

void bucket_is_freed_before_it_was_reduced(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    auto bucket = r.whole * 2;
    order(r.side, r.main);
    on(r.side, [&] { collectives.reduce_scatter(r.index, bucket, r.slice); });
    if (!mistake) bucket.record_stream(r.side);
    bucket = Tensor();
  });
}

// The sum belongs to the stream of the reductions, and the update reads it on the caller's.
// pytorch/pytorch pull request 193686.
void sum_is_freed_before_the_update_has_read_it(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    order(r.side, r.main);
    auto sum = on(r.side, [&] {
      auto slice = r.empty(kNumel / 2);
      collectives.reduce_scatter(r.index, r.whole, slice);
      return slice;
    });
    order(r.main, r.side);
    r.slice.sub_(sum);
    if (!mistake) sum.record_stream(r.main);
    sum = Tensor();
  });
}

// NVIDIA/Megatron-LM pull request 6060: gradients of a graph have fixed addresses.
void bucket_is_filled_again_before_it_was_reduced(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto bucket = r.whole * 0;
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      if (micro_batch > 0 && !mistake) order(r.main, r.side);
      bucket.copy_(r.whole);
      order(r.side, r.main);
      on(r.side, [&] { collectives.reduce_scatter(r.index, bucket, r.slice); });
    }
    r.side.synchronize();
  });
}

void two_collectives_share_a_buffer(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    on(r.side, [&] { collectives.all_gather(r.index, r.slice, r.whole); });
    if (!mistake) order(r.third, r.side);
    on(r.third, [&] { collectives.all_gather(r.index, r.slice, r.whole); });
    r.third.synchronize();
  });
}

// Parameters are published while forward runs; the next update writes the slice.
void slice_is_updated_while_the_gather_sends_it(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    on(r.side, [&] { collectives.all_gather(r.index, r.slice, r.whole); });
    if (!mistake) order(r.main, r.side);
    r.slice.sub_(0.5);
  });
}

// The mean over ranks, for the log, is taken in place.
void loss_is_averaged_in_place_while_backward_reads_it(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto loss = r.whole.pow(2).mean().view({1});
    order(r.side, r.main);
    const auto in_backward = loss * r.whole;
    if (!mistake) order(r.side, r.main);
    on(r.side, [&] { collectives.all_reduce(r.index, loss); });
    r.side.synchronize();
  });
}

// A stage of a pipeline sends its output and computes the next one into the same memory.
void stage_overwrites_the_activation_that_it_sends(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      if (r.index == 0) {
        if (micro_batch > 0 && !mistake) order(r.main, r.side);
        r.whole.fill_(micro_batch);
      }
      order(r.side, r.main);
      on(r.side, [&] { collectives.broadcast(r.index, r.whole, 0); });
      if (r.index == 1) {
        order(r.main, r.side);
        const auto y = r.whole * 2;
      }
    }
    r.main.synchronize();
    r.side.synchronize();
  });
}

// ---- two levels

// Sums of a host's ranks are added across hosts. NVIDIA/Megatron-LM pull request 6973 and
// pytorch/pytorch pull request 148780 have a stream for each level.
void added_across_hosts_before_within_them(bool mistake) {
  four_ranks([&](Rank& r, TwoHosts& hosts) {
    const auto host = static_cast<size_t>(r.index / 2), number = static_cast<size_t>(r.index % 2);
    on(r.side, [&] { hosts.of_host.at(host).reduce_scatter(r.index % 2, r.whole, r.slice); });
    if (!mistake) order(r.third, r.side);
    on(r.third, [&] { hosts.across.at(number).all_reduce(r.index / 2, r.slice); });
    r.third.synchronize();
  });
}

}  // namespace

std::vector<Mistake> mistakes_with_collectives() {
  return {
      {"reduced_before_the_gradient", reduced_before_the_gradient,
       "the read by reduce_scatter of rank"},
      {"reduced_before_all_streams_have_filled_the_bucket",
       reduced_before_all_streams_have_filled_the_bucket, wait_of(1, 2, 1, 1)},
      {"gathered_before_the_update", gathered_before_the_update, "the read by all_gather of rank"},
      {"broadcast_before_it_is_initialised", broadcast_before_it_is_initialised, wait_of(1, 0)},
      {"gathered_parameter_is_used_before_it_came", gathered_parameter_is_used_before_it_came,
       wait_of(0, 1)},
      {"work_is_waited_for_on_another_stream", work_is_waited_for_on_another_stream, wait_of(0, 1)},
      {"handle_of_the_first_gather_is_lost", handle_of_the_first_gather_is_lost, wait_of(0, 1)},
      {"updated_before_the_sum_is_there", updated_before_the_sum_is_there, wait_of(0, 1)},
      {"clip_reads_the_norm_before_the_ranks_have_added_it",
       clip_reads_the_norm_before_the_ranks_have_added_it, wait_of(0, 1, 0, 1)},
      {"bucket_is_freed_before_it_was_reduced", bucket_is_freed_before_it_was_reduced,
       record_of(1)},
      {"sum_is_freed_before_the_update_has_read_it", sum_is_freed_before_the_update_has_read_it,
       record_of(0)},
      {"bucket_is_filled_again_before_it_was_reduced", bucket_is_filled_again_before_it_was_reduced,
       wait_of(0, 1)},
      {"two_collectives_share_a_buffer", two_collectives_share_a_buffer, wait_of(2, 1)},
      {"slice_is_updated_while_the_gather_sends_it", slice_is_updated_while_the_gather_sends_it,
       wait_of(0, 1)},
      {"loss_is_averaged_in_place_while_backward_reads_it",
       loss_is_averaged_in_place_while_backward_reads_it, wait_of(1, 0, 1, 0)},
      {"stage_overwrites_the_activation_that_it_sends",
       stage_overwrites_the_activation_that_it_sends, wait_of(0, 1)},
      {"added_across_hosts_before_within_them", added_across_hosts_before_within_them,
       wait_of(2, 1)},
  };
}

}  // namespace zero::simulated
