#include "zero/comm/hosts_collectives.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <span>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/copy_kernels.h"
#include "zero/comm/reduce_kernels.h"

namespace zero::comm {
namespace {

constexpr int64_t kSmall = int64_t{64} << 10;  // bytes of all slices that go in one piece
constexpr int64_t kLeastChunk = int64_t{64} << 10;
constexpr int64_t kMostChunk = int64_t{1} << 20;
constexpr int64_t kUnderWay = int64_t{4} << 20;  // bytes of chunks of all hosts at a time
constexpr int64_t kDepth = 4;                    // chunks of one host under way
constexpr int64_t kMostKept = int64_t{1} << 20;  // bytes of an array that is kept for the next call
constexpr int64_t kBroadcastChunk = int64_t{4} << 20;
constexpr int64_t kGrain = int64_t{1} << 18;  // bytes that are worth a thread

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

int64_t width_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// `numel` elements from element `begin` on. Without operators: nobody's version counter moves.
at::Tensor part(const at::Tensor& whole, int64_t begin, int64_t numel) {
  return at::from_blob(bytes_of(whole) + begin * whole.element_size(), {numel},
                       at::TensorOptions(whole.scalar_type()));
}

// Slices of `numel` elements, `distance` elements apart.
at::Tensor slices(const at::Tensor& whole, int64_t begin, int64_t count, int64_t distance,
                  int64_t numel) {
  return at::from_blob(bytes_of(whole) + begin * whole.element_size(), {count, numel},
                       {distance, 1}, at::TensorOptions(whole.scalar_type()));
}

at::Tensor as_dtype(const at::Tensor& bytes, int64_t numel, at::ScalarType dtype) {
  return at::from_blob(bytes_of(bytes), {numel}, at::TensorOptions(dtype));
}

std::span<std::byte> span_of(const at::Tensor& values) {
  return {bytes_of(values), static_cast<size_t>(values.numel() * values.element_size())};
}

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  if (bytes_of(to) == bytes_of(from)) return;
  copy_bytes(bytes_of(to), bytes_of(from), static_cast<int64_t>(span_of(from).size()));
}

// Of what the ranks of a host call, for them to compare: of parts of different calls the sizes may
// be the same (FNV-1a).
uint64_t digest_of(const CallRecord& record) {
  uint64_t digest = 0xcbf29ce484222325U;
  for (const auto value :
       {static_cast<int64_t>(record.op), record.input_bytes, record.output_bytes,
        static_cast<int64_t>(record.input_dtype), static_cast<int64_t>(record.output_dtype),
        static_cast<int64_t>(record.root)}) {
    digest = (digest ^ static_cast<uint64_t>(value)) * 0x100000001b3U;
  }
  return digest;
}

// Until the rail does not touch its memory any more.
void settle(Passage* passage) noexcept {
  if (passage == nullptr) return;
  try {
    passage->wait();
  } catch (...) {  // the rail was aborted; whoever did it knows why
  }
}

// By as many threads as this one may use.
void add_up(const at::Tensor& output, std::span<const void* const> inputs, at::ScalarType dtype,
            int64_t ranks_a_host) {
  const int64_t width = width_of(dtype);
  const int64_t grain = kGrain / width;
  at::parallel_for(0, output.numel(), grain, [&](int64_t begin, int64_t end) {
    c10::SmallVector<const void*, 16> from;
    for (const auto* input : inputs)
      from.push_back(static_cast<const std::byte*>(input) + begin * width);
    void* to = bytes_of(output) + begin * output.element_size();
    sum({&to, 1}, output.scalar_type(), from, dtype, end - begin, false, ranks_a_host);
  });
}

// `body` takes parts of a message's blocks, by as many threads as this one may use.
template <class Body>
void by_blocks(const Quantisation& quantisation, int64_t numel, Body body) {
  const int64_t grain = kGrain / (quantisation.block * width_of(at::kFloat));
  at::parallel_for(0, blocks_of(quantisation, numel), grain, [&](int64_t begin, int64_t end) {
    body(BlockRange{begin, end});
  });
}

// Whether all values are in the message. `error`: of the message, or null.
bool pack_values(const at::Tensor& message, std::byte* error, const at::Tensor& values,
                 const LinkWire& wire) {
  if (wire.packed)
    return pack_exponents(bytes_of(message), values.data_ptr(), values.scalar_type(),
                          values.numel());
  by_blocks(wire.quantisation, values.numel(), [&](BlockRange range) {
    if (error == nullptr) {
      pack(bytes_of(message), values.data_ptr(), values.scalar_type(), values.numel(),
           wire.quantisation, range);
    } else {
      pack_with_feedback(bytes_of(message), error, values.data_ptr(), values.scalar_type(),
                         values.numel(), wire.quantisation, wire.beta, range);
    }
  });
  return true;
}

void unpack_values(const at::Tensor& values, const std::byte* message, const LinkWire& wire) {
  by_blocks(wire.quantisation, values.numel(), [&](BlockRange range) {
    unpack(values.data_ptr(), values.scalar_type(), message, values.numel(), wire.quantisation,
           range);
  });
}

}  // namespace

