// Sums over hosts: reduce-scatter and all-reduce.
#include <algorithm>
#include <vector>

#include "zero/comm/array_views.h"
#include "zero/comm/hosts_algorithms.h"
#include "zero/comm/reduce_kernels.h"

namespace zero::comm {
namespace {

// Sums arrays of N slices of `n` elements, host by host: each rank gets the sum of its own slice.
// Ranks of one host add up in shared memory first, chunk by chunk; a rank that is alone on its host
// sends its input.
class SliceSums {
 public:
  SliceSums(HostsLinks& links, HostsCall& call, const at::Tensor& input, int64_t n)
      : links_(links),
        call_(call),
        input_(input),
        n_(n),
        codec_(make_codec(call.call.wire, links.alone() ? input.scalar_type()
                                                        : partial_dtype(input.scalar_type()))) {
    if (codec_->is_raw()) return;
    for (auto* room : {&outward_room_, &homeward_room_})
      *room = links.borrow(call, links.chunk_bytes());
  }

  // Sends each other host this host's sum of the slice that its rank at this place owns.
  void send() {
    const int64_t step = codec_->chunk_numel(links_.chunk_bytes());
    for (int64_t begin = 0; begin < n_; begin += step) {
      for (int d = 1; d <= links_.others(); ++d)
        send_chunk(links_.host_after(d), {.peer = d - 1, .slice_numel = n_, .begin = begin},
                   std::min(step, n_ - begin));
    }
  }

  // output (n) = the sums of all hosts for this rank's slice, added in the order of hosts.
  void receive(const at::Tensor& output) {
    std::vector<const std::byte*> terms(static_cast<size_t>(links_.hosts()));
    links_.receive_chunks(n_, *codec_, [&](const HostsLinks::Coming& chunk) {
      auto own = slice(links_.here(), chunk.begin, chunk.numel);
      if (!links_.alone()) {
        own = as_dtype(chunk.spare, chunk.numel, codec_->dtype());
        add_up_here(Phase::homeward, own, links_.here(), chunk.begin);
      }
      terms[static_cast<size_t>(links_.here())] = bytes_of(own);
      for (int d = 1; d <= links_.others(); ++d) {
        const int from = links_.host_before(d);
        auto& term = terms[static_cast<size_t>(from)];
        term = chunk.message(d);
        if (codec_->adds_messages()) continue;
        const auto values = links_.unpacked(d, chunk.numel, codec_->dtype());
        links_.receive_rest(from, codec_->unpack(values, term));
        term = bytes_of(values);
      }
      Codec::Room room;
      if (homeward_room_.defined())
        room = {static_cast<float*>(homeward_room_.data_ptr()),
                static_cast<float*>(chunk.spare.data_ptr())};
      codec_->add(part(output, chunk.begin, chunk.numel), terms, links_.here(), room);
    });
  }

 private:
  // Returns a stretch of this rank's input: a part of the slice that the rank at this place on
  // `host` owns.
  at::Tensor slice(int host, int64_t begin, int64_t numel) const {
    return part(input_, host * n_ * links_.local_size() + begin, numel);
  }

  // sums = the sums over this host's ranks of a stretch of the slices that the ranks of `host` own.
  // Each rank here gets the sums for the rank at its place.
  void add_up_here(Phase phase, const at::Tensor& sums, int host, int64_t begin) const {
    const int64_t first = host * n_ * links_.local_size() + begin;
    const auto slices = at::from_blob(bytes_of(input_) + first * input_.element_size(),
                                      {links_.local_size(), sums.numel()}, {n_, 1},
                                      at::TensorOptions(input_.scalar_type()));
    links_.run_local(phase, call_, Op::reduce_scatter, sums, slices);
  }

  void send_chunk(int host, const SumMessage& of, int64_t numel) {
    auto values = slice(host, of.begin, numel);
    if (links_.alone() && codec_->is_raw()) {
      links_.depart(call_, host, Channel::reduce, values);
      return;
    }
    const auto chunk = links_.next_leaving(host, codec_->message_bytes(numel));
    if (!links_.alone()) {
      values = as_dtype(codec_->is_raw() ? chunk.message : outward_room_, numel, codec_->dtype());
      add_up_here(Phase::outward, values, host, of.begin);
    }
    const auto rest = codec_->pack(bytes_of(chunk.message), values, of);
    links_.leave(call_, chunk);
    links_.leave_rest(call_, host, rest);
  }

