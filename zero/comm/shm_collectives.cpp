// Note [Collectives in shared memory]
// A call opens with each rank's record of it (shm_control.h) and a synchronisation, and closes with
// another, after which inputs may be overwritten. In between each rank reads its peers' memory (and
// writes it, in an all-reduce and where it helps: Note [Helping]): in place if the tensor lies in
// the arena, otherwise in the peer's staging buffer, through which the tensor passes in chunks. The
// buffer has two halves that are used in turn, so that one synchronisation a chunk is enough: a
// half is written again only after a synchronisation that every rank enters having read it. Ranks'
// tensors may lie in different places; if one stages, all go by chunks.
//
// Note [Matching]
// Every rank compares every rank's record with its own: the kind, sizes, dtypes, root and label. So
// either all go on or all throw a CommError that lists who called what; no rank touches data
// before.
//
// Note [Helping]
// A reduction ends when its last slice is summed, and ranks are not equally fast: one may have to
// share its core. So a slice is summed in pieces, each of which the first free rank claims; a rank
// begins with its own slice, and then helps the others, if both their inputs and their outputs lie
// in the arena. Sums do not depend on who adds them. If the call fails on a rank, a piece that a
// peer has begun is still written, so the output of a failed call must not be used again.
#include "zero/comm/shm_collectives.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/streaming.h"
#include "zero/comm/array_views.h"
#include "zero/comm/copy_kernels.h"
#include "zero/comm/reduce_kernels.h"