// Arrays of one size that are used in turn; each may still be on its way when its turn comes.
class HostsCollectives::Ring {
 public:
  Ring(const MakeArray& make, int64_t arrays, int64_t bytes) : bytes_(bytes) {
    memory_ = make(arrays * bytes);
    passages_.resize(static_cast<size_t>(arrays));
  }
  int64_t next() { return turn_++ % static_cast<int64_t>(passages_.size()); }
  at::Tensor array(int64_t index, int64_t numel, at::ScalarType dtype) const {
    return at::from_blob(bytes_of(memory_) + index * bytes_, {numel}, at::TensorOptions(dtype));
  }
  std::unique_ptr<Passage>& passage(int64_t index) { return passages_[static_cast<size_t>(index)]; }
  // Null where nothing was under way.
  std::unique_ptr<Passage> taken(int64_t index) {
    return std::exchange(passages_[static_cast<size_t>(index)], nullptr);
  }
  ~Ring() {
    for (const auto& passage : passages_) comm::settle(passage.get());
  }

 private:
  int64_t bytes_;
  at::Tensor memory_;
  std::vector<std::unique_ptr<Passage>> passages_;
  int64_t turn_ = 0;
};

HostsCollectives::HostsCollectives(const Topology& topology, std::vector<int> numbers, Rail& rail,
                                   Collectives* outward, Collectives* homeward, bool control,
                                   MakeArray make_array, std::shared_ptr<Traffic> traffic)
    : topology_(topology),
      numbers_(std::move(numbers)),
      rail_(rail),
      outward_(outward),
      homeward_(homeward),
      control_(control),
      make_array_(std::move(make_array)),
      scratch_(make_array_),
      traffic_(std::move(traffic)) {}

HostsCollectives::~HostsCollectives() = default;

at::Tensor HostsCollectives::Scratch::take(int64_t bytes) {
  const auto size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(size); found != free_.end())
      return std::move(free_.extract(found).mapped());
  }
  return make_(size);
}

void HostsCollectives::Scratch::give(at::Tensor array) {
  const auto bytes = array.numel();
  if (bytes > kMostKept) return;
  const std::lock_guard lock(mutex_);
  free_.emplace(bytes, std::move(array));
}

// An error of a rail is blamed on the rank at its other end, until somebody knows better.
template <class Body>
auto HostsCollectives::blaming(int host, Body body) const {
  try {
    return body();
  } catch (const PeerError&) {
    throw;
  } catch (const CommError& error) {
    throw PeerError(number_at(host), error.what(), error.what());
  }
}

void HostsCollectives::await(Passage& passage, int host) const {
  blaming(host, [&] { passage.wait(); });
}

std::unique_ptr<Passage> HostsCollectives::send(int host, Channel channel,
                                                std::span<const std::byte> bytes) const {
  return blaming(host, [&] { return rail_.send(host, channel, bytes); });
}

std::unique_ptr<Passage> HostsCollectives::receive(int host, Channel channel,
                                                   std::span<std::byte> bytes) const {
  return blaming(host, [&] { return rail_.receive(host, channel, bytes); });
}

int64_t HostsCollectives::chunk_bytes() const {
  return std::clamp(kUnderWay / std::max(1, others()) / 4096 * 4096, kLeastChunk, kMostChunk);
}

// Elements of a chunk that is quantised or packed: whole blocks, whose sums in fp32 (of packed
// ones: of their own dtype) fit into an array.
int64_t HostsCollectives::chunk_numel(const LinkWire& wire, at::ScalarType dtype) const {
  const int64_t block = wire.packed ? kExponentBlock : wire.quantisation.block;
  return chunk_bytes() / width_of(wire.packed ? dtype : at::kFloat) / block * block;
}

