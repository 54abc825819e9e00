// `zero bench collectives`: how near the collectives come to plain copies.
//
// Note [Beside copies]
// A busy moment of the machine must meet a collective and the copies that it is compared with
// alike, so every repetition runs all of them in turn, and the ratio is taken within the
// repetition. All ranks copy at once, as they do inside a collective; a broadcast's root does not,
// so that is compared with copies by one rank less. A copy is memcpy or our own with stores past
// the caches, whichever is faster at this size, between two private buffers on huge pages where the
// system has them.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/zero/bench.h"
#include "apps/zero/plain_loops.h"
#include "apps/zero/ranks.h"
#include "zero/base/error.h"
#include "zero/base/host_memory.h"
#include "zero/comm/agreement.h"
#include "zero/comm/copy_kernels.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/traffic.h"

namespace zero::app::benchmarks {
namespace {

constexpr const char* kDescription =
    "Times the collectives between ranks, beside plain copies in the same run. Between hosts it is "
    "started as training is, by any launcher.\n\n"
    "  zero bench collectives --nproc 2 --sizes 1MiB,64MiB\n\n"
    "S is a size: the bytes of the full buffer (all-gather's output, reduce-scatter's input). A "
    "collective of N ranks must\n"
    "read and write, over all ranks together:\n"
    "  all_gather      2 N S      each rank reads N slices of S/N and writes them\n"
    "  reduce_scatter  (N+1) S    each rank reads its slice of N inputs and writes the sum\n"
    "  all_reduce      2 N S      each element is read on N ranks and its sum written on N\n"
    "  broadcast       2 (N-1) S  each rank but the root reads S and writes it\n"
    "  all_to_all      2 N S\n"
    "GB/s are 1e9 of these bytes a second. `x copy` is the time as a multiple of what copies by as "
    "many processes need for\n"
    "as many bytes (a copy of S reads S and writes S): the median over the repetitions, and the "
    "least and the most.\n"
    "`read by` is S read by each of so many processes and nothing written: some machines copy more "
    "bytes a second than they\n"
    "read, and then nobody sums as fast as he copies.\n"
    "In arena memory peers read a tensor where it is. Private memory passes through staging "
    "buffers, which `bytes` leaves\n"
    "out: `x copy` shows what that costs.";

struct Options {
  std::optional<int> nproc;
  std::vector<int64_t> sizes{64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  std::vector<std::string> dtypes{"fp32"};
  std::vector<std::string> collectives{"all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                       "all_to_all"};
  std::string memory = "both";
  int repetitions = 21;
  int threads = 1;
  JsonFile json;
};

std::optional<int> read_command_line(const Arguments& arguments, Options& options) {
  OptionParser parser("bench collectives", kDescription);
  parser.add_option("-n,--nproc", options.nproc, "Ranks to start on this host [2]")->type_name("N");
  parser.add_option("--sizes", options.sizes, "Sizes S, as 65536 or 64KiB")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->check(positive())
      ->option_text("S,... [64KiB,256KiB,1MiB,4MiB,16MiB,64MiB]");
  parser.add_option("--dtype", options.dtypes, "fp32, bf16 or both, as fp32,bf16")
      ->delimiter(',')
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->type_name("D,...");
  parser
      .add_option("--collectives", options.collectives,
                  "Collectives to time, each with the copies that it is compared with")
      ->delimiter(',')
      ->check(CLI::IsMember(options.collectives))
      ->option_text("C,... [all_gather,reduce_scatter,all_reduce,broadcast,all_to_all]");
  parser
      .add_option("--memory", options.memory,
                  "arena: tensors that the peers read in place; private: staged; or both")
      ->check(CLI::IsMember({"arena", "private", "both"}));
  parser.add_option("--repetitions", options.repetitions, "Timings of each")->check(positive());
  parser.add_option("--threads", options.threads, "Threads of each rank")->check(positive());
  options.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  check_distinct("--dtype", options.dtypes);
  check_distinct("--collectives", options.collectives);
  options.json.check();
  return std::nullopt;
}

/// S rounded down so that every rank's slice is of whole cache lines.
int64_t rounded(int64_t size, int ranks) {
  const int64_t step = int64_t{64} * ranks;
  if (size < step) {
    throw ConfigError(
        fmt::format("--sizes has {} bytes; with {} ranks a size should be at least {}, so that "
                    "each rank has a cache line.",
                    size, ranks, step));
  }
  return size / step * step;
}

/// Bytes that all ranks together must read and write.
int64_t touched_bytes(comm::Collective collective, int64_t size, int64_t ranks) {
  switch (collective) {
    case comm::Collective::all_gather:
    case comm::Collective::all_reduce:
    case comm::Collective::all_to_all:
      return 2 * ranks * size;
    case comm::Collective::reduce_scatter:
      return (ranks + 1) * size;
    case comm::Collective::broadcast:
      return 2 * (ranks - 1) * size;
    case comm::Collective::control:
      break;
  }
  ensure(false, "control calls are not measured");
  return 0;
}

/// One thing to time.
struct Loop {
  std::function<void()> call;
  int64_t calls = 1;              ///< in a timing, so that a small one is no shorter than the clock
  std::vector<double> seconds{};  ///< of a call on the slowest rank, by repetition
};

struct Operation {
  comm::Collective collective;
  Loop loop;
  int workers;                   ///< ranks that read and write
  comm::TrafficCount counted{};  ///< of this rank, as its traffic ledger says
};

void copy_with(at::Tensor& to, const at::Tensor& from,
               const std::function<void(void*, const void*, int64_t)>& kernel) {
  auto* output = static_cast<std::byte*>(to.data_ptr());
  const auto* input = static_cast<const std::byte*>(from.const_data_ptr());
  constexpr int64_t kGrain = int64_t{1} << 18;
  at::parallel_for(0, static_cast<int64_t>(from.nbytes()), kGrain, [&](int64_t begin, int64_t end) {
    kernel(output + begin, input + begin, end - begin);
  });
}

/// Copies of one size by `workers` ranks, by either kernel.
struct Copies {
  int workers;
  Loop plain, streamed;
  const Loop& faster() const {
    return summarize(plain.seconds).median <= summarize(streamed.seconds).median ? plain : streamed;
  }
};

/// The tensors of one size, dtype and kind of memory.
struct Buffers {
  at::Tensor full, other, slice;
  static Buffers make(comm::Group& group, int64_t bytes, at::ScalarType dtype, bool arena) {
    const auto make = [&](int64_t size) {
      const auto numel = size / static_cast<int64_t>(c10::elementSize(dtype));
      auto tensor = arena ? group.empty(numel, dtype, Category::communication)
                          : host_zeros(numel, dtype, group.ledger(), Category::communication);
      std::memset(tensor.data_ptr(), 0, tensor.nbytes());  // the pages are there before the clock
      return tensor;
    };
    return {make(bytes), make(bytes), make(bytes / group.size())};
  }
};

void read_all(const at::Tensor& from) {
  const auto words = static_cast<int64_t>(from.nbytes() / sizeof(uint64_t));
  constexpr int64_t kGrain = int64_t{1} << 15;
  std::atomic<uint64_t> all{0};  // or nothing need be read
  at::parallel_for(0, words, kGrain, [&](int64_t begin, int64_t end) {
    all ^= read(static_cast<const uint64_t*>(from.const_data_ptr()), begin, end);
  });
}

/// Beside which the collectives are measured.
bool is_plain(const std::string& operation) { return operation == "copy" || operation == "read"; }

class Run {
 public:
  Run(comm::Group& group, const Options& options) : group_(group), options_(options) {}

  /// Rank 0 gets the results of every operation of one size, dtype and kind of memory.
  Json measure(int64_t size, const std::string& dtype_name, bool arena) {
    const auto dtype = dtype_name == "bf16" ? at::kBFloat16 : at::kFloat;
    auto buffers = Buffers::make(group_, size, dtype, arena);
    auto plain = Buffers::make(group_, size, dtype, false);
    auto operations = collectives(buffers);
    const int n = group_.size();
    Copies by_all = copies(n, plain), by_all_but_root = copies(n - 1, plain);
    Loop reads{[&plain] { read_all(plain.full); }};
    std::vector<Loop*> loops{&by_all.plain, &by_all.streamed, &by_all_but_root.plain,
                             &by_all_but_root.streamed, &reads};
    for (auto& operation : operations) loops.push_back(&operation.loop);
    for (auto* loop : loops) calibrate(*loop);

    for (auto& operation : operations) operation.counted -= count(operation);
    for (int i = 0; i < options_.repetitions; ++i) {
      for (auto* loop : loops) loop->seconds.push_back(time(*loop, loop->calls));
    }
    for (auto& operation : operations) operation.counted += count(operation);
    for (auto* loop : loops) take_slowest(*loop);

    Json results = Json::array();
    for (const auto* copies : {&by_all, &by_all_but_root}) {
      const auto& loop = copies->faster();
      results.push_back(result("copy", size, dtype_name, arena, copies->workers,
                               2 * size * copies->workers, loop, loop, 2 * size * copies->workers));
      results.back()["kernel"] = &loop == &copies->plain ? "memcpy" : "streaming stores";
    }
    results.push_back(
        result("read", size, dtype_name, arena, n, size * n, reads, by_all.faster(), 2 * size * n));
    for (const auto& operation : operations) {
      const auto& copies = operation.workers == n ? by_all : by_all_but_root;
      const std::string name(comm::name(operation.collective));
      auto json = result(name, size, dtype_name, arena, operation.workers,
                         touched_bytes(operation.collective, size, n), operation.loop,
                         copies.faster(), 2 * size * copies.workers);
      add_traffic(json, operation);
      results.push_back(std::move(json));
    }
    return results;
  }

 private:
  std::vector<Operation> collectives(Buffers& b) {
    const int n = group_.size();
    using comm::Collective;
    std::vector<Operation> all{
        {Collective::all_gather, {[&] { group_.all_gather(b.full, b.slice).wait(); }}, n},
        {Collective::reduce_scatter, {[&] { group_.reduce_scatter(b.slice, b.full).wait(); }}, n},
        {Collective::all_reduce, {[&] { group_.all_reduce(b.full).wait(); }}, n},
        {Collective::broadcast, {[&] { group_.broadcast(b.full, 0).wait(); }}, n - 1},
        {Collective::all_to_all, {[&] { group_.all_to_all(b.other, b.full).wait(); }}, n}};
    std::erase_if(all, [&](const Operation& operation) {
      return std::ranges::find(options_.collectives, comm::name(operation.collective)) ==
             options_.collectives.end();
    });
    return all;
  }

  /// Ranks `size - workers` and up copy.
  Copies copies(int workers, Buffers& b) {
    if (group_.rank() < group_.size() - workers) return {workers, {[] {}}, {[] {}}};
    return {workers,
            {[&b] {
              copy_with(b.other, b.full, [](void* to, const void* from, int64_t bytes) {
                std::memcpy(to, from, static_cast<size_t>(bytes));
              });
            }},
            {[&b] { copy_with(b.other, b.full, comm::copy_bytes); }}};
  }

  /// Times calls until every rank has ended. If ranks outnumber the cores, one may end its copy
  /// before the next begins, and then the longest of their own times is not the time of all.
  double time(const Loop& loop, int64_t calls) {
    group_.barrier("start of a timing");
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) loop.call();
    group_.barrier("end of a timing");
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    return spent.count() / static_cast<double>(calls);
  }

  void calibrate(Loop& loop) {
    constexpr double kShortest = 2e-3;
    time(loop, 1);
    const auto times = comm::gather_records(group_, time(loop, 1), "a first timing");
    const double slowest = *std::max_element(times.begin(), times.end());
    loop.calls = static_cast<int64_t>(std::clamp(std::ceil(kShortest / slowest), 1.0, 1000.0));
  }

  /// A collective takes as long as on the rank where it takes longest.
  void take_slowest(Loop& loop) {
    for (auto& seconds : loop.seconds) {
      const auto all = comm::gather_records(group_, seconds, "timings");
      seconds = *std::max_element(all.begin(), all.end());
    }
  }

  comm::TrafficCount count(const Operation& operation) const {
    return group_.traffic().count(operation.collective);
  }

  /// Bytes of a call: of all ranks, and those that leave the host from which most do.
  void add_traffic(Json& json, const Operation& operation) {
    const auto all = comm::gather_records(group_, operation.counted, "traffic");
    const auto& topology = group_.topology();
    comm::TrafficCount sum;
    std::vector<int64_t> left(static_cast<size_t>(topology.hosts), 0);
    for (int rank = 0; rank < group_.size(); ++rank) {
      const auto& of_rank = all[static_cast<size_t>(rank)];
      sum += of_rank;
      left[static_cast<size_t>(rank / topology.local_size)] += of_rank.link_bytes;
    }
    const int64_t calls = operation.counted.calls;
    json["sent_bytes"] = sum.logical_bytes / calls;
    json["copied_bytes"] = sum.copied_bytes / calls;
    const int64_t link = *std::ranges::max_element(left) / calls;
    json["link_bytes"] = link;
    json["link_gbit_per_s"] =
        8e-3 * static_cast<double>(link) / json["microseconds"]["median"].get<double>();
  }

  /// `copies` take `copied_bytes` bytes.
  static Json result(const std::string& name, int64_t size, const std::string& dtype, bool arena,
                     int workers, int64_t bytes, const Loop& loop, const Loop& copies,
                     int64_t copied_bytes) {
    std::vector<double> ratios;
    for (size_t i = 0; i < loop.seconds.size(); ++i) {
      const double needed =
          copies.seconds[i] * static_cast<double>(bytes) / static_cast<double>(copied_bytes);
      ratios.push_back(loop.seconds[i] / needed);
    }
    const auto seconds = summarize(loop.seconds);
    const auto microseconds =
        Summary{seconds.median * 1e6, seconds.least * 1e6, seconds.most * 1e6};
    return {{"operation", name},
            {"size_bytes", size},
            {"dtype", dtype},
            {"memory", arena && !is_plain(name) ? "arena" : "private"},
            {"processes", workers},
            {"calls_per_timing", loop.calls},
            {"touched_bytes", bytes},
            {"microseconds", microseconds.json()},
            {"gb_per_s", static_cast<double>(bytes) / seconds.median * 1e-9},
            {"times_copy", summarize(ratios).json()}};
  }

  comm::Group& group_;
  const Options& options_;
};

/// `hosts`: a column for what leaves one of them.
void print_rows(const Json& results, bool hosts) {
  for (const auto& r : results) {
    auto name = r["operation"].get<std::string>();
    const bool copy = name == "copy";
    if (is_plain(name)) name += fmt::format(" by {}", r["processes"].get<int>());
    fmt::print("{:>10} {:<15} {:>11} {:>11.1f} {:>11.1f} {:>8.2f}",
               format_bytes(r["size_bytes"].get<double>()), name,
               format_bytes(r["touched_bytes"].get<double>()),
               r["microseconds"]["median"].get<double>(), r["microseconds"]["min"].get<double>(),
               r["gb_per_s"].get<double>());
    const auto& ratio = r["times_copy"];
    if (!copy) {
      fmt::print(
          " {:>7.2f}  {:<14}", ratio["median"].get<double>(),
          fmt::format("{:.2f} to {:.2f}", ratio["min"].get<double>(), ratio["max"].get<double>()));
    }
    if (hosts && r.contains("link_bytes")) {
      fmt::print(" {:>11} {:>7.2f}", format_bytes(r["link_bytes"].get<double>()),
                 r["link_gbit_per_s"].get<double>());
    }
    fmt::print("\n");
  }
  std::fflush(stdout);
}

int run(comm::Group& group, const Options& options) {
  at::set_num_threads(options.threads);
  const int n = group.size();
  const bool reports = group.rank() == 0;
  const bool hosts = group.topology().hosts > 1;
  const auto start = machine();
  if (reports) {
    fmt::print(
        "machine   {}\nranks     {}, each {} thread{}; {} repetitions, medians\n"
        "bytes     that {} ranks must touch at size S: all_gather, all_reduce and "
        "all_to_all {} S, reduce_scatter {} S, broadcast {} S\n"
        "x copy    time / time of copying as many bytes by as many processes: median, and its "
        "spread\n",
        describe(start), places_of(group.topology()), options.threads,
        options.threads == 1 ? "" : "s", options.repetitions, n, 2 * n, n + 1, 2 * (n - 1));
    if (hosts) {
      fmt::print(
          "link      bytes that leave the host from which most do, and 1e9 bits of them a "
          "second\n");
    }
  }
  Json results = Json::array();
  Run run(group, options);
  for (const auto& dtype : options.dtypes) {
    for (const bool arena : {true, false}) {
      if (options.memory != "both" && (options.memory == "arena") != arena) continue;
      if (reports) {
        fmt::print("\n{}, {} memory\n{:>10} {:<15} {:>11} {:>11} {:>11} {:>8} {:>7}{}\n", dtype,
                   arena ? "arena" : "private", "S", "", "bytes", "us", "least us", "GB/s",
                   "x copy", hosts ? fmt::format("{:16} {:>11} {:>7}", "", "link", "Gbit/s") : "");
      }
      for (const auto size : options.sizes) {
        const auto rows = run.measure(rounded(size, n), dtype, arena);
        if (reports) print_rows(rows, hosts);
        results.insert(results.end(), rows.begin(), rows.end());
      }
    }
  }
  comm::agree_on_rank_zero(group, "Writing the results", [&] {
    options.json.write("collectives", start,
                       {{"ranks", n},
                        {"hosts", group.topology().hosts},
                        {"threads", options.threads},
                        {"repetitions", options.repetitions},
                        {"memory", options.memory}},
                       results);
  });
  return 0;
}

}  // namespace

int collectives(const Arguments& arguments) {
  Options options;
  if (const auto status = read_command_line(arguments, options)) return *status;
  const auto ranks = choose_ranks(options.nproc, 2);
  if (ranks.size() < 2) {
    throw ConfigError("--nproc is 1; a collective takes at least 2 ranks.");
  }
  for (const auto size : options.sizes) (void)rounded(size, ranks.size());
  return run_on_ranks(ranks, {"bench", "collectives"}, arguments,
                      [&](const auto& group) { return run(*group, options); });
}

}  // namespace zero::app::benchmarks
