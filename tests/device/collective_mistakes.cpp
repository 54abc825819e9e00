// Mistakes of ranks around their collectives.
#include <array>
#include <functional>
#include <utility>
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

// The mark stands before the copy of the last gradient into the bucket.
void reduced_before_the_last_gradient_is_in_the_bucket(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto bucket = r.whole * 0;
    Event filled(c10::kPrivateUse1);
    bucket.narrow(0, 0, kNumel / 2).copy_(r.slice);
    if (mistake) filled.record(r.main);
    bucket.narrow(0, kNumel / 2, kNumel / 2).copy_(r.slice);
    if (!mistake) filled.record(r.main);
    filled.block(r.side);
    on(r.side, [&] { collectives.reduce_scatter(r.index, bucket, r.slice); });
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

// A second copy of the slices, for gathers within a host, is made beside the first gather of it.
// deepspeedai/DeepSpeed pull request 5216.
void second_partition_is_gathered_before_it_is_made(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto second = r.empty(kNumel / 2);
    order(r.third, r.main);
    on(r.third, [&] { second.copy_(r.slice); });
    order(r.side, mistake ? r.main : r.third);
    on(r.side, [&] { collectives.all_gather(r.index, second, r.whole); });
    r.side.synchronize();
    r.third.synchronize();
  });
}

// Quantised numbers and their scales are gathered one after the other.
void scales_are_gathered_before_they_are_there(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto scale = r.empty(1), scales = r.empty(2);
    order(r.third, r.main);
    on(r.third, [&] { scale.copy_(r.slice.abs().max()); });
    const auto numbers = r.slice.sign();
    order(r.side, r.main);
    if (!mistake) order(r.side, r.third);
    on(r.side, [&] {
      collectives.all_gather(r.index, numbers, r.whole);
      collectives.all_gather(r.index, scale, scales);
    });
    r.side.synchronize();
  });
}

void broadcast_before_it_is_initialised(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    r.whole.fill_(r.index);
    if (!mistake) order(r.side, r.main);
    on(r.side, [&] { collectives.broadcast(r.index, r.whole, 0); });
  });
}