void HostsCollectives::depart(HostsCall& call, int host, Channel channel,
                              const at::Tensor& values) {
  const auto bytes = span_of(values);
  if (bytes.empty()) return;
  call.departures.push_back({host, send(host, on(channel), bytes)});
  count_link(call, bytes);
}

// What goes to a window was counted when it was published: it may leave long after.
void HostsCollectives::count_link(const HostsCall& call, std::span<const std::byte> bytes) const {
  if (call.call.shared_output) return;
  traffic_->add_link(call.call.counted, static_cast<int64_t>(bytes.size()));
}

void HostsCollectives::arrive(HostsCall& call, int host, Channel channel,
                              const at::Tensor& values) {
  const auto bytes = span_of(values);
  if (bytes.empty()) return;
  call.arrivals[static_cast<size_t>(host)].push_back(receive(host, on(channel), bytes));
}

void HostsCollectives::wait_for(HostsCall& call, int host) const {
  auto& arrivals = call.arrivals[static_cast<size_t>(host)];
  for (const auto& passage : arrivals) await(*passage, host);
  arrivals.clear();
}

void HostsCollectives::wait_for_departures(HostsCall& call) const {
  for (const auto& departure : call.departures) await(*departure.passage, departure.host);
  call.departures.clear();
}

void HostsCollectives::settle(HostsCall& call) noexcept {
  for (const auto& departure : call.departures) comm::settle(departure.passage.get());
  for (const auto& arrivals : call.arrivals)
    for (const auto& passage : arrivals) comm::settle(passage.get());
  call.departures.clear();
  call.arrivals.clear();
  call.held.clear();
}

