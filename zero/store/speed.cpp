#include "zero/store/speed.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <random>

#include "zero/store/folder.h"

namespace zero::store {

namespace {

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

// Aligned, and of no pattern: some disks compress.
std::unique_ptr<std::byte, Free> random_bytes(int64_t bytes) {
  std::unique_ptr<std::byte, Free> memory(
      static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<size_t>(bytes))));
  if (!memory) throw std::bad_alloc();
  std::mt19937_64 random(1);
  for (int64_t at = 0; at < bytes; at += 8) {
    const uint64_t value = random();
    std::memcpy(memory.get() + at, &value, sizeof value);
  }
  return memory;
}

}  // namespace

double sweep_seconds(File& file, std::byte* memory, int64_t chunk, bool write) {
  constexpr size_t kUnderWay = 2;
  std::deque<Transfer> under_way;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t at = 0, turn = 0; at < file.bytes(); at += chunk, ++turn) {
    if (under_way.size() == kUnderWay) {
      under_way.front().wait();
      under_way.pop_front();
    }
    auto* part = memory + turn % static_cast<int64_t>(kUnderWay) * chunk;
    const auto bytes = std::min(chunk, file.bytes() - at);
    under_way.push_back(write ? file.write(at, part, bytes) : file.read(at, part, bytes));
  }
  for (auto& transfer : under_way) transfer.wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::vector<double> measure_speeds(const std::vector<std::string>& folders, int64_t bytes,
                                   FileOptions options) {
  options.checksums = false;
  const int64_t chunk = int64_t{8} << 20;
  const auto memory = random_bytes(2 * chunk);
  std::vector<double> speeds;
  for (const auto& parent : folders) {
    const Folder folder(parent);
    File file(folder.path() + "/speed", bytes, options);
    const double seconds = sweep_seconds(file, memory.get(), chunk, true) +
                           sweep_seconds(file, memory.get(), chunk, false);
    speeds.push_back(2 * static_cast<double>(file.bytes()) / seconds);
  }
  return speeds;
}

}  // namespace zero::store