namespace zero::comm {
namespace {

constexpr int64_t kHalf = kStagingBytes / 2;
constexpr int64_t kSmallAllReduce = int64_t{16} << 10;
constexpr int64_t kGrain = int64_t{1} << 18;  // bytes that are worth a thread

int64_t input_bytes(const Call& call) {
  return call.input.defined() ? static_cast<int64_t>(call.input.nbytes()) : 0;
}
int64_t output_bytes(const Call& call) {
  return call.output.defined() ? static_cast<int64_t>(call.output.nbytes()) : 0;
}
// Returns the bytes from the first of the input to the last.
int64_t stretch_of(const CallRecord& record, int ranks) {
  if (record.slice_distance == 0) return record.input_bytes;
  return record.slice_distance * (ranks - 1) + record.input_bytes / ranks;
}
int64_t element_bytes(const at::Tensor& tensor) { return tensor.element_size(); }

// A rank's share of an array in a reduction is cut into this many pieces; some more than threads,
// so that all end together.
int64_t pieces(int64_t bytes) { return at::ceil_div(bytes, kGrain); }

// Returns how much of each rank's slice fits in half a staging buffer beside the others'.
int64_t slice_chunk(int ranks) { return std::max<int64_t>(64, kHalf / ranks / 64 * 64); }

}  // namespace

Collectives::Collectives(std::shared_ptr<Peers> peers, std::shared_ptr<Arena> arena,
                         std::shared_ptr<Ledger> ledger, std::shared_ptr<Traffic> traffic,
                         int block)
    : peers_(std::move(peers)),
      arena_(std::move(arena)),
      ledger_(std::move(ledger)),
      traffic_(std::move(traffic)),
      block_(block > 0 ? block : kOneBlock),
      records_(static_cast<size_t>(peers_->size())),
      doing_([this] { return own_.describe(); }) {}

void Collectives::run(Call& call) {
  deadline_ = deadline_after(call.timeout);
  copied_ = 0;
  begin(call);
  switch (call.op) {
    case Op::all_gather:
      all_gather(call);
      break;
    case Op::reduce_scatter:
      reduce_scatter(call);
      break;
    case Op::all_reduce:
      input_bytes(call) <= kSmallAllReduce ? small_all_reduce(call) : all_reduce(call);
      break;
    case Op::broadcast:
      broadcast(call);
      break;
    case Op::all_to_all:
      all_to_all(call);
      break;
    case Op::window:
      for (const auto& record : records_) call.window_offsets.push_back(record.data_offset);
      break;
    default:
      break;
  }
  // These two read no peer's memory, and records alternate, so one synchronisation is enough.
  if (call.op != Op::barrier && call.op != Op::window) sync();
  peers_->own().finished.store(sequence_, std::memory_order_release);
  traffic_->add_copied(call.counted, copied_);
}

void Collectives::begin(Call& call) {
  own_ = CallRecord{};
  own_.sequence = ++sequence_;
  own_.op = call.op;
  own_.label = call.label;
  own_.root = call.root;
  own_.within = call.within;
  own_.digest = call.digest;
  own_.wire = wire_code(call.wire);
  own_.data_offset = 0;
  staged_ = false;
  if (call.op == Op::window) {
    own_.input_bytes = call.window_bytes;
    own_.output_bytes = call.window_slots;
    call.window_block = std::make_unique<SharedBlock>(
        arena_, call.window_block_bytes[static_cast<size_t>(peers_->rank())]);
    own_.data_offset = call.window_block->offset();
  } else if (call.input.defined()) {
    own_.input_bytes = input_bytes(call);
    own_.output_bytes = output_bytes(call);
    own_.input_dtype = static_cast<int8_t>(call.input.scalar_type());
    own_.output_dtype = static_cast<int8_t>(call.output.scalar_type());
    own_.output_offset = arena_->mapping()->offset_of(call.output.data_ptr(), own_.output_bytes);
    const bool read_by_peers =
        own_.input_bytes > 0 && (call.op != Op::broadcast || call.root == peers_->rank());
    if (read_by_peers) {
      own_.slice_distance = call.slice_distance;
      own_.data_offset =
          arena_->mapping()->offset_of(call.input.data_ptr(), stretch_of(own_, peers_->size()));
      staged_ = own_.data_offset < 0 ||
                (call.op == Op::all_reduce && own_.input_bytes <= kSmallAllReduce);
      if (staged_) {
        ensure_staging();
        own_.data_offset = -1;
        own_.staging_offset = staging_->offset();
      }
    }
  }
  auto& slot = peers_->own();
  slot.claimed.store(0, std::memory_order_relaxed);  // all have left the call before
  slot.calls[sequence_ % 2].store(own_);
  slot.started.store(sequence_, std::memory_order_release);
  if (staged_) stage_first(call);
  sync();
  for (int r = 0; r < peers_->size(); ++r) {
    records_[static_cast<size_t>(r)] = peers_->slot(r).calls[sequence_ % 2].load();
  }
  check_matching();
  check_places(call);
}

void Collectives::ensure_staging() {
  if (staging_) return;
  staging_ = std::make_unique<SharedBlock>(arena_, kStagingBytes, ledger_, Category::communication);
}

std::byte* Collectives::staging(int half) const { return staging_->data() + half * kHalf; }

bool Collectives::any_staged() const {
  return std::any_of(records_.begin(), records_.end(),
                     [](const CallRecord& record) { return record.data_offset < 0; });
}

void Collectives::sync() {
  auto& own = peers_->own();
  const uint32_t target = own.ticks.fetch_add(1, std::memory_order_acq_rel) + 1;
  futex_wake(&own.ticks);
  for (int i = 1; i < peers_->size(); ++i) {
    const int r = (peers_->rank() + i) % peers_->size();
    const auto& ticks = peers_->slot(r).ticks;
    peers_->wait(
        r, &ticks,
        [&]() -> std::optional<uint32_t> {
          const auto now = ticks.load(std::memory_order_acquire);
          if (static_cast<int32_t>(now - target) >= 0) return std::nullopt;
          return now;
        },
        deadline_, doing_);
  }
  peers_->check_failed(doing_);
}

void Collectives::check_matching() const {
  const bool all_match =
      std::all_of(records_.begin(), records_.end(),
                  [&](const CallRecord& record) { return record.matches(own_); });
  if (all_match) return;
  refuse_mismatch(
      records_, [this](int rank) { return peers_->number(rank); }, peers_->number(peers_->rank()));
}

void Collectives::distrust(int rank, const std::string& what) const {
  throw CommError(
      fmt::format("Rank {} has written {} into the shared memory, for {}; rank {} does not use it. "
                  "Does something in that rank's program write where it should not?",
                  peers_->number(rank), what, own_.describe(), peers_->number(peers_->rank())));
}

void Collectives::check_place(int rank, std::string_view what, int64_t offset, int64_t bytes,
                              int first, int last) const {
  if (arena_->mapping()->layout().holds(offset, bytes, first, last)) return;
  distrust(rank, fmt::format("that its {} is {} bytes at {}", what, bytes, offset));
}

// Checks the places in peers' matching records that this rank will read and write.
void Collectives::check_places(const Call& call) const {
  const int n = peers_->size();
  for (int r = 0; r < n; ++r) {
    if (r == peers_->rank()) continue;
    const auto& record = records_[static_cast<size_t>(r)];
    if (call.op == Op::window) {
      check_place(r, "block of the window", record.data_offset,
                  call.window_block_bytes[static_cast<size_t>(r)], r, r + 1);
      if (record.data_offset % Arena::kGranularity != 0)
        distrust(r, fmt::format("that its block of the window is at {}", record.data_offset));
      continue;
    }
    const bool read = record.input_bytes > 0 && (call.op != Op::broadcast || call.root == r);
    if (!read) continue;
    if (record.data_offset >= 0) {
      check_place(r, "input", record.data_offset, stretch_of(record, n), 0, n);
    } else {
      check_place(r, "staging buffer", record.staging_offset, kStagingBytes, r, r + 1);
    }
    // If nothing is staged, an all-reduce writes every rank's tensor.
    const bool written = call.op == Op::all_reduce && record.data_offset >= 0;
    if (record.output_offset >= 0 || written)
      check_place(r, "output", record.output_offset, record.output_bytes, 0, n);
  }
}

const std::byte* Collectives::peer_bytes(int rank, int64_t offset_in_place, int half,
                                         int64_t offset_in_half) const {
  const auto& record = records_[static_cast<size_t>(rank)];
  if (record.data_offset >= 0) return arena_->mapping()->at(record.data_offset + offset_in_place);
  return arena_->mapping()->at(record.staging_offset + half * kHalf + offset_in_half);
}

// Returns a peer's output, or null if this rank cannot write it.
std::byte* Collectives::output_of(int rank) const {
  const auto offset = records_[static_cast<size_t>(rank)].output_offset;
  return offset < 0 ? nullptr : arena_->mapping()->at(offset);
}

void Collectives::copy(void* to, const void* from, int64_t bytes) {
  if (to == from || bytes == 0) return;
  copied_ += bytes;
  if (bytes <= kGrain || at::get_num_threads() == 1) {
    copy_bytes(to, from, bytes);
    return;
  }
  at::parallel_for(0, bytes, kGrain, [&](int64_t first, int64_t last) {
    copy_bytes(static_cast<std::byte*>(to) + first, static_cast<const std::byte*>(from) + first,
               last - first);
  });
}

bool Collectives::all_active() const {
  for (int r = 0; r < peers_->size(); ++r)
    if (peers_->being(r).current_state() != RankState::active) return false;
  return true;
}

void Collectives::add_piece(const Call& call, const Share& share, int64_t piece) const {
  const int64_t size = share.bytes / pieces(share.bytes) / 64 * 64;  // whole cache lines
  const int64_t begin = piece * size;
  const int64_t end = piece + 1 == pieces(share.bytes) ? share.bytes : begin + size;
  const int64_t width = element_bytes(call.input);
  c10::SmallVector<const void*, 8> inputs;
  for (const auto* input : share.inputs) inputs.push_back(input + begin);
  c10::SmallVector<void*, 8> outputs;
  for (auto* output : share.outputs)
    outputs.push_back(output + begin / width * element_bytes(call.output));
  sum(outputs, call.output.scalar_type(), inputs, call.input.scalar_type(), (end - begin) / width,
      share.bytes >= kStreamedBytes, block_);
}

void Collectives::add(const Call& call, const Share& own) {
  copied_ += (peers_->size() - 1) * own.bytes;
  at::parallel_for(0, pieces(own.bytes), 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) add_piece(call, own, piece);
  });
}