// The ranks of this host compare their records themselves, in shared memory; these are of the ranks
// at this one's place on the other hosts.
void HostsCollectives::exchange_records(HostsCall& call) {
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
  const auto hosts = static_cast<size_t>(topology_.hosts);
  call.records.resize(hosts);
  call.arrivals.resize(hosts);
  for (int d = 1; d <= others(); ++d) {
    const int from = host_after(topology_.hosts - d);
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

void HostsCollectives::check_records(HostsCall& call) const {
  bool all_match = true;
  for (int host = 0; host < topology_.hosts; ++host) {
    if (host == topology_.host) continue;
    await(*call.arrivals[static_cast<size_t>(host)].front(), host);
    all_match = all_match && call.records[static_cast<size_t>(host)].matches(call.record);
  }
  if (all_match) return;
  call.records[static_cast<size_t>(topology_.host)] = call.record;
  refuse_mismatch(
      call.records, [this](int host) { return number_at(host); }, number_at(topology_.host));
}

void HostsCollectives::run_local(Collectives& local, const HostsCall& of, Op op,
                                 const at::Tensor& output, const at::Tensor& input, int root) {
  Call call;
  call.op = op;
  call.output = output;
  call.input = input;
  call.root = root;
  call.counted = of.call.counted;
  call.label = of.call.label;
  call.wire = of.call.wire;  // for its record: nothing is quantised here
  call.timeout = of.call.timeout;
  if (op == Op::reduce_scatter && input.dim() == 2)
    call.slice_distance = input.stride(0) * input.element_size();
  call.within = of.record.op;
  call.digest = digest_of(of.record);
  local.run(call);
}

// --- All-gathers ---

// Slices of few bytes: each host's at this place, then all.
void HostsCollectives::start_small_gather(HostsCall& call, const at::Tensor& input) {
  const int64_t bytes = static_cast<int64_t>(span_of(input).size());
  if (bytes == 0) return;
  call.held.push_back(scratch_.take(topology_.hosts * bytes));
  const auto& stage = call.held.back();
  copy_values(part(stage, topology_.host * bytes, bytes), as_dtype(input, bytes, at::kByte));
  for (int d = 1; d <= others(); ++d) {
    const int from = host_after(topology_.hosts - d);
    arrive(call, from, Channel::gather, part(stage, from * bytes, bytes));
  }
  for (int d = 1; d <= others(); ++d)
    depart(call, host_after(d), Channel::gather, part(stage, topology_.host * bytes, bytes));
}

// (R, H, bytes)
at::Tensor HostsCollectives::finish_small_gather(HostsCall& call, int64_t bytes) {
  for (int host = 0; host < topology_.hosts; ++host) wait_for(call, host);
  auto stage = part(call.held.front(), 0, topology_.hosts * bytes);
  if (alone()) return stage;
  const int64_t all_bytes = topology_.local_size * topology_.hosts * bytes;
  call.held.push_back(scratch_.take(all_bytes));
  const auto all = part(call.held.back(), 0, all_bytes);
  run_local(*homeward_, call, Op::all_gather, all, stage);
  return all;
}

void HostsCollectives::finish_small_all_gather(HostsCall& call) {
  check_records(call);
  const auto bytes = static_cast<int64_t>(call.call.input.nbytes());
  if (bytes == 0) return;
  const auto all = finish_small_gather(call, bytes);
  const auto output = as_dtype(call.call.output, bytes * ranks(), at::kByte);
  for (int host = 0; host < topology_.hosts; ++host) {
    for (int r = 0; r < topology_.local_size; ++r)
      copy_values(part(output, (host * topology_.local_size + r) * bytes, bytes),
                  part(all, (r * topology_.hosts + host) * bytes, bytes));
  }
}

void HostsCollectives::start_gather(HostsCall& call) {
  const auto& output = call.call.output;
  const auto& input = call.call.input;
  const int64_t n = input.numel();
  for (int d = 1; d <= others(); ++d) {
    const int from = host_after(topology_.hosts - d);
    arrive(call, from, Channel::gather, part(output, rank_at(from) * n, n));
  }
  for (int d = 1; d <= others(); ++d) depart(call, host_after(d), Channel::gather, input);
}

void HostsCollectives::finish_gather(HostsCall& call) {
  const auto& output = call.call.output;
  const auto& input = call.call.input;
  const int64_t n = input.numel();
  const int64_t block = n * topology_.local_size;
  const auto spread = [&](int host) {
    const auto mine = part(output, rank_at(host) * n, n);
    if (host == topology_.host) copy_values(mine, input);
    if (!alone() && !call.call.shared_output)
      run_local(*homeward_, call, Op::all_gather, part(output, host * block, block), mine);
  };
  spread(topology_.host);
  check_records(call);
  for (int d = 1; d <= others(); ++d) {
    const int from = host_after(topology_.hosts - d);
    wait_for(call, from);
    spread(from);
  }
}

// Chunk by chunk: this rank's slice leaves, and its own output gets what the messages say.
void HostsCollectives::send_packed(HostsCall& call) {
  const auto& input = call.call.input;
  const auto& wire = *call.call.wire;
  const int64_t n = input.numel();
  const auto own = part(call.call.output, rank_at(topology_.host) * n, n);
  const auto dtype = input.scalar_type();
  const int64_t step = chunk_numel(wire, dtype);
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t numel = std::min(step, n - begin);
    const auto values = part(input, begin, numel);
    at::Tensor packed;
    bool fits = true;
    for (int d = 1; d <= others(); ++d) {
      int64_t turn = 0;
      const auto message = leaving(host_after(d), turn, link_bytes(wire, dtype, numel), at::kByte);
      if (packed.defined()) {
        copy_values(message, packed);
      } else {
        packed = message;
        fits = pack_values(packed, nullptr, values, wire);
      }
      leave(call, host_after(d), turn, message);
      if (!fits) leave_rest(call, host_after(d), values);
    }
    if (wire.packed) {
      copy_values(part(own, begin, numel), values);
    } else {
      unpack_values(part(own, begin, numel), bytes_of(packed), wire);
    }
  }
}

void HostsCollectives::finish_packed_gather(HostsCall& call) {
  const auto& output = call.call.output;
  const auto& wire = *call.call.wire;
  const int64_t n = call.call.input.numel();
  const int64_t block = n * topology_.local_size;
  check_records(call);
  const auto dtype = output.scalar_type();
  receive_chunks(
      n, chunk_numel(wire, dtype), [&](int64_t numel) { return link_bytes(wire, dtype, numel); },
      [&](int64_t begin, int64_t numel, const auto& chunk_of) {
        for (int d = 1; d <= others(); ++d) {
          const int from = host_after(topology_.hosts - d);
          const auto to = part(output, rank_at(from) * n + begin, numel);
          wire.packed ? unpack_chunk(from, to, chunk_of(d)) : unpack_values(to, chunk_of(d), wire);
        }
      });
  call.sending.wait();  // this rank's own slice is in its place
  if (call.call.shared_output) return;
  for (int host = 0; host < topology_.hosts && !alone(); ++host)
    run_local(*homeward_, call, Op::all_gather, part(output, host * block, block),
              part(output, rank_at(host) * n, n));
}

// --- Sums ---

// The next array of those that leave, once its last passage to `host` is over.
at::Tensor HostsCollectives::leaving(int host, int64_t& turn, int64_t numel, at::ScalarType dtype) {
  if (!leaving_) leaving_ = std::make_unique<Ring>(make_array_, kDepth * others(), chunk_bytes());
  turn = leaving_->next();
  if (const auto before = leaving_->taken(turn)) await(*before, host);
  return leaving_->array(turn, numel, dtype);
}

void HostsCollectives::leave(HostsCall& call, int host, int64_t turn, const at::Tensor& values) {
  leaving_->passage(turn) = send(host, on(Channel::reduce), span_of(values));
  count_link(call, span_of(values));
}

// Of a packed chunk that did not fit: the end of the values, as they are.
void HostsCollectives::leave_rest(HostsCall& call, int host, const at::Tensor& values) {
  const auto all = span_of(values);
  const int64_t bytes = rest_bytes(values.scalar_type(), values.numel());
  if (bytes == 0) return;
  if (!rests_) {
    rests_ = std::make_unique<Ring>(make_array_, kDepth * topology_.hosts, chunk_bytes());
    rest_turns_.assign(static_cast<size_t>(topology_.hosts), 0);
  }
  const int64_t turn = kDepth * host + rest_turns_[static_cast<size_t>(host)]++ % kDepth;
  if (const auto before = rests_->taken(turn)) await(*before, host);
  const auto rest = rests_->array(turn, bytes, at::kByte);
  copy_bytes(bytes_of(rest), all.data() + all.size() - static_cast<size_t>(bytes), bytes);
  rests_->passage(turn) = send(host, Channel::rest, span_of(rest));
  traffic_->add_link(call.call.counted, bytes);
}

// What the message of `host` says, and what follows it.
void HostsCollectives::unpack_chunk(int host, const at::Tensor& values, const std::byte* message) {
  unpack_exponents(bytes_of(values), values.scalar_type(), message, values.numel());
  const int64_t bytes = rest_bytes(values.scalar_type(), values.numel());
  if (is_packed(message, values.numel()) || bytes == 0) return;
  const auto all = span_of(values);
  await(*receive(host, Channel::rest, all.last(static_cast<size_t>(bytes))), host);
}

// Of each other host's slice for this place, chunk by chunk: this host's sum of it leaves.
void HostsCollectives::send_parts(HostsCall& call, const at::Tensor& input, int64_t n) {
  const int64_t block = n * topology_.local_size;
  const auto dtype = alone() ? input.scalar_type() : partial_dtype(input.scalar_type());
  const auto& wire = call.call.wire;
  const int64_t step = wire ? chunk_numel(*wire, dtype) : chunk_bytes() / width_of(dtype);
  const auto add_up_here = [&](const at::Tensor& partial, int host, int64_t begin) {
    run_local(*outward_, call, Op::reduce_scatter, partial,
              slices(input, host * block + begin, topology_.local_size, n, partial.numel()));
  };
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t numel = std::min(step, n - begin);
    for (int d = 1; d <= others(); ++d) {
      const int host = host_after(d);
      auto values = alone() ? part(input, host * block + begin, numel) : at::Tensor();
      int64_t turn = 0;
      if (wire) {
        if (!alone()) {
          values = as_dtype(call.held.front(), numel, dtype);
          add_up_here(values, host, begin);
        }
        const auto message = leaving(host, turn, link_bytes(*wire, dtype, numel), at::kByte);
        std::byte* error = nullptr;
        if (wire->error.defined()) {
          const auto kept = feedback_quantisation(wire->quantisation);
          error = bytes_of(wire->error) + (d - 1) * wire_bytes(kept, n) + wire_bytes(kept, begin);
        }
        const bool fits = pack_values(message, error, values, *wire);
        leave(call, host, turn, message);
        if (!fits) leave_rest(call, host, values);
      } else if (alone()) {
        depart(call, host, Channel::reduce, values);
      } else {
        values = leaving(host, turn, numel, dtype);
        add_up_here(values, host, begin);
        leave(call, host, turn, values);
      }
    }
  }
}