void norm_before_all_sums_are_there(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    order(r.side, r.main);
    on(r.side, [&] { collectives.reduce_scatter(r.index, r.whole, r.slice); });
    if (!mistake) order(r.third, r.side);
    on(r.third, [&] {
      const auto norm = r.slice.pow(2).sum().view({1});
      collectives.all_reduce(r.index, norm);
    });
    r.third.synchronize();
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

// The callback at the end of backward, which waits for the reductions, is not called.
// pytorch/pytorch pull request 144535.
void end_of_backward_does_not_wait_for_the_reductions(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto weight = filled(1, r.index).requires_grad_();
    (weight * r.whole).sum().backward();
    order(r.side, r.main);
    on(r.side, [&] { collectives.all_reduce(r.index, weight.grad()); });
    if (!mistake) order(r.main, r.side);
    const torch::NoGradGuard no_grad;
    weight.sub_(weight.grad());
    r.main.synchronize();
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

// The flag is copied to where the scaler reads it, and only then its reduction is waited for.
// pytorch/pytorch pull request 115710.
void overflow_flag_is_copied_before_the_ranks_have_agreed(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto found = r.slice.isinf().any().to(at::kFloat).view({1}), seen = r.empty(1);
    order(r.side, r.main);
    on(r.side, [&] { collectives.all_reduce(r.index, found); });
    if (mistake) seen.copy_(found);
    order(r.main, r.side);
    if (!mistake) seen.copy_(found);
    r.main.synchronize();
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

// A gather of several parameters arrives as one array, which operators copy out of.
void flat_output_is_freed_before_it_was_copied_out(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto parameter = r.empty(kNumel);
    for (int unit = 0; unit < 2; ++unit) {
      auto flat = on(r.side, [&] {
        auto all = r.empty(kNumel);
        collectives.all_gather(r.index, r.slice, all);
        return all;
      });
      order(r.main, r.side);
      parameter.copy_(flat);
      if (!mistake) order(r.side, r.main);
      flat = Tensor();
    }
    r.main.synchronize();
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

// Two buckets by turns, which is no order by itself: a mark for each is missing.
// deepspeedai/DeepSpeed issue 5545.
void second_turn_of_two_buckets_does_not_wait(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const std::array buckets{r.empty(kNumel), r.empty(kNumel)};
    std::array<Event, 2> reduced{Event(c10::kPrivateUse1), Event(c10::kPrivateUse1)};
    for (size_t i = 0; i < 4; ++i) {
      if (!mistake) reduced.at(i % 2).block(r.main);
      buckets.at(i % 2).copy_(r.whole);
      order(r.side, r.main);
      on(r.side, [&] { collectives.reduce_scatter(r.index, buckets.at(i % 2), r.slice); });
      reduced.at(i % 2).record(r.side);
    }
    r.side.synchronize();
  });
}

void send_buffer_takes_the_next_slice_too_early(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto buffer = r.empty(kNumel / 2);
    const std::array units{r.empty(kNumel), r.empty(kNumel)};
    for (size_t i = 0; i < 2; ++i) {
      if (i > 0 && !mistake) order(r.main, r.side);
      buffer.copy_(r.slice);
      order(r.side, r.main);
      on(r.side, [&] { collectives.all_gather(r.index, buffer, units.at(i)); });
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

void gradients_are_cleared_before_they_were_reduced(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto gradient = r.whole * 2;
    order(r.side, r.main);
    on(r.side, [&] { collectives.all_reduce(r.index, gradient); });
    if (!mistake) order(r.main, r.side);
    gradient.zero_();
    r.side.synchronize();
  });
}

void accumulated_while_it_is_reduced(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto sum = r.whole * 2, next = r.whole * 3;
    order(r.side, r.main);
    on(r.side, [&] { collectives.all_reduce(r.index, sum); });
    if (!mistake) order(r.main, r.side);
    sum.add_(next);
    r.side.synchronize();
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

void next_reduction_overwrites_the_sum_that_the_update_reads(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto weight = r.empty(kNumel / 2).zero_();
    for (int unit = 0; unit < 2; ++unit) {
      if (unit == 0 || !mistake) order(r.side, r.main);
      on(r.side, [&] { collectives.reduce_scatter(r.index, r.whole, r.slice); });
      order(r.main, r.side);
      weight.sub_(r.slice);
    }
    r.main.synchronize();
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

// ---- buffers of the model

// The statistics of rank 0 go to all ranks while forward of the next step updates them.
void statistics_are_broadcast_while_batch_norm_updates_them(bool mistake) {
  two_ranks([&](Rank& r, Collectives& collectives) {
    const auto x = r.whole.view({64, 4}), mean = r.empty(4).zero_(), variance = r.empty(4).fill_(1);
    const auto forward = [&] {
      return at::batch_norm(x, {}, {}, mean, variance, /*training=*/true, 0.1, 1e-5, false);
    };
    auto y = forward();
    order(r.side, r.main);
    on(r.side, [&] { collectives.broadcast(r.index, mean, 0); });
    if (!mistake) order(r.main, r.side);
    y = forward();
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

// Slices come from the other host, and then the ranks of a host exchange what came.
void gathered_within_a_host_before_across(bool mistake) {
  four_ranks([&](Rank& r, TwoHosts& hosts) {
    const auto host = static_cast<size_t>(r.index / 2), number = static_cast<size_t>(r.index % 2);
    const auto mine = r.slice.narrow(0, 0, kNumel / 4), came = r.empty(kNumel / 2);
    order(r.side, r.main);
    order(r.third, r.main);
    on(r.side, [&] { hosts.across.at(number).all_gather(r.index / 2, mine, came); });
    if (!mistake) order(r.third, r.side);
    on(r.third, [&] { hosts.of_host.at(host).all_gather(r.index % 2, came, r.whole); });
    r.third.synchronize();
  });
}

// The next micro-batch's sum within a host goes to where the sum across hosts is under way.
void next_sum_of_a_host_overwrites_what_crosses(bool mistake) {
  four_ranks([&](Rank& r, TwoHosts& hosts) {
    const auto host = static_cast<size_t>(r.index / 2), number = static_cast<size_t>(r.index % 2);
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      if (micro_batch > 0 && !mistake) order(r.side, r.third);
      on(r.side, [&] { hosts.of_host.at(host).reduce_scatter(r.index % 2, r.whole, r.slice); });
      order(r.third, r.side);
      on(r.third, [&] { hosts.across.at(number).all_reduce(r.index / 2, r.slice); });
    }
    r.third.synchronize();
  });
}

}  // namespace

std::vector<Mistake> mistakes_with_collectives() {
  return {
      {"reduced_before_the_gradient", reduced_before_the_gradient,
       "the read by reduce_scatter of rank"},
      {"reduced_before_the_last_gradient_is_in_the_bucket",
       reduced_before_the_last_gradient_is_in_the_bucket, wait_of(1, 0)},
      {"reduced_before_all_streams_have_filled_the_bucket",
       reduced_before_all_streams_have_filled_the_bucket, wait_of(1, 2, 1, 1)},
      {"gathered_before_the_update", gathered_before_the_update, "the read by all_gather of rank"},
      {"second_partition_is_gathered_before_it_is_made",
       second_partition_is_gathered_before_it_is_made, wait_of(1, 2)},
      {"scales_are_gathered_before_they_are_there", scales_are_gathered_before_they_are_there,
       wait_of(1, 2)},
      {"broadcast_before_it_is_initialised", broadcast_before_it_is_initialised, wait_of(1, 0)},
      {"norm_before_all_sums_are_there", norm_before_all_sums_are_there, wait_of(2, 1)},
      {"gathered_parameter_is_used_before_it_came", gathered_parameter_is_used_before_it_came,
       wait_of(0, 1)},
      {"work_is_waited_for_on_another_stream", work_is_waited_for_on_another_stream, wait_of(0, 1)},
      {"handle_of_the_first_gather_is_lost", handle_of_the_first_gather_is_lost, wait_of(0, 1)},
      {"updated_before_the_sum_is_there", updated_before_the_sum_is_there, wait_of(0, 1)},
      {"end_of_backward_does_not_wait_for_the_reductions",
       end_of_backward_does_not_wait_for_the_reductions, wait_of(0, 1)},
      {"clip_reads_the_norm_before_the_ranks_have_added_it",
       clip_reads_the_norm_before_the_ranks_have_added_it, wait_of(0, 1, 0, 1)},
      {"overflow_flag_is_copied_before_the_ranks_have_agreed",
       overflow_flag_is_copied_before_the_ranks_have_agreed, wait_of(0, 1, 0, 1)},
      {"bucket_is_freed_before_it_was_reduced", bucket_is_freed_before_it_was_reduced,
       record_of(1)},
      {"sum_is_freed_before_the_update_has_read_it", sum_is_freed_before_the_update_has_read_it,
       record_of(0)},
      {"flat_output_is_freed_before_it_was_copied_out",
       flat_output_is_freed_before_it_was_copied_out, record_of(0)},
      {"bucket_is_filled_again_before_it_was_reduced", bucket_is_filled_again_before_it_was_reduced,
       wait_of(0, 1)},
      {"second_turn_of_two_buckets_does_not_wait", second_turn_of_two_buckets_does_not_wait,
       wait_of(0, 1)},
      {"send_buffer_takes_the_next_slice_too_early", send_buffer_takes_the_next_slice_too_early,
       wait_of(0, 1)},
      {"two_collectives_share_a_buffer", two_collectives_share_a_buffer, wait_of(2, 1)},
      {"gradients_are_cleared_before_they_were_reduced",
       gradients_are_cleared_before_they_were_reduced, wait_of(0, 1)},
      {"accumulated_while_it_is_reduced", accumulated_while_it_is_reduced, wait_of(0, 1)},
      {"slice_is_updated_while_the_gather_sends_it", slice_is_updated_while_the_gather_sends_it,
       wait_of(0, 1)},
      {"next_reduction_overwrites_the_sum_that_the_update_reads",
       next_reduction_overwrites_the_sum_that_the_update_reads, wait_of(1, 0)},
      {"loss_is_averaged_in_place_while_backward_reads_it",
       loss_is_averaged_in_place_while_backward_reads_it, wait_of(1, 0, 1, 0)},
      {"stage_overwrites_the_activation_that_it_sends",
       stage_overwrites_the_activation_that_it_sends, wait_of(0, 1)},
      {"statistics_are_broadcast_while_batch_norm_updates_them",
       statistics_are_broadcast_while_batch_norm_updates_them, wait_of(0, 1)},
      {"added_across_hosts_before_within_them", added_across_hosts_before_within_them,
       wait_of(2, 1)},
      {"gathered_within_a_host_before_across", gathered_within_a_host_before_across, wait_of(2, 1)},
      {"next_sum_of_a_host_overwrites_what_crosses", next_sum_of_a_host_overwrites_what_crosses,
       wait_of(1, 2)},
  };
}

}  // namespace zero::simulated