// Adds the pieces of all ranks' slices that nobody has claimed yet, as Note [Helping] above says.
void Collectives::add_together(const Call& call, const std::function<Share(int)>& share_of) {
  const int n = peers_->size();
  const auto own = share_of(peers_->rank());
  const int64_t mine = own.bytes;
  // Any rank that adds this slice reads and writes all but one of the arrays of other ranks.
  copied_ += (n + static_cast<int64_t>(own.outputs.size()) - 2) * mine;
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), pieces(mine)), 1, [&](auto, auto) {
    for (int i = 0; i < n; ++i) {
      const int r = (peers_->rank() + i) % n;
      const auto share = share_of(r);
      if (share.outputs.empty()) continue;
      // No piece is begun once a rank has given up, since its memory may soon serve something else.
      while (all_active()) {
        const int64_t piece = peers_->slot(r).claimed.fetch_add(1, std::memory_order_relaxed);
        if (piece >= pieces(share.bytes)) break;
        if (piece < 0) distrust(r, fmt::format("{} as the pieces of its share", piece));
        add_piece(call, share, piece);
      }
    }
  });
}

// Writes the chunk that opens a staged call, so that the call's first synchronisation publishes it
// too.
void Collectives::stage_first(const Call& call) {
  const auto* from = bytes_of(call.input);
  const int n = peers_->size();
  if (call.op == Op::reduce_scatter || call.op == Op::all_to_all) {
    const auto slice = own_.input_bytes / n;
    const auto distance = own_.slice_distance == 0 ? slice : own_.slice_distance;
    const auto chunk = slice_chunk(n);
    for (int r = 0; r < n; ++r) {
      if (r != peers_->rank())
        copy(staging(0) + r * chunk, from + r * distance, std::min(chunk, slice));
    }
  } else {
    copy(staging(0), from, std::min(kHalf, own_.input_bytes));
  }
}