// Chunks of `n` elements, `step` in each, that others send to this place: `body` takes a chunk's
// first element and number of elements, and a function that awaits the chunk of one host.
template <class Body>
void HostsCollectives::receive_chunks(int64_t n, int64_t step,
                                      const std::function<int64_t(int64_t)>& bytes, Body body) {
  if (!coming_) coming_ = std::make_unique<Ring>(make_array_, kDepth * others() + 1, chunk_bytes());
  const auto place = [&](int64_t begin, int d) { return begin / step % kDepth * others() + d - 1; };
  const auto post = [&](int64_t begin) {
    for (int d = 1; begin < n && d <= others(); ++d) {
      const int from = host_after(topology_.hosts - d);
      const auto turn = place(begin, d);
      coming_->passage(turn) =
          receive(from, on(Channel::reduce),
                  span_of(coming_->array(turn, bytes(std::min(step, n - begin)), at::kByte)));
    }
  };
  for (int64_t ahead = 0; ahead < kDepth; ++ahead) post(ahead * step);
  for (int64_t begin = 0; begin < n; begin += step) {
    body(begin, std::min(step, n - begin), [&](int d) -> const std::byte* {
      const auto turn = place(begin, d);
      await(*coming_->taken(turn), host_after(topology_.hosts - d));
      return bytes_of(coming_->array(turn, 1, at::kByte));
    });
    post(begin + kDepth * step);
  }
}

