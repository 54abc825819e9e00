#include "zero/comm/hosts_links.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/comm/array_views.h"

namespace zero::comm {
namespace {

// Chunks are constants, and not latency times bandwidth, which is 0.04 MB at 1 Gbit/s and 0.2 MB at
// 10: four chunks under way are more than that on any such link, and their size decides how often
// threads wake each other. Gbit/s of reduce-scatters of 16 MiB in bf16, 2 hosts with a rank each,
// two runs, while other work took most of the two cores:
//
//     chunk              64 KiB         256 KiB        1 MiB          4 MiB
//     link of 1 Gbit/s   0.67, 0.62     0.78, 0.89     0.89, 0.85     0.91, 0.83
//     link of 10         -              1.46, 1.32     2.14, 2.18     2.48, 1.98
//
// Gathers are not cut into chunks unless they are coded. Chunks of 4 MiB take four times the
// memory, and gain nothing for certain.
constexpr int64_t kLeastChunk = int64_t{64} << 10;
constexpr int64_t kMostChunk = int64_t{1} << 20;
constexpr int64_t kUnderWay = int64_t{4} << 20;  // bytes of chunks of all hosts at a time
constexpr int64_t kDepth = 4;                    // chunks of one host under way
constexpr int64_t kMostKept = int64_t{1} << 20;  // bytes of an array that is kept for the next call

using Wait = LinkClock::Wait;

// Two parts of different calls may have the same sizes; this number tells them apart.
uint64_t digest_of(const CallRecord& record) {
  return Hash()
      .add(static_cast<int64_t>(record.op))
      .add(record.input_bytes)
      .add(record.output_bytes)
      .add(record.input_dtype)
      .add(record.output_dtype)
      .add(record.root)
      .value();
}

// Waits until the aborted rail does not touch the passage's memory any more.
void await_end(Passage* passage) noexcept {
  if (passage == nullptr) return;
  try {
    passage->wait();
  } catch (...) {  // the thread that aborted the rail knows why
  }
}

}  // namespace

// Arrays of one size that are used in turn; each may still be on its way when its turn comes.
class HostsLinks::Ring {
 public:
  Ring(const MakeArray& make, int64_t arrays, int64_t bytes) : bytes_(bytes) {
    memory_ = make(arrays * bytes);
    passages_.resize(static_cast<size_t>(arrays));
  }
  int64_t next() { return turn_++ % static_cast<int64_t>(passages_.size()); }
  at::Tensor array(int64_t index, int64_t bytes) const {
    return part(memory_, index * bytes_, bytes);
  }
  std::unique_ptr<Passage>& passage(int64_t index) { return passages_[static_cast<size_t>(index)]; }
  // Returns null if nothing was under way.
  std::unique_ptr<Passage> taken(int64_t index) { return std::exchange(passage(index), nullptr); }
  ~Ring() {
    for (const auto& passage : passages_) await_end(passage.get());
  }

