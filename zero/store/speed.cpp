#include "zero/store/speed.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <random>

#include "zero/base/host_memory.h"
#include "zero/store/folder.h"

namespace zero::store {

namespace {

// Fills memory with random bytes. It does not use LibTorch's generator, whose numbers belong to the
// training.
void fill_at_random(std::byte* memory, int64_t bytes) {
  std::mt19937_64 random(1);
  for (int64_t at = 0; at < bytes; at += 8) {
    const uint64_t value = random();
    std::memcpy(memory + at, &value, sizeof value);
  }
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
  // The memory has the pages that states have: a disk is twice as fast with huge pages.
  const auto tensor =
      host_zeros(2 * chunk, at::kByte, std::make_shared<Ledger>(), Category::offload_buffers);
  auto* memory = static_cast<std::byte*>(tensor.data_ptr());
  fill_at_random(memory, 2 * chunk);  // some disks compress
  std::vector<double> speeds;
  for (const auto& parent : folders) {
    const Folder folder(parent);
    File file(folder.path() + "/speed", bytes, options);
    // The first sweep is not timed: only in the first write to a reservation the file system must
    // note which parts hold data.
    sweep_seconds(file, memory, chunk, true);
    const double seconds =
        sweep_seconds(file, memory, chunk, true) + sweep_seconds(file, memory, chunk, false);
    speeds.push_back(2 * static_cast<double>(file.bytes()) / seconds);
  }
  return speeds;
}

}  // namespace zero::store
