// The collectives of the shared-memory group: what one rank does for each, in step with its peers.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/ledger.h"
#include "zero/comm/arena.h"
#include "zero/comm/call.h"
#include "zero/comm/memory_block.h"
#include "zero/comm/peers.h"
#include "zero/comm/shm_control.h"
#include "zero/comm/traffic.h"

namespace zero::comm {

/// The bytes of the buffer through which tensors of private memory pass.
inline constexpr int64_t kStagingBytes = int64_t{4} << 20;

/// Runs calls one at a time; one thread at a time may call it.
class Collectives {
 public:
  /// For `block` see GroupOptions::sum_block.
  Collectives(std::shared_ptr<Peers> peers, std::shared_ptr<Arena> arena,
              std::shared_ptr<Ledger> ledger, std::shared_ptr<Traffic> traffic, int block = 0);
  /// Blocks until this rank may use the outputs and overwrite the inputs. Throws CommError,
  /// OutOfMemory.
  void run(Call& call);

 private:
  /// A rank's share of a reduction: it adds one array of every rank, for one rank or for all.
  struct Share {
    c10::SmallVector<std::byte*, 8> outputs{};
    c10::SmallVector<const std::byte*, 8> inputs{};
    int64_t bytes = 0;  ///< an input's
  };
  void begin(Call& call);
  void stage_first(const Call& call);
  void sync();
  void check_matching() const;
  void check_places(const Call& call) const;
  void check_place(int rank, std::string_view what, int64_t offset, int64_t bytes, int first,
                   int last) const;
  [[noreturn]] void distrust(int rank, const std::string& what) const;
  bool any_staged() const;
  void ensure_staging();
  std::byte* staging(int half) const;
  const std::byte* peer_bytes(int rank, int64_t offset_in_place, int half,
                              int64_t offset_in_half) const;
  std::byte* output_of(int rank) const;
  void copy(void* to, const void* from, int64_t bytes);
  bool all_active() const;
  void add_piece(const Call& call, const Share& share, int64_t piece) const;
  void add(const Call& call, const Share& own);
  void add_together(const Call& call, const std::function<Share(int)>& share_of);

  void all_gather(const Call& call);
  void reduce_scatter(const Call& call);
  void all_reduce(const Call& call);
  void small_all_reduce(const Call& call);
  void broadcast(const Call& call);
  void all_to_all(const Call& call);

  std::shared_ptr<Peers> peers_;
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<Traffic> traffic_;
  int64_t block_;
  std::unique_ptr<SharedBlock> staging_;
  uint64_t sequence_ = 0;
  bool staged_ = false;              // this rank's input goes through its staging buffer
  CallRecord own_;                   // the call under way
  std::vector<CallRecord> records_;  // every rank's
  Clock::time_point deadline_;
  Describe doing_;
  int64_t copied_ = 0;
};

}  // namespace zero::comm
