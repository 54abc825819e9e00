// A value in memory that processes share, without locks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace zero::comm {

/// A trivially copyable value in shared memory, read and written word by word.
template <class T>
class SharedValue {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);

 public:
  void store(const T& value) {
    std::array<uint64_t, sizeof(T) / sizeof(uint64_t)> words;
    std::memcpy(words.data(), &value, sizeof(T));
    for (size_t i = 0; i < words.size(); ++i) words_[i].store(words[i], std::memory_order_relaxed);
  }
  T load() const {
    std::array<uint64_t, sizeof(T) / sizeof(uint64_t)> words;
    for (size_t i = 0; i < words.size(); ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    T value;
    std::memcpy(static_cast<void*>(&value), words.data(), sizeof(T));
    return value;
  }

 private:
  std::array<std::atomic<uint64_t>, sizeof(T) / sizeof(uint64_t)> words_{};
};

}  // namespace zero::comm
