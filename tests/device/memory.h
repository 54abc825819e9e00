// The memory of the devices: addresses, blocks, and the free ones, kept by stream as a caching
// allocator does. Not thread-safe: the machine's mutex protects it.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "tests/device/clock.h"

namespace zero::simulated {

class Memory {
 public:
  struct Block {
    char* data = nullptr;
    size_t bytes = 0;         ///< a multiple of 512
    Actor stream = -1;        ///< on which it was allocated: reuse is ordered there
    std::set<Actor> used_on;  ///< other streams, by record_stream
  };
  struct Usage {
    size_t allocated = 0, peak = 0;
    size_t reserved = 0;  ///< with the free blocks
  };

  /// Reserves the addresses; see Note [Two addresses] in device.h. Throws where the system has
  /// none.
  Memory();

  bool owns(const void* pointer) const;
  /// Returns the address of the bytes of a device pointer.
  static char* backing(const void* pointer);

  /// A block of a stream: a free one of the same size, or a new one, poisoned if so asked. Throws
  /// c10::OutOfMemoryError beyond `limit` bytes of the device.
  const Block& take(size_t bytes, Actor stream, size_t limit, bool poison);
  /// The live block that holds the address, or null. Valid until the next call of a member.
  Block* find(const void* pointer);
  /// Ends the life of the block that begins there; it may be given back.
  Block remove(void* pointer);
  /// Makes it free for its stream.
  void give_back(const Block& block);
  /// Frees nothing but counts: the free blocks of a device are no longer reserved.
  void empty_cache();

  const Usage& usage(int device) const { return usage_[static_cast<size_t>(device)]; }
  void reset_peak(int device);

 private:
  char* base_;
  char* next_;  // addresses from here on have never been used
  std::map<const char*, Block> live_;
  std::map<std::pair<Actor, size_t>, std::vector<Block>> free_;
  std::array<Usage, kDevices> usage_{};
};

}  // namespace zero::simulated