  HostsLinks& links_;
  HostsCall& call_;
  at::Tensor input_;
  int64_t n_;
  std::unique_ptr<Codec> codec_;
  at::Tensor outward_room_;   // for this host's sums before they are coded
  at::Tensor homeward_room_;  // for sums of messages
};

class ReduceScatter final : public HostsAlgorithm {
 public:
  ReduceScatter(HostsLinks& links, HostsCall& call)
      : HostsAlgorithm(links, call),
        sums_(links, call, call.call.input, call.call.output.numel()) {}
  bool sends_in_chunks() const override { return true; }
  void send() override { sums_.send(); }
  void homeward() override {
    links_.check_records(call_);
    sums_.receive(call_.call.output);
  }

 private:
  SliceSums sums_;
};

// A reduce-scatter of N slices and an all-gather of their sums, in place. The elements that are
// left over, or all of a small array, are gathered whole and added by each rank.
class AllReduce final : public HostsAlgorithm {
 public:
  AllReduce(HostsLinks& links, HostsCall& call)
      : HostsAlgorithm(links, call),
        n_(is_small() ? 0 : call.call.input.numel() / links.ranks()),
        sliced_(n_ * links.ranks()),
        sums_(links, call, part(call.call.input, 0, sliced_), n_),
        left_over_(links, call) {}
  bool sends_in_chunks() const override { return true; }
  void open() override { left_over_.start(left_over()); }
  void send() override {
    if (n_ > 0) sums_.send();
  }

  void homeward() override {
    links_.check_records(call_);
    if (n_ > 0) {
      const auto own = slice(links_.here());
      sums_.receive(own);
      call_.sending.wait();  // the ranks of this host have read what is about to be overwritten,
      links_.wait_for_departures(call_);  // and so have the rails
      for (int d = 1; d <= links_.others(); ++d) {
        const int from = links_.host_before(d);
        links_.arrive(call_, from, Channel::homeward, slice(from));
      }
      for (int d = 1; d <= links_.others(); ++d)
        links_.depart(call_, links_.host_after(d), Channel::homeward, own);
      const int64_t block = n_ * links_.local_size();
      for (int d = 0; d <= links_.others(); ++d) {
        const int from = links_.host_before(d);
        links_.wait_for(call_, from);
        if (!links_.alone())
          links_.run_local(Phase::homeward, call_, Op::all_gather,
                           part(call_.call.input, from * block, block), slice(from));
      }
    }
    add_left_over();
  }

 private:
  bool is_small() const {
    return links_.control() ||
           static_cast<int64_t>(call_.call.input.nbytes()) * links_.ranks() <= kSmallCall;
  }
  at::Tensor slice(int host) const { return part(call_.call.input, links_.rank_at(host) * n_, n_); }
  at::Tensor left_over() const {
    return part(call_.call.input, sliced_, call_.call.input.numel() - sliced_);
  }
  void add_left_over() {
    const auto values = left_over();
    const auto bytes = static_cast<int64_t>(span_of(values).size());
    if (bytes == 0) return;
    const auto all = left_over_.finish();
    std::vector<const std::byte*> inputs;
    for (int host = 0; host < links_.hosts(); ++host) {
      for (int r = 0; r < links_.local_size(); ++r)
        inputs.push_back(bytes_of(all) + (r * links_.hosts() + host) * bytes);
    }
    add_arrays(values, inputs, values.scalar_type(), links_.local_size());
  }

  int64_t n_;       // elements of a slice
  int64_t sliced_;  // elements of all slices
  SliceSums sums_;
  SmallGather left_over_;
};

}  // namespace

std::unique_ptr<HostsAlgorithm> make_sum(HostsLinks& links, HostsCall& call) {
  if (call.call.op == Op::reduce_scatter) return std::make_unique<ReduceScatter>(links, call);
  return std::make_unique<AllReduce>(links, call);
}

}  // namespace zero::comm
