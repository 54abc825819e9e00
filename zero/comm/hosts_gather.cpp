// All-gathers between hosts: of few bytes, of uncoded values, and of coded values.
#include <algorithm>

#include "zero/comm/array_views.h"
#include "zero/comm/hosts_algorithms.h"

namespace zero::comm {

void SmallGather::start(const at::Tensor& input) {
  bytes_ = static_cast<int64_t>(span_of(input).size());
  if (bytes_ == 0) return;
  stage_ = part(links_.borrow(call_, links_.hosts() * bytes_), 0, links_.hosts() * bytes_);
  const auto of_host = [&](int host) { return part(stage_, host * bytes_, bytes_); };
  const auto own = of_host(links_.here());
  copy_to(bytes_of(own), input);
  for (int d = 1; d <= links_.others(); ++d) {
    const int from = links_.host_before(d);
    links_.arrive(call_, from, Channel::gather, of_host(from));
  }
  for (int d = 1; d <= links_.others(); ++d)
    links_.depart(call_, links_.host_after(d), Channel::gather, own);
}

at::Tensor SmallGather::finish() {
  for (int host = 0; host < links_.hosts(); ++host) links_.wait_for(call_, host);
  if (links_.alone()) return stage_;
  const int64_t bytes = links_.ranks() * bytes_;
  const auto all = part(links_.borrow(call_, bytes), 0, bytes);
  links_.run_local(Phase::homeward, call_, Op::all_gather, all, stage_);
  return all;
}

namespace {

class SmallAllGather final : public HostsAlgorithm {
 public:
  SmallAllGather(HostsLinks& links, HostsCall& call)
      : HostsAlgorithm(links, call), gather_(links, call) {}
  void open() override { gather_.start(call_.call.input); }

  void homeward() override {
    links_.check_records(call_);
    const auto bytes = static_cast<int64_t>(call_.call.input.nbytes());
    if (bytes == 0) return;
    auto* const output = bytes_of(call_.call.output);
    const auto all = gather_.finish();
    for (int host = 0; host < links_.hosts(); ++host) {
      for (int r = 0; r < links_.local_size(); ++r)
        copy_to(output + (host * links_.local_size() + r) * bytes,
                part(all, (r * links_.hosts() + host) * bytes, bytes));
    }
  }

 private:
  SmallGather gather_;
};

// The slices of an all-gather's output: one of each rank, host by host.
class Slices {
 public:
  Slices(HostsLinks& links, HostsCall& call)
      : links_(links), call_(call), n_(call.call.input.numel()) {}
  int64_t numel() const { return n_; }
  // Returns the slice of the rank at this one's place on `host`.
  at::Tensor at_place(int host) const {
    return part(call_.call.output, links_.rank_at(host) * n_, n_);
  }
  // Lets the ranks of this host give each other the slices that they have of `host`. A window's
  // output is one array of all of them, and has the slices already.
  void spread(int host) const {
    if (links_.alone() || call_.call.shared_output) return;
    const int64_t block = n_ * links_.local_size();
    links_.run_local(Phase::homeward, call_, Op::all_gather,
                     part(call_.call.output, host * block, block), at_place(host));
  }

 private:
  HostsLinks& links_;
  HostsCall& call_;
  int64_t n_;
};

// Uncoded slices go straight to their places.
class DirectAllGather final : public HostsAlgorithm {
 public:
  DirectAllGather(HostsLinks& links, HostsCall& call)
      : HostsAlgorithm(links, call), slices_(links, call) {}

  void open() override {
    for (int d = 1; d <= links_.others(); ++d) {
      const int from = links_.host_before(d);
      links_.arrive(call_, from, Channel::gather, slices_.at_place(from));
    }
    for (int d = 1; d <= links_.others(); ++d)
      links_.depart(call_, links_.host_after(d), Channel::gather, call_.call.input);
  }

  void homeward() override {
    copy_to(bytes_of(slices_.at_place(links_.here())), call_.call.input);
    slices_.spread(links_.here());
    links_.check_records(call_);
    for (int d = 1; d <= links_.others(); ++d) {
      const int from = links_.host_before(d);
      links_.wait_for(call_, from);
      slices_.spread(from);
    }
  }

 private:
  Slices slices_;
};

// Each chunk of this rank's slice is coded once and goes to all hosts; this rank's own output gets
// the values of its messages, as theirs do.
class CodedAllGather final : public HostsAlgorithm {
 public:
  CodedAllGather(HostsLinks& links, HostsCall& call)
      : HostsAlgorithm(links, call),
        slices_(links, call),
        codec_(make_codec(call.call.wire, call.call.input.scalar_type())) {}
  bool sends_in_chunks() const override { return true; }

  void send() override {
    const auto own = slices_.at_place(links_.here());
    const int64_t step = codec_->chunk_numel(links_.chunk_bytes());
    for (int64_t begin = 0; begin < slices_.numel(); begin += step) {
      const int64_t numel = std::min(step, slices_.numel() - begin);
      const auto values = part(call_.call.input, begin, numel);
      at::Tensor first;
      std::span<const std::byte> rest;
      for (int d = 1; d <= links_.others(); ++d) {
        const auto chunk = links_.next_leaving(links_.host_after(d), codec_->message_bytes(numel));
        if (d == 1) {
          first = chunk.message;
          rest = codec_->pack(bytes_of(first), values);
        } else {
          copy_to(bytes_of(chunk.message), first);
        }
        links_.leave(call_, chunk);
        links_.leave_rest(call_, chunk.host, rest);
      }
      codec_->read_back(part(own, begin, numel), values, bytes_of(first));
    }
  }

  void homeward() override {
    links_.check_records(call_);
    links_.receive_chunks(slices_.numel(), *codec_, [&](const HostsLinks::Coming& chunk) {
      for (int d = 1; d <= links_.others(); ++d) {
        const int from = links_.host_before(d);
        const auto to = part(slices_.at_place(from), chunk.begin, chunk.numel);
        links_.receive_rest(from, codec_->unpack(to, chunk.message(d)));
      }
    });
    call_.sending.wait();  // now this rank's own slice is in its place
    for (int host = 0; host < links_.hosts(); ++host) slices_.spread(host);
  }

 private:
  Slices slices_;
  std::unique_ptr<Codec> codec_;
};

}  // namespace

std::unique_ptr<HostsAlgorithm> make_gather(HostsLinks& links, HostsCall& call) {
  const bool small =
      links.control() ||
      (!call.call.shared_output && static_cast<int64_t>(call.call.output.nbytes()) <= kSmallCall);
  if (call.call.wire) return std::make_unique<CodedAllGather>(links, call);
  if (small) return std::make_unique<SmallAllGather>(links, call);
  return std::make_unique<DirectAllGather>(links, call);
}

}  // namespace zero::comm