void Collectives::all_gather(const Call& call) {
  const auto total = own_.input_bytes;
  const auto step = any_staged() ? kHalf : total;
  const int n = peers_->size();
  auto* out = bytes_of(call.output);
  const auto* in = bytes_of(call.input);
  int half = 0;
  for (int64_t at = 0; at < total; at += step, half ^= 1) {
    const auto bytes = std::min(step, total - at);
    if (at > 0) {
      if (staged_) copy(staging(half), in + at, bytes);
      sync();
    }
    for (int i = 0; i < n; ++i) {  // each rank begins with another peer
      const int r = (peers_->rank() + i) % n;
      copy(out + r * total + at, r == peers_->rank() ? in + at : peer_bytes(r, at, half, 0), bytes);
    }
  }
}

void Collectives::reduce_scatter(const Call& call) {
  const int n = peers_->size();
  const auto slice = own_.input_bytes / n;
  const auto distance = own_.slice_distance == 0 ? slice : own_.slice_distance;
  const auto* in = bytes_of(call.input);
  if (!any_staged()) {
    add_together(call, [&](int owner) {
      Share share{.bytes = slice};
      auto* output = owner == peers_->rank() ? bytes_of(call.output) : output_of(owner);
      if (output != nullptr) share.outputs.push_back(output);
      for (int r = 0; r < n; ++r) share.inputs.push_back(peer_bytes(r, owner * distance, 0, 0));
      return share;
    });
    return;
  }
  const auto chunk = slice_chunk(n);
  const auto width = element_bytes(call.input);
  int half = 0;
  for (int64_t at = 0; at < slice; at += chunk, half ^= 1) {
    const auto bytes = std::min(chunk, slice - at);
    if (at > 0) {
      for (int r = 0; staged_ && r < n; ++r) {
        if (r != peers_->rank()) copy(staging(half) + r * chunk, in + r * distance + at, bytes);
      }
      sync();
    }
    const auto mine = peers_->rank() * distance + at;
    Share share{.outputs = {bytes_of(call.output) + at / width * element_bytes(call.output)},
                .bytes = bytes};
    for (int r = 0; r < n; ++r) {
      share.inputs.push_back(
          r == peers_->rank() ? in + mine : peer_bytes(r, mine, half, peers_->rank() * chunk));
    }
    add(call, share);
  }
}

