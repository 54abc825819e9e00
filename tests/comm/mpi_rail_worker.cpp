// A process that mpirun starts: the end of a rail over MPI on a host of its own, so to speak.
// Exit status 0: all was as it should be.
//   comm_mpi_rail_worker PLUGIN (exchange|pairs|abort|mismatch)
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/job.h"
#include "zero/comm/open_rail.h"

namespace {

using namespace zero;  // NOLINT: a program of one file
using comm::Channel;

using Bytes = std::vector<std::byte>;

Bytes message(size_t size, int seed) {
  Bytes bytes(size);
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761U + 1;
  for (auto& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

void require(bool holds, const std::string& what) {
  if (!holds) throw Error("not so: " + what);
}

// Every pair of hosts exchanges messages both ways, on every channel from a thread of its own.
void exchange(comm::Rail& rail) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(comm::kChannels);
  for (size_t i = 0; i < comm::kChannels; ++i) {
    const auto channel = static_cast<Channel>(i);
    threads.emplace_back([&rail, &errors, channel] {
      try {
        for (const size_t size : {size_t{0}, size_t{1}, size_t{70000}, (size_t{5} << 20) + 3}) {
          const auto hosts = static_cast<size_t>(rail.hosts());
          std::vector<Bytes> sent(hosts), received(hosts);
          std::vector<std::unique_ptr<comm::Passage>> passages;
          const auto seed = [&](int from, int to) {
            return static_cast<int>(size % 1000) + 16 * from + 4 * to + static_cast<int>(channel);
          };
          for (int peer = 0; peer < rail.hosts(); ++peer) {
            if (peer == rail.host()) continue;
            const auto at = static_cast<size_t>(peer);
            sent[at] = message(size, seed(rail.host(), peer));
            received[at].resize(size);
            passages.push_back(rail.receive(peer, channel, received[at]));
            passages.push_back(rail.send(peer, channel, sent[at]));
          }
          for (const auto& passage : passages) passage->wait();
          for (int peer = 0; peer < rail.hosts(); ++peer) {
            if (peer == rail.host()) continue;
            require(received[static_cast<size_t>(peer)] == message(size, seed(peer, rail.host())),
                    "the bytes are those that were sent");
          }
        }
      } catch (...) {
        errors[static_cast<size_t>(channel)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  const int64_t each = 1 + 70000 + (int64_t{5} << 20) + 3;
  require(rail.sent_bytes() == static_cast<int64_t>(comm::kChannels) * (rail.hosts() - 1) * each,
          "the bytes sent are counted");
}

// Aborts while a receive is under way: the wait ends, and the memory stays as it is.
void abort(comm::Rail& rail) {
  const int peer = 1 - rail.host();
  Bytes received(1 << 20);
  const auto passage = rail.receive(peer, Channel::gather, received);
  std::thread aborts([&rail] { rail.abort(); });
  std::string error;
  try {
    passage->wait();
  } catch (const CommError& thrown) {
    error = thrown.what();
  }
  aborts.join();
  require(error.find("aborted") != std::string::npos, "the wait was aborted: " + error);
  try {
    (void)rail.send(peer, Channel::control, received);
  } catch (const CommError&) {
    return;
  }
  require(false, "later calls are refused");
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 3) return 2;
  setenv("ZERO_TRANSPORT", argv[1], 1);
  const std::string mode = argv[2];
  const auto job = comm::job_from_environment();
  // All ranks are hosts, except in `pairs`: there ranks 0 and 2 are one rail, and 1 and 3 another.
  std::vector<int> ranks;
  if (mode == "pairs") {
    ranks = {job.rank % 2, job.rank % 2 + 2};
  } else {
    for (int rank = 0; rank < job.size; ++rank) ranks.push_back(rank);
    if (mode == "mismatch") ranks.push_back(job.size);
  }
  const int host = mode == "pairs" ? job.rank / 2 : job.rank;
  const auto open = [&](int own, const std::vector<int>& joined) {
    return comm::open_rail({},
                           {.host = own, .hosts = static_cast<int>(joined.size()), .ranks = joined},
                           {.piece_bytes = 1 << 18});
  };
  const auto rail = open(host, ranks);
  if (mode == "exchange" || mode == "pairs") exchange(*rail);
  if (mode == "pairs") exchange(*open(job.rank, {0, 1, 2, 3}));  // beside the other
  if (mode == "abort") abort(*rail);
  std::printf("host %d of %d: %s\n", rail->host(), rail->hosts(), rail->describe().c_str());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
