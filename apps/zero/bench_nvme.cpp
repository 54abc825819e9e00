// `zero bench nvme`: how fast states come from a disk and go to it, by block size and queue depth.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "apps/zero/bench.h"
#include "zero/base/error.h"
#include "zero/base/host_memory.h"
#include "zero/store/file.h"
#include "zero/store/folder.h"
#include "zero/store/speed.h"

namespace zero::app::benchmarks {
namespace {

constexpr const char* kDescription =
    "Times a file of states: written and read in sequence, past the page cache, as an update "
    "streams it.\n\n"
    "  zero bench nvme --path /mnt/nvme --tune\n"
    "  zero bench nvme --path /mnt/first,/mnt/second\n\n"
    "Over several folders the file is striped, in proportion to a measurement of each. GB/s are "
    "1e9 bytes a second, the\n"
    "median of the rounds; every round runs all settings once, on a file that was written before. "
    "What is read is compared\n"
    "with checksums of what was written, as in training; `checksums` is what one core does of "
    "these. With --tune the setting\n"
    "whose slower direction is the fastest is printed as the configuration's section `aio`.";

struct Options {
  std::vector<std::string> paths;
  int64_t size = int64_t{1} << 30;
  std::vector<int64_t> blocks{256 << 10, 1 << 20, 4 << 20};
  std::vector<int> depths{4, 8, 32};
  int rounds = 3;
  bool tune = false;
  bool threads = false;
  bool no_checksums = false;
  JsonFile json;
};

std::optional<int> read_command_line(const Arguments& arguments, Options& options) {
  OptionParser parser("bench nvme", kDescription);
  parser.add_option("--path", options.paths, "Folder on the disk, or one on each of several")
      ->required()
      ->delimiter(',')
      ->type_name("DIR");
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
  parser.add_flag("--no-checksums", options.no_checksums, "Believe what the disk returns");
  parser.add_flag("--tune", options.tune, "Print the best setting as the section `aio`");
  options.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  options.json.check();
  return std::nullopt;
}

struct Setting {
  int64_t block = 0;
  int depth = 0;
  std::string way;
  std::vector<double> write, read;  // GB/s
  /// Returns the bytes that are started at once: they fill the queue, and are no fewer than an
  /// update's block of arrays.
  int64_t chunk() const {
    const auto least = std::max(block * depth, int64_t{8} << 20);
    return (least + store::kAlignment - 1) / store::kAlignment * store::kAlignment;
  }
  double slower() const { return std::min(summarize(write).median, summarize(read).median); }
};

/// GB/s of checksums on this core, of memory that the caches do not hold where `bytes` is large.
double checksum_rate(const std::byte* memory, int64_t bytes) {
  store::Checksums checksums(bytes);
  const auto start = std::chrono::steady_clock::now();
  checksums.record(0, memory, bytes);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return static_cast<double>(bytes) / seconds.count() * 1e-9;
}

}  // namespace

int nvme(const Arguments& arguments) {
  Options options;
  if (const auto status = read_command_line(arguments, options)) return *status;
  const auto start = machine();
  std::vector<std::unique_ptr<store::Folder>> folders;
  std::vector<std::string> files;
  for (const auto& path : options.paths) {
    folders.push_back(std::make_unique<store::Folder>(path));
    files.push_back(folders.back()->path() + "/bench");
  }
  std::vector<double> speeds{1};
  if (files.size() > 1) speeds = store::measure_speeds(options.paths);
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
             format_bytes(static_cast<double>(options.size)), fmt::join(options.paths, ", "),
             options.rounds);
  if (files.size() > 1) {
    for (size_t i = 0; i < files.size(); ++i)
      fmt::print("disk      {}: {:.2f} GB/s, as much written as read\n", options.paths[i],
                 speeds[i] * 1e-9);
  }
  std::vector<double> checksum_rates;
  for (int round = 0; round < options.rounds; ++round) {
    checksum_rates.push_back(checksum_rate(bytes, 2 * chunk));
    for (auto& setting : settings) {
      store::File file(files, speeds, options.size,
                       {.block_bytes = setting.block,
                        .queue_depth = setting.depth,
                        .uring = !options.threads,
                        .checksums = !options.no_checksums});
      setting.way = file.way();
      const auto rate = [&](double seconds) {
        return static_cast<double>(file.bytes()) / seconds * 1e-9;
      };
      // Untimed: a run writes its file again and again, and only the first time does the file
      // system have to note which blocks of the reservation hold something.
      store::sweep_seconds(file, bytes, setting.chunk(), true);
      setting.write.push_back(rate(store::sweep_seconds(file, bytes, setting.chunk(), true)));
      setting.read.push_back(rate(store::sweep_seconds(file, bytes, setting.chunk(), false)));
    }
  }
  const auto checksums = summarize(checksum_rates);
  fmt::print("checksums {:.2f} GB/s ({:.2f} to {:.2f}) on one core{}\n", checksums.median,
             checksums.least, checksums.most, options.no_checksums ? ", not used below" : "");

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
                     {{"paths", options.paths},
                      {"size", options.size},
                      {"rounds", options.rounds},
                      {"checksums", !options.no_checksums},
                      {"checksum_gb_per_s", checksums.json()}},
                     results);
  return 0;
}

}  // namespace zero::app::benchmarks
