// `zero bench nvme`: how fast states come from a disk and go to it, by block size and queue depth.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <filesystem>
#include <functional>

#include "apps/zero/bench.h"
#include "zero/base/error.h"
#include "zero/base/host_memory.h"
#include "zero/store/file.h"
#include "zero/store/folder.h"

namespace zero::app::benchmarks {
namespace {

constexpr const char* kDescription =
    "Times a file of states: written and read in sequence, past the page cache, as an update "
    "streams "
    "it.\n\n"
    "  zero bench nvme --path /mnt/nvme --tune\n\n"
    "GB/s are 1e9 bytes a second, the median of the rounds; every round runs all settings once. "
    "With "
    "--tune the setting\n"
    "whose slower direction is the fastest is printed as the configuration's section `aio`.";

struct Options {
  std::string path;
  int64_t size = int64_t{1} << 30;
  std::vector<int64_t> blocks{256 << 10, 1 << 20, 4 << 20};
  std::vector<int> depths{4, 8, 32};
  int rounds = 3;
  bool tune = false;
  bool threads = false;
  JsonFile json;
};

std::optional<int> read_command_line(const Arguments& arguments, Options& options) {
  OptionParser parser("bench nvme", kDescription);
  parser.add_option("--path", options.path, "Folder on the disk")->required()->type_name("DIR");
  parser.add_option("--size", options.size, "Bytes of the file, as 1GiB [1GiB]")
      ->transform(CLI::AsSizeValue(false))
      ->check(positive())
      ->type_name("BYTES");
  parser.add_option("--blocks", options.blocks, "Bytes of a transfer")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->check(positive())
      ->option_text("B,... [256KiB,1MiB,4MiB]");
  parser.add_option("--depths", options.depths, "Transfers under way at a time")
      ->delimiter(',')
      ->check(positive())
      ->option_text("D,... [4,8,32]");
  parser.add_option("--rounds", options.rounds, "Runs of each setting")->check(positive());
  parser.add_flag("--threads", options.threads, "Threads, even where io_uring works");
  parser.add_flag("--tune", options.tune, "Print the best setting as the section `aio`");
  options.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  options.json.check();
  return std::nullopt;
}

/// Seconds to move the whole file once, with enough under way to fill the queue.
double sweep(store::File& file, std::byte* memory, int64_t chunk, bool write) {
  constexpr size_t kUnderWay = 2;
  std::deque<store::Transfer> under_way;
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

struct Setting {
  int64_t block = 0;
  int depth = 0;
  std::string way;
  std::vector<double> write, read;  // GB/s
  /// What is started at once: fills the queue, and is no less than an update's block of arrays.
  int64_t chunk() const {
    const auto least = std::max(block * depth, int64_t{8} << 20);
    return (least + store::kAlignment - 1) / store::kAlignment * store::kAlignment;
  }
  double slower() const { return std::min(summarize(write).median, summarize(read).median); }
};

}  // namespace

int nvme(const Arguments& arguments) {
  Options options;
  if (const auto status = read_command_line(arguments, options)) return *status;
  const auto start = machine();
  const store::Folder folder(options.path);
  std::vector<Setting> settings;
  int64_t chunk = 0;
  for (const auto block : options.blocks) {
    for (const int depth : options.depths) {
      settings.push_back({.block = block, .depth = depth, .way = {}, .write = {}, .read = {}});
      chunk = std::max(chunk, settings.back().chunk());
    }
  }
  const auto memory =
      host_zeros(2 * chunk, at::kByte, std::make_shared<Ledger>(), Category::offload_buffers);
  memory.random_();  // some disks compress
  auto* bytes = static_cast<std::byte*>(memory.data_ptr());

  fmt::print("machine   {}\nfile      {} in {}, {} rounds\n", describe(start),
             format_bytes(static_cast<double>(options.size)), options.path, options.rounds);
  for (int round = 0; round < options.rounds; ++round) {
    for (auto& setting : settings) {
      store::File file(
          folder.path() + "/bench", options.size,
          {.block_bytes = setting.block, .queue_depth = setting.depth, .uring = !options.threads});
      setting.way = file.way();
      const auto rate = [&](double seconds) {
        return static_cast<double>(file.bytes()) / seconds * 1e-9;
      };
      setting.write.push_back(rate(sweep(file, bytes, setting.chunk(), true)));
      setting.read.push_back(rate(sweep(file, bytes, setting.chunk(), false)));
    }
  }

  Json results = Json::array();
  fmt::print("\n{:>10} {:>6} {:>12} {:>12}  {}\n", "block", "depth", "write GB/s", "read GB/s",
             "way");
  for (const auto& setting : settings) {
    const auto write = summarize(setting.write);
    const auto read = summarize(setting.read);
    fmt::print("{:>10} {:>6} {:>12.2f} {:>12.2f}  {}\n",
               format_bytes(static_cast<double>(setting.block)), setting.depth, write.median,
               read.median, setting.way);
    results.push_back({{"block_size", setting.block},
                       {"queue_depth", setting.depth},
                       {"way", setting.way},
                       {"write_gb_per_s", write.json()},
                       {"read_gb_per_s", read.json()}});
  }
  if (options.tune) {
    const auto best = std::max_element(
        settings.begin(), settings.end(),
        [](const Setting& a, const Setting& b) { return a.slower() < b.slower(); });
    const Json section{{"aio",
                        {{"block_size", best->block},
                         {"queue_depth", best->depth},
                         {"use_io_uring", !options.threads}}}};
    fmt::print("\n{}\n", section.dump(2));
  }
  options.json.write("nvme", start,
                     {{"path", options.path}, {"size", options.size}, {"rounds", options.rounds}},
                     results);
  return 0;
}

}  // namespace zero::app::benchmarks