// All hosts' sums for this rank's slice, in the order of hosts.
void HostsCollectives::add_parts(HostsCall& call, const at::Tensor& output, const at::Tensor& input,
                                 int64_t n) {
  const int64_t block = n * topology_.local_size;
  const auto dtype = alone() ? input.scalar_type() : partial_dtype(input.scalar_type());
  const auto& wire = call.call.wire;
  const int64_t step = wire ? chunk_numel(*wire, dtype) : chunk_bytes() / width_of(dtype);
  const auto bytes = [&](int64_t numel) {
    return wire ? link_bytes(*wire, dtype, numel) : numel * width_of(dtype);
  };
  const bool packed = wire && wire->packed;
  if (packed && !unpacked_.defined()) unpacked_ = make_array_(others() * chunk_bytes());
  std::vector<const std::byte*> parts(static_cast<size_t>(topology_.hosts));
  receive_chunks(n, step, bytes, [&](int64_t begin, int64_t numel, const auto& chunk_of) {
    auto own = part(input, topology_.host * block + begin, numel);
    if (!alone()) {
      own = coming_->array(kDepth * others(), numel, dtype);
      run_local(*homeward_, call, Op::reduce_scatter, own,
                slices(input, topology_.host * block + begin, topology_.local_size, n, numel));
    }
    parts[static_cast<size_t>(topology_.host)] = bytes_of(own);
    for (int d = 1; d <= others(); ++d) {
      const int from = host_after(topology_.hosts - d);
      auto& theirs = parts[static_cast<size_t>(from)];
      theirs = chunk_of(d);
      if (!packed) continue;
      const auto values = part(as_dtype(unpacked_, others() * step, dtype), (d - 1) * step, numel);
      unpack_chunk(from, values, theirs);
      theirs = bytes_of(values);
    }
    const auto to = part(output, begin, numel);
    if (wire && !packed) {
      add_packed(call, to, own, parts);
    } else {
      const std::vector<const void*> values(parts.begin(), parts.end());
      add_up(to, values, dtype, topology_.hosts);
    }
  });
}

// output = `own` and what the other hosts' messages say, added in the order of hosts in fp32, and
// rounded once.
void HostsCollectives::add_packed(HostsCall& call, const at::Tensor& output, const at::Tensor& own,
                                  std::span<const std::byte* const> messages) {
  const auto& quantisation = call.call.wire->quantisation;
  const int64_t numel = output.numel();
  auto* total = static_cast<float*>(call.held.back().data_ptr());
  // `own` may be there already; of another dtype it has room there.
  auto* exact =
      static_cast<float*>(coming_->array(kDepth * others(), numel, at::kFloat).data_ptr());
  by_blocks(quantisation, numel, [&](BlockRange range) {
    const int64_t begin = range.begin * quantisation.block;
    const int64_t count = std::min(range.end * quantisation.block, numel) - begin;
    const void* mine = bytes_of(own) + begin * own.element_size();
    float* sums = total + begin;
    float* converted = exact + begin;
    void* to = converted;
    if (mine != to) sum({&to, 1}, at::kFloat, {&mine, 1}, own.scalar_type(), count, false);
    std::fill(sums, sums + count, 0.0F);
    for (size_t host = 0; host < messages.size(); ++host) {
      if (static_cast<int>(host) != topology_.host) {
        unpack_add(total, messages[host], numel, quantisation, range);
        continue;
      }
      for (int64_t i = 0; i < count; ++i) sums[i] += converted[i];
    }
    const void* whole = sums;
    void* out = bytes_of(output) + begin * output.element_size();
    sum({&out, 1}, output.scalar_type(), {&whole, 1}, at::kFloat, count, false);
  });
}