 private:
  int64_t bytes_;
  at::Tensor memory_;
  std::vector<std::unique_ptr<Passage>> passages_;
  int64_t turn_ = 0;
};

HostsLinks::HostsLinks(const Topology& topology, std::vector<int> numbers, Rail& rail,
                       Collectives* outward, Collectives* homeward, bool control,
                       MakeArray make_array, std::shared_ptr<Traffic> traffic, LinkClock& clock)
    : topology_(topology),
      numbers_(std::move(numbers)),
      rail_(rail),
      outward_(outward),
      homeward_(homeward),
      control_(control),
      make_array_(std::move(make_array)),
      traffic_(std::move(traffic)),
      clock_(clock) {}

HostsLinks::~HostsLinks() = default;

// --- The rail ---

// Blames an error of the rail on the rank at its other end, until somebody knows better.
template <class Body>
auto HostsLinks::blaming(int host, Body body) const {
  try {
    return body();
  } catch (const PeerError&) {
    throw;
  } catch (const CommError& error) {
    throw PeerError(number_at(host), error.what(), error.what());
  }
}

void HostsLinks::await(Passage& passage, int host) const {
  blaming(host, [&] { passage.wait(); });
}

std::unique_ptr<Passage> HostsLinks::send(int host, Channel channel,
                                          std::span<const std::byte> bytes) const {
  return blaming(host, [&] { return rail_.send(host, channel, bytes); });
}

std::unique_ptr<Passage> HostsLinks::receive(int host, Channel channel,
                                             std::span<std::byte> bytes) const {
  return blaming(host, [&] { return rail_.receive(host, channel, bytes); });
}

// A window counts its bytes when it publishes, since they may leave long after.
void HostsLinks::count_link(const HostsCall& call, int64_t bytes) const {
  if (!call.call.shared_output) traffic_->add_link(call.call.counted, bytes);
}

// --- Messages from and to a call's own memory ---

void HostsLinks::depart(HostsCall& call, int host, Channel channel, const at::Tensor& values) {
  const auto bytes = span_of(values);
  if (bytes.empty()) return;
  call.departures.push_back({host, send(host, on(channel), bytes)});
  count_link(call, static_cast<int64_t>(bytes.size()));
}

void HostsLinks::arrive(HostsCall& call, int host, Channel channel, const at::Tensor& values) {
  const auto bytes = span_of(values);
  if (bytes.empty()) return;
  call.arrivals[static_cast<size_t>(host)].push_back(receive(host, on(channel), bytes));
}

void HostsLinks::wait_for(HostsCall& call, int host) const {
  auto& arrivals = call.arrivals[static_cast<size_t>(host)];
  if (arrivals.empty()) return;
  const LinkClock::WaitScope scope(clock_, Wait::arrival);
  for (const auto& passage : arrivals) await(*passage, host);
  arrivals.clear();
}

void HostsLinks::wait_for(HostsCall& call, int host, size_t index) const {
  const LinkClock::WaitScope scope(clock_, Wait::arrival);
  await(*call.arrivals[static_cast<size_t>(host)][index], host);
}

void HostsLinks::wait_for_departures(HostsCall& call) const {
  const LinkClock::WaitScope scope(clock_, Wait::departure);
  for (const auto& departure : call.departures) await(*departure.passage, departure.host);
  call.departures.clear();
}

void HostsLinks::drain(HostsCall& call) noexcept {
  for (const auto& departure : call.departures) await_end(departure.passage.get());
  for (const auto& arrivals : call.arrivals)
    for (const auto& passage : arrivals) await_end(passage.get());
  call.departures.clear();
  call.arrivals.clear();
  call.algorithm.reset();
  call.held.clear();
}

// --- Records ---

void HostsLinks::exchange_records(HostsCall& call) {
  auto& record = call.record;
  const auto& input = call.call.input;
  const auto& output = call.call.output;
  record.sequence = ++sequence_;
  record.op = call.call.op;
  record.label = call.call.label;
  record.root = call.call.root;
  record.wire = wire_code(call.call.wire);
  if (input.defined()) {
    record.input_bytes = static_cast<int64_t>(input.nbytes());
    record.output_bytes = static_cast<int64_t>(output.nbytes());
    record.input_dtype = static_cast<int8_t>(input.scalar_type());
    record.output_dtype = static_cast<int8_t>(output.scalar_type());
  }
  call.records.resize(static_cast<size_t>(hosts()));
  call.arrivals.resize(static_cast<size_t>(hosts()));
  for (int d = 1; d <= others(); ++d) {
    const int from = host_before(d);
    auto& theirs = call.records[static_cast<size_t>(from)];
    call.arrivals[static_cast<size_t>(from)].push_back(
        receive(from, on(Channel::gather), std::as_writable_bytes(std::span(&theirs, 1))));
  }
  for (int d = 1; d <= others(); ++d) {
    call.departures.push_back({host_after(d), send(host_after(d), on(Channel::gather),
                                                   std::as_bytes(std::span(&record, 1)))});
    traffic_->add_link(Collective::control, sizeof record);
  }
}

void HostsLinks::check_records(HostsCall& call) const {
  bool all_match = true;
  for (int host = 0; host < hosts(); ++host) {
    if (host == here()) continue;
    {
      const LinkClock::WaitScope scope(clock_, Wait::record);
      await(*call.arrivals[static_cast<size_t>(host)][0], host);
    }
    all_match = all_match && call.records[static_cast<size_t>(host)].matches(call.record);
  }
  if (all_match) return;
  call.records[static_cast<size_t>(here())] = call.record;
  refuse_mismatch(
      call.records, [this](int host) { return number_at(host); }, number_at(here()));
}

// --- Chunks ---

int64_t HostsLinks::chunk_bytes() const {
  return std::clamp(kUnderWay / std::max(1, others()) / 4096 * 4096, kLeastChunk, kMostChunk);
}

HostsLinks::Leaving HostsLinks::next_leaving(int host, int64_t bytes) {
  if (!leaving_) leaving_ = std::make_unique<Ring>(make_array_, kDepth * others(), chunk_bytes());
  const auto turn = leaving_->next();
  if (const auto before = leaving_->taken(turn)) {
    const LinkClock::WaitScope scope(clock_, Wait::departure);
    await(*before, host);
  }
  return {host, turn, leaving_->array(turn, bytes)};
}

void HostsLinks::leave(HostsCall& call, const Leaving& chunk) {
  leaving_->passage(chunk.turn) = send(chunk.host, on(Channel::reduce), span_of(chunk.message));
  count_link(call, chunk.message.numel());
}

void HostsLinks::leave_rest(HostsCall& call, int host, std::span<const std::byte> rest) {
  if (rest.empty()) return;
  if (!rests_) {
    rests_ = std::make_unique<Ring>(make_array_, kDepth * hosts(), chunk_bytes());
    rest_turns_.assign(static_cast<size_t>(hosts()), 0);
  }
  const int64_t turn = kDepth * host + rest_turns_[static_cast<size_t>(host)]++ % kDepth;
  if (const auto before = rests_->taken(turn)) {
    const LinkClock::WaitScope scope(clock_, Wait::departure);
    await(*before, host);
  }
  const auto bytes = static_cast<int64_t>(rest.size());
  const auto message = rests_->array(turn, bytes);
  copy_bytes(bytes_of(message), rest.data(), bytes);
  rests_->passage(turn) = send(host, Channel::rest, span_of(message));
  traffic_->add_link(call.call.counted, bytes);
}

void HostsLinks::receive_rest(int host, std::span<std::byte> rest) const {
  if (rest.empty()) return;
  const LinkClock::WaitScope scope(clock_, Wait::arrival);
  await(*receive(host, Channel::rest, rest), host);
}

void HostsLinks::receive_chunks(int64_t numel, const Codec& codec,
                                const std::function<void(const Coming&)>& body) {
  const int64_t step = codec.chunk_numel(chunk_bytes());
  if (!coming_) coming_ = std::make_unique<Ring>(make_array_, kDepth * others() + 1, chunk_bytes());
  const auto place = [&](int64_t begin, int d) { return begin / step % kDepth * others() + d - 1; };
  const auto post = [&](int64_t begin) {
    for (int d = 1; begin < numel && d <= others(); ++d) {
      const int64_t bytes = codec.message_bytes(std::min(step, numel - begin));
      const auto turn = place(begin, d);
      coming_->passage(turn) =
          receive(host_before(d), on(Channel::reduce), span_of(coming_->array(turn, bytes)));
    }
  };
  for (int64_t ahead = 0; ahead < kDepth; ++ahead) post(ahead * step);
  for (int64_t begin = 0; begin < numel; begin += step) {
    body({begin, std::min(step, numel - begin),
          [&](int d) -> const std::byte* {
            const auto turn = place(begin, d);
            const LinkClock::WaitScope scope(
                clock_, Wait::arrival, on_link(codec.message_bytes(std::min(step, numel - begin))));
            await(*coming_->taken(turn), host_before(d));
            return bytes_of(coming_->array(turn, 1));
          },
          coming_->array(kDepth * others(), chunk_bytes())});
    post(begin + kDepth * step);
  }
}

at::Tensor HostsLinks::unpacked(int distance, int64_t numel, at::ScalarType dtype) {
  if (!unpacked_.defined()) unpacked_ = make_array_(others() * chunk_bytes());
  return as_dtype(part(unpacked_, (distance - 1) * chunk_bytes(), chunk_bytes()), numel, dtype);
}

// --- The ranks of this host, and arrays ---

void HostsLinks::run_local(Phase phase, const HostsCall& of, Op op, const at::Tensor& output,
                           const at::Tensor& input, int root) {
  Call call;
  call.op = op;
  call.output = output;
  call.input = input;
  call.root = root;
  call.counted = of.call.counted;
  call.label = of.call.label;
  call.wire = of.call.wire;  // for its record: nothing is coded inside a host
  call.timeout = of.call.timeout;
  if (op == Op::reduce_scatter && input.dim() == 2)
    call.slice_distance = input.stride(0) * input.element_size();
  call.within = of.record.op;
  call.digest = digest_of(of.record);
  (phase == Phase::outward ? outward_ : homeward_)->run(call);
}

at::Tensor HostsLinks::borrow(HostsCall& call, int64_t bytes) {
  const auto size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  const auto found = [&]() -> at::Tensor {
    const std::lock_guard lock(mutex_);
    const auto free = free_.find(size);
    return free == free_.end() ? at::Tensor() : std::move(free_.extract(free).mapped());
  }();
  call.held.push_back(found.defined() ? found : make_array_(size));
  return call.held.back();
}

void HostsLinks::give_back(HostsCall& call) {
  const std::lock_guard lock(mutex_);
  for (auto& array : call.held) {
    if (const auto bytes = array.numel(); bytes <= kMostKept)
      free_.emplace(bytes, std::move(array));
  }
  call.held.clear();
}

}  // namespace zero::comm
