// `zero bench links`: what the links between hosts carry.
//
// Note [Pairs in turn]
// Only two hosts speak at a time, so that what is measured is the link between them and not what a
// third leaves of it. The others wait for the store's word. With several ranks a host a pair is
// measured twice: over one rail, and over all of them at once, which share the link as they do in
// training.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/zero/bench.h"
#include "apps/zero/ranks.h"
#include "zero/base/error.h"
#include "zero/comm/job.h"
#include "zero/comm/open_rail.h"
#include "zero/comm/rail_address.h"
#include "zero/comm/rendezvous.h"

namespace zero::app::benchmarks {
namespace {

using comm::Channel;
using comm::Passage;
using comm::Rail;

constexpr const char* kDescription =
    "Times messages between the hosts of a job, pair by pair. Start it as the training is "
    "started:\n\n"
    "  torchrun --no-python --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:PORT --rdzv-backend "
    "c10d zero bench links\n"
    "  mpirun -n 2 --map-by ppr:1:node zero bench links\n"
    "  srun --ntasks-per-node 1 zero bench links\n\n"
    "Without a launcher it starts --nproc ranks here and divides them into --hosts hosts, which\n"
    "shows what the processors can do: the bytes go over the loopback interface.\n\n"
    "rails     over how many ranks of each host at once\n"
    "us        half the time of a message and its answer\n"
    "one way   1e9 bytes a second from one host to the other, several messages under way\n"
    "both ways the same from each to the other at once: the sum of both directions\n"
    "ZERO_TRANSPORT (gloo, openmpi, mpich, mpi) and ZERO_INTERFACE choose what carries them.";

struct Options {
  std::optional<int> nproc, hosts;
  std::vector<int64_t> sizes{8, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20};
  int repetitions = 5;
  int64_t volume = 64 << 20;
  JsonFile json;
};

std::optional<int> read_command_line(const Arguments& arguments, Options& options) {
  OptionParser parser("bench links", kDescription);
  parser.add_option("-n,--nproc", options.nproc, "Ranks to start on this host [2]")->type_name("N");
  parser
      .add_option("--hosts", options.hosts,
                  "Divide the ranks of this host into so many hosts [2 without a launcher]")
      ->check(positive())
      ->type_name("H");
  parser.add_option("--sizes", options.sizes, "Sizes of messages, as 65536 or 64KiB")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->check(positive())
      ->option_text("S,... [8,4KiB,64KiB,1MiB,8MiB,64MiB]");
  parser.add_option("--repetitions", options.repetitions, "Timings of each")->check(positive());
  parser
      .add_option("--volume", options.volume,
                  "Bytes of a timing of the bandwidth, or one message if that is larger")
      ->transform(CLI::AsSizeValue(false))
      ->check(positive())
      ->option_text("S [64MiB]");
  options.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  options.json.check();
  return std::nullopt;
}

/// Meetings and figures of all ranks, over the store: nothing of it is timed.
class Board {
 public:
  Board(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  /// Every rank's `value` in the order of the ranks. Collective.
  std::vector<std::string> exchange(const std::string& value) {
    const auto key = [turn = turn_++](int rank) { return fmt::format("turn/{}/{}", turn, rank); };
    std::vector<uint8_t> bytes(value.begin(), value.end());
    bytes.push_back(0);  // an empty value is none
    store_->set(key(rank_), bytes);
    std::vector<std::string> all;
    for (int rank = 0; rank < size_; ++rank) {
      const auto theirs = store_->get(key(rank));
      all.emplace_back(theirs.begin(), theirs.end() - 1);
    }
    return all;
  }

  /// The largest of all ranks' values. Collective.
  double largest(double value) {
    std::string bytes(sizeof value, '\0');
    std::memcpy(bytes.data(), &value, sizeof value);
    for (const auto& theirs : exchange(bytes)) {
      double other = 0;
      std::memcpy(&other, theirs.data(), std::min(sizeof other, theirs.size()));
      value = std::max(value, other);
    }
    return value;
  }

  /// The last call. Rank 0, which may host the store, returns when no other needs it any more.
  void leave() {
    const auto key = [](int rank) { return fmt::format("left/{}", rank); };
    store_->set(key(rank_), std::vector<uint8_t>{1});
    if (rank_ != 0) return;
    for (int rank = 1; rank < size_; ++rank) store_->wait({key(rank)});
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  int turn_ = 0;
};

/// Messages to or from one host.
class Talk {
 public:
  Talk(Rail& rail, int peer, int64_t size, int64_t volume)
      : rail_(rail),
        peer_(peer),
        size_(static_cast<size_t>(size)),
        messages_(static_cast<int>(messages(size, volume))),
        under_way_(std::min(messages_, static_cast<int>(std::clamp<int64_t>(kBytesUnderWay / size,
                                                                            2, kMostUnderWay)))),
        sent_(size_, std::byte{1}),
        received_(size_ * static_cast<size_t>(under_way_)) {}

  /// The constants of a timing of the bandwidth.
  static int64_t messages(int64_t size, int64_t volume) {
    return std::clamp<int64_t>(volume / size, 1, kMostMessages);
  }

  /// Seconds from one end to the other: of a message and its answer, halved. `begins`: this end
  /// sends first.
  double ping(bool begins) {
    const int times = std::clamp(messages_, 2, kMostPings);
    return timed([&] {
             for (int i = 0; i < times; ++i) {
               const auto arrives = receive(0);
               if (!begins) arrives->wait();
               send()->wait();
               if (begins) arrives->wait();
             }
           }) /
           (2 * times);
  }

  /// Seconds in which this end's messages are sent, where it sends, and the other's received.
  double stream(bool sends, bool receives) {
    return timed([&] {
      std::deque<std::unique_ptr<Passage>> outgoing, incoming;
      for (int i = 0; i < messages_; ++i) {
        if (receives) {
          if (i >= under_way_) take(incoming);
          incoming.push_back(receive(i % under_way_));
        }
        if (sends) {
          if (i >= under_way_) take(outgoing);
          outgoing.push_back(send());
        }
      }
      while (!outgoing.empty()) take(outgoing);
      while (!incoming.empty()) take(incoming);
      // Bytes that have left this end may not have arrived, so the other end says when they have.
      std::byte word{};
      const auto answer = rail_.receive(peer_, Channel::control, {&word, 1});
      rail_.send(peer_, Channel::control, {sent_.data(), 1})->wait();
      answer->wait();
    });
  }

 private:
  static constexpr int64_t kBytesUnderWay = 32 << 20;
  static constexpr int kMostUnderWay = 16, kMostMessages = 2000, kMostPings = 200;

  static double timed(const std::function<void()>& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  static void take(std::deque<std::unique_ptr<Passage>>& passages) {
    passages.front()->wait();
    passages.pop_front();
  }
  std::unique_ptr<Passage> send() { return rail_.send(peer_, Channel::gather, sent_); }
  std::unique_ptr<Passage> receive(int place) {
    return rail_.receive(peer_, Channel::gather,
                         std::span(received_).subspan(static_cast<size_t>(place) * size_, size_));
  }

  Rail& rail_;
  int peer_;
  size_t size_;
  int messages_, under_way_;
  std::vector<std::byte> sent_, received_;
};

/// A rank and the hosts of its job.
struct Place {
  comm::Topology topology;
  std::vector<std::string> hosts;  ///< their names
  int rank = 0, size = 1;
};

class Run {
 public:
  Run(Rail& rail, Board& board, const Place& place, const Options& options)
      : rail_(rail), board_(board), place_(place), options_(options) {}

  /// Measures between hosts `first` and `second`, over the first `rails` rails. Collective.
  Json measure(int first, int second, int rails, int64_t size) {
    const auto& at = place_.topology;
    const bool takes_part = at.local_rank < rails && (at.host == first || at.host == second);
    const bool begins = at.host == first;
    std::optional<Talk> talk;
    if (takes_part) talk.emplace(rail_, begins ? second : first, size, options_.volume);
    const auto seconds = [&](const std::function<double(Talk&)>& body) {
      (void)board_.exchange({});
      return board_.largest(talk ? body(*talk) : 0);
    };
    std::vector<double> latency, one_way, both_ways;
    for (int i = 0; i <= options_.repetitions; ++i) {
      const double ping = seconds([&](Talk& talk) { return talk.ping(begins); });
      const double there = seconds([&](Talk& talk) { return talk.stream(begins, !begins); });
      const double both = seconds([&](Talk& talk) { return talk.stream(true, true); });
      if (i == 0) continue;  // connections warm up
      const auto sent = Talk::messages(size, options_.volume) * size * rails;
      const double bytes = static_cast<double>(sent) * 1e-9;
      latency.push_back(ping * 1e6);
      one_way.push_back(bytes / there);
      both_ways.push_back(2 * bytes / both);
    }
    return {{"hosts", {first, second}},
            {"rails", rails},
            {"size_bytes", size},
            {"microseconds", summarize(latency).json()},
            {"one_way_gb_per_s", summarize(one_way).json()},
            {"both_ways_gb_per_s", summarize(both_ways).json()}};
  }

 private:
  Rail& rail_;
  Board& board_;
  const Place& place_;
  const Options& options_;
};

void print_row(const Json& row) {
  const auto figures = [&](const char* key) {
    const auto& summary = row[key];
    return fmt::format("{:>10.4g} ({:.4g} to {:.4g})", summary["median"].get<double>(),
                       summary["min"].get<double>(), summary["max"].get<double>());
  };
  fmt::print("{:>10} {:<32} {:<32} {}\n", format_bytes(row["size_bytes"].get<double>()),
             figures("microseconds"), figures("one_way_gb_per_s"), figures("both_ways_gb_per_s"));
  std::fflush(stdout);
}

/// Throws ConfigError where `size` ranks of one host cannot be divided into `hosts`.
void check_division(int size, int hosts) {
  if (size % hosts != 0) {
    throw ConfigError(
        fmt::format("--hosts is {}, which does not divide the {} ranks.", hosts, size));
  }
  if (hosts < 2) {
    throw ConfigError(
        fmt::format("All {} ranks are on one host, and there is no link to measure. Start ranks on "
                    "several, or divide these with --hosts 2.",
                    size));
  }
}

/// Returns which ranks are on which host: as they are, or as --hosts divides those of one host.
Place place_of(const comm::Joined& joined, const comm::Job& job, std::optional<int> hosts) {
  Place place{joined.topology(job.rank), {}, job.rank, job.size};
  auto& topology = place.topology;
  if (topology.hosts > 1 && hosts && *hosts != topology.hosts) {
    throw ConfigError(fmt::format("--hosts is {}, but the ranks are on {} hosts. Leave it out.",
                                  *hosts, topology.hosts));
  }
  if (topology.hosts == 1) {
    topology.hosts = hosts.value_or(1);
    check_division(job.size, topology.hosts);
    topology.local_size = job.size / topology.hosts;
    topology.host = job.rank / topology.local_size;
    topology.local_rank = job.rank % topology.local_size;
  }
  return place;
}

int run(const Options& options) {
  constexpr std::chrono::minutes kTimeout{5};
  const auto job = comm::job_from_environment();
  const auto start = machine();
  auto joined = comm::join_store(
      job, kTimeout, job.addresses.empty() ? comm::rendezvous_folder() : std::filesystem::path());
  auto place = place_of(joined, job, options.hosts);
  const auto& at = place.topology;
  Board board(c10::make_intrusive<c10d::PrefixStore>("links/board", joined.store), job.rank,
              job.size);
  const auto address = comm::rail_address(joined.store_address);
  const auto names = board.exchange(
      fmt::format("{} ({})", joined.ranks.at(static_cast<size_t>(job.rank)).host, address));
  comm::RailEnd end{.host = at.host, .hosts = at.hosts, .address = address};
  for (int host = 0; host < at.hosts; ++host) {
    const int first = host * at.local_size;
    place.hosts.push_back(names.at(static_cast<size_t>(first)));
    end.ranks.push_back(first + at.local_rank);
  }
  const auto rail = comm::open_rail(c10::make_intrusive<c10d::PrefixStore>(
                                        fmt::format("links/rail/{}", at.local_rank), joined.store),
                                    end, {.timeout = kTimeout});
  const bool reports = job.rank == 0;
  if (reports) {
    fmt::print("machine   {}\nhosts     {} x {} rank{}: {}\nby        {}\n", describe(start),
               at.hosts, at.local_size, at.local_size == 1 ? "" : "s", fmt::join(place.hosts, ", "),
               rail->describe());
  }
  std::vector<int> counts{1};
  if (at.local_size > 1) counts.push_back(at.local_size);
  Run run(*rail, board, place, options);
  Json results = Json::array();
  for (int first = 0; first < at.hosts; ++first) {
    for (int second = first + 1; second < at.hosts; ++second) {
      for (const int rails : counts) {
        if (reports) {
          fmt::print("\nhosts {} and {}, {} rail{}\n{:>10} {:<32} {:<32} {}\n", first, second,
                     rails, rails == 1 ? "" : "s at once", "message", "        us (least to most)",
                     "one way, GB/s", "both ways, GB/s");
        }
        for (const auto size : options.sizes) {
          results.push_back(run.measure(first, second, rails, size));
          if (reports) print_row(results.back());
        }
      }
    }
  }
  if (reports) {
    options.json.write("links", start,
                       {{"hosts", place.hosts},
                        {"ranks_a_host", at.local_size},
                        {"transport", rail->describe()},
                        {"repetitions", options.repetitions},
                        {"volume_bytes", options.volume}},
                       results);
  }
  board.leave();
  return 0;
}

}  // namespace

int links(const Arguments& arguments) {
  Options options;
  if (const auto status = read_command_line(arguments, options)) return *status;
  const auto ranks = choose_ranks(options.nproc, 2);
  if (ranks.launched()) return run(options);
  if (ranks.size() < 2) throw ConfigError("--nproc is 1; a link has two ends.");
  const int hosts = options.hosts.value_or(2);
  check_division(ranks.size(), hosts);
  auto divided = arguments;
  if (!options.hosts) divided.insert(divided.end(), {"--hosts", std::to_string(hosts)});
  return start_ranks(ranks, {"bench", "links"}, divided);
}

}  // namespace zero::app::benchmarks