// In place: the sum of few elements of all ranks, from all of them.
void HostsCollectives::add_small(HostsCall& call, const at::Tensor& values) {
  const auto bytes = static_cast<int64_t>(span_of(values).size());
  if (bytes == 0) return;
  const auto all = finish_small_gather(call, bytes);
  std::vector<const void*> inputs;
  for (int host = 0; host < topology_.hosts; ++host) {
    for (int r = 0; r < topology_.local_size; ++r)
      inputs.push_back(bytes_of(all) + (r * topology_.hosts + host) * bytes);
  }
  add_up(values, inputs, values.scalar_type(), topology_.local_size);
}

void HostsCollectives::finish_all_reduce(HostsCall& call) {
  const auto& tensor = call.call.input;
  const int64_t n = reduced_slice(call.call);
  const int64_t rest = n * ranks();
  check_records(call);
  if (n > 0) {
    const auto own = part(tensor, rank_at(topology_.host) * n, n);
    add_parts(call, own, part(tensor, 0, rest), n);
    call.sending.wait();        // the ranks of this host have read what is about to be overwritten,
    wait_for_departures(call);  // and so have the rails
    for (int d = 1; d <= others(); ++d) {
      const int from = host_after(topology_.hosts - d);
      arrive(call, from, Channel::homeward, part(tensor, rank_at(from) * n, n));
    }
    for (int d = 1; d <= others(); ++d) depart(call, host_after(d), Channel::homeward, own);
    const int64_t block = n * topology_.local_size;
    for (int d = 0; d <= others(); ++d) {
      const int from = host_after((topology_.hosts - d) % topology_.hosts);
      wait_for(call, from);
      if (!alone())
        run_local(*homeward_, call, Op::all_gather, part(tensor, from * block, block),
                  part(tensor, rank_at(from) * n, n));
    }
  }
  add_small(call, part(tensor, rest, tensor.numel() - rest));
}

// --- The others ---

void HostsCollectives::broadcast(HostsCall& call) {
  const auto& tensor = call.call.input;
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const int root_host = call.call.root / topology_.local_size;
  const int root_place = call.call.root % topology_.local_size;
  check_records(call);
  if (topology_.local_rank == root_place) {
    const int hosts = topology_.hosts;
    const int link = (topology_.host - root_host + hosts) % hosts;  // of the chain
    const auto all = as_dtype(tensor, bytes, at::kByte);
    const auto chunk = [&](int64_t at) {
      return part(all, at, std::min(kBroadcastChunk, bytes - at));
    };
    const int before = host_after(hosts - 1);
    auto& arrivals = call.arrivals[static_cast<size_t>(before)];
    arrivals.clear();
    for (int64_t at = 0; link > 0 && at < bytes; at += kBroadcastChunk)
      arrive(call, before, Channel::homeward, chunk(at));
    for (int64_t at = 0; at < bytes; at += kBroadcastChunk) {
      if (link > 0) await(*arrivals[static_cast<size_t>(at / kBroadcastChunk)], before);
      if (link + 1 < hosts) depart(call, host_after(1), Channel::homeward, chunk(at));
    }
  }
  if (!alone()) run_local(*homeward_, call, Op::broadcast, tensor, tensor, root_place);
}