// Each element is summed once, and in the arena written to every rank at once, so that no rank
// needs to fetch it. Otherwise every rank sums its own share, then fetches the other shares.
void Collectives::all_reduce(const Call& call) {
  const int n = peers_->size();
  const auto total = own_.input_bytes;
  auto* data = bytes_of(call.output);
  // Returns the bytes that `owner` sums, in whole cache lines.
  const auto begin_of = [&](int64_t bytes, int owner) {
    return std::min(bytes, owner * (bytes / n / 64 + 1) * 64);
  };
  const auto bytes_of_share = [&](int64_t bytes, int owner) {
    return begin_of(bytes, owner + 1) - begin_of(bytes, owner);
  };
  if (!any_staged()) {
    add_together(call, [&](int owner) {
      Share share{.bytes = bytes_of_share(total, owner)};
      for (int r = 0; r < n; ++r) {
        share.inputs.push_back(peer_bytes(r, begin_of(total, owner), 0, 0));
        share.outputs.push_back(output_of(r) + begin_of(total, owner));
      }
      return share;
    });
    return;
  }
  int half = 0;
  for (int64_t at = 0; at < total; at += kHalf, half ^= 1) {
    const auto bytes = std::min(kHalf, total - at);
    if (at > 0) {
      if (staged_) copy(staging(half), data + at, bytes);
      sync();
    }
    auto* own = staged_ ? staging(half) : data + at;
    const auto mine = begin_of(bytes, peers_->rank());
    Share share{.outputs = {own + mine}, .bytes = bytes_of_share(bytes, peers_->rank())};
    for (int r = 0; r < n; ++r) share.inputs.push_back(peer_bytes(r, at + mine, half, mine));
    add(call, share);
    sync();
    for (int i = 0; i < n; ++i) {
      const int r = (peers_->rank() + i) % n;
      const auto begin = begin_of(bytes, r);
      copy(data + at + begin,
           r == peers_->rank() ? own + begin : peer_bytes(r, at + begin, half, begin),
           bytes_of_share(bytes, r));
    }
  }
}

// Every rank sums everything: for few bytes that is cheaper than a second round.
void Collectives::small_all_reduce(const Call& call) {
  if (own_.input_bytes == 0) return;
  Share all{.outputs = {bytes_of(call.output)}, .bytes = own_.input_bytes};
  for (int r = 0; r < peers_->size(); ++r) all.inputs.push_back(peer_bytes(r, 0, 0, 0));
  add(call, all);
}

void Collectives::broadcast(const Call& call) {
  const auto total = own_.input_bytes;
  const bool is_root = call.root == peers_->rank();
  const auto step = any_staged() ? kHalf : total;
  auto* data = bytes_of(call.output);
  int half = 0;
  for (int64_t at = 0; at < total; at += step, half ^= 1) {
    const auto bytes = std::min(step, total - at);
    if (at > 0) {
      if (staged_) copy(staging(half), data + at, bytes);
      sync();
    }
    if (!is_root) copy(data + at, peer_bytes(call.root, at, half, 0), bytes);
  }
}

void Collectives::all_to_all(const Call& call) {
  const int n = peers_->size();
  const auto slice = own_.input_bytes / n;
  const auto chunk = slice_chunk(n);
  const auto step = any_staged() ? chunk : slice;
  const auto* in = bytes_of(call.input);
  auto* out = bytes_of(call.output);
  int half = 0;
  for (int64_t at = 0; at < slice; at += step, half ^= 1) {
    const auto bytes = std::min(step, slice - at);
    if (at > 0) {
      for (int r = 0; staged_ && r < n; ++r) {
        if (r != peers_->rank()) copy(staging(half) + r * chunk, in + r * slice + at, bytes);
      }
      sync();
    }
    for (int i = 0; i < n; ++i) {
      const int r = (peers_->rank() + i) % n;
      const auto mine = peers_->rank() * slice + at;
      copy(out + r * slice + at,
           r == peers_->rank() ? in + mine : peer_bytes(r, mine, half, peers_->rank() * chunk),
           bytes);
    }
  }
}

}  // namespace zero::comm