void HostsCollectives::start_all_to_all(HostsCall& call) {
  const auto& output = call.call.output;
  const auto& input = call.call.input;
  const int64_t block = input.numel() / topology_.hosts;
  for (int d = 1; d <= others(); ++d) {
    const int from = host_after(topology_.hosts - d);
    arrive(call, from, Channel::gather, part(output, from * block, block));
  }
  for (int d = 1; d <= others(); ++d) {
    const int to = host_after(d);
    auto leaves = part(input, to * block, block);
    if (!alone() && block > 0) {
      call.held.push_back(scratch_.take(static_cast<int64_t>(span_of(leaves).size())));
      const auto ordered = as_dtype(call.held.back(), block, input.scalar_type());
      run_local(*outward_, call, Op::all_to_all, ordered, leaves);
      leaves = ordered;
    }
    depart(call, to, Channel::gather, leaves);
  }
}

void HostsCollectives::finish_all_to_all(HostsCall& call) {
  const auto& output = call.call.output;
  const auto& input = call.call.input;
  const int64_t block = input.numel() / topology_.hosts;
  const auto from = part(input, topology_.host * block, block);
  const auto to = part(output, topology_.host * block, block);
  if (alone()) {
    copy_values(to, from);
  } else {
    run_local(*homeward_, call, Op::all_to_all, to, from);
  }
  check_records(call);
  for (int host = 0; host < topology_.hosts; ++host) wait_for(call, host);
}

// --- The two phases ---

bool HostsCollectives::small(const Call& call) const {
  if (control_) return true;
  if (call.wire || call.shared_output) return false;
  if (call.op == Op::all_gather) return static_cast<int64_t>(call.output.nbytes()) <= kSmall;
  return call.op == Op::all_reduce && static_cast<int64_t>(call.input.nbytes()) * ranks() <= kSmall;
}

// Of an all-reduce: the elements of a slice that is reduced and gathered. What is left over is
// exchanged whole.
int64_t HostsCollectives::reduced_slice(const Call& call) const {
  return small(call) ? 0 : call.input.numel() / ranks();
}

void HostsCollectives::open(HostsCall& call) {
  exchange_records(call);
  const auto& tensor = call.call.input;
  switch (call.call.op) {
    case Op::all_gather:
      if (call.call.wire) break;
      small(call.call) ? start_small_gather(call, tensor) : start_gather(call);
      break;
    case Op::reduce_scatter:  // what one phase adds up in, and the other
      if (!call.call.wire) break;
      for (int phase = 0; phase < 2; ++phase) call.held.push_back(scratch_.take(chunk_bytes()));
      break;
    case Op::all_reduce: {
      const int64_t begin = reduced_slice(call.call) * ranks();
      start_small_gather(call, part(tensor, begin, tensor.numel() - begin));
      break;
    }
    case Op::all_to_all:
      start_all_to_all(call);
      break;
    default:
      break;
  }
}

void HostsCollectives::send(HostsCall& call) {
  const auto& tensor = call.call.input;
  if (call.call.op == Op::all_gather && call.call.wire) send_packed(call);
  if (call.call.op == Op::reduce_scatter) send_parts(call, tensor, call.call.output.numel());
  if (call.call.op == Op::all_reduce) {
    if (const int64_t n = reduced_slice(call.call); n > 0) send_parts(call, tensor, n);
  }
}

void HostsCollectives::homeward(HostsCall& call) {
  const auto& output = call.call.output;
  const auto& input = call.call.input;
  const bool in_chunks = call.call.op == Op::reduce_scatter || call.call.op == Op::all_reduce ||
                         call.call.wire.has_value();
  if (!in_chunks) call.sending.wait();
  switch (call.call.op) {
    case Op::all_gather:
      if (call.call.wire) {
        finish_packed_gather(call);
      } else {
        small(call.call) ? finish_small_all_gather(call) : finish_gather(call);
      }
      break;
    case Op::reduce_scatter:
      check_records(call);
      add_parts(call, output, input, output.numel());
      break;
    case Op::all_reduce:
      finish_all_reduce(call);
      break;
    case Op::broadcast:
      broadcast(call);
      break;
    case Op::all_to_all:
      finish_all_to_all(call);
      break;
    case Op::barrier:  // the others at this place are there; then those at every place
      check_records(call);
      if (!alone()) run_local(*homeward_, call, Op::barrier, {}, {});
      break;
    default:
      ensure(false, "a collective that several hosts do not have");
  }
  for (int host = 0; host < topology_.hosts; ++host) wait_for(call, host);
  call.sending.wait();
  wait_for_departures(call);
  for (auto& array : call.held) scratch_.give(std::move(array));
  call.held.clear();
}

}  // namespace zero::comm
