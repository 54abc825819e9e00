// One rank that is watched and does nothing else, for watch_test and tests/hosts/failure_watch.sh:
//   comm_watch_worker RANK SIZE RANKS_A_HOST FOLDER ADDRESS ARRIVAL_MS
//
// Ranks are on hosts "a", "b", ... in blocks. It does what FOLDER/do.RANK says, as soon as it says
// so:
//   exit           ends without a word
//   throw          leaves by an exception
//   report TEXT    reports TEXT of itself
//   suspect RANK   reports that the connection to RANK broke
//   leave          leaves in order, and sleeps
//   fork           makes a child that ends at once
//   end            says whether there was a verdict, leaves and ends
//   die            is killed before it meets the others
// FOLDER/here.RANK: it has started, and waits for FOLDER/go to meet the others.
// FOLDER/up.RANK: it is watched. FOLDER/result.RANK: the milliseconds of the monotonic clock at
// which it heard the verdict, how often it was told, the origin and the message; or "0 0 -1 ok".
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "zero/base/error.h"
#include "zero/comm/host_watch.h"

namespace {

using std::chrono::milliseconds;
using zero::comm::HostWatch;
using zero::comm::Verdict;

int64_t now_ms() {
  return std::chrono::duration_cast<milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Worker {
  int rank = 0;
  std::string folder;
  std::atomic<int64_t> told_at{0};
  std::atomic<int> told{0};

  std::string file(const std::string& what) const {
    return folder + "/" + what + "." + std::to_string(rank);
  }
  // Its reader finds the file whole or absent.
  void write(const std::string& what, const std::string& text) const {
    std::ofstream(file(what) + ".new") << text << std::flush;
    std::rename((file(what) + ".new").c_str(), file(what).c_str());
  }
  void write_result(const Verdict& verdict) const {
    std::ostringstream text;
    text << told_at << ' ' << told << ' ' << verdict.origin << ' ' << verdict.message;
    write("result", text.str());
  }
  std::string order() const {
    std::ifstream file(this->file("do"));
    std::string line;
    std::getline(file, line);
    return line;
  }

  void obey(HostWatch& watch) const {
    const auto order = this->order();
    if (order == "exit") std::_Exit(0);
    if (order == "throw") throw std::runtime_error("no data");
    if (order == "leave") watch.leave();
    if (order.starts_with("report ")) watch.report(rank, order.substr(7));
    if (order.starts_with("suspect ")) {
      const int other = std::stoi(order.substr(8));
      watch.report(other, "The connection of rank " + std::to_string(rank) + " to rank " +
                              std::to_string(other) + " broke.");
    }
    if (order == "fork") {
      unlink(file("do").c_str());
      if (fork() == 0) throw std::runtime_error("the child ends");
    }
  }

  void run(HostWatch::Settings settings) {
    write("here", "");
    for (const auto end = now_ms() + 120'000; !std::filesystem::exists(folder + "/go");) {
      if (now_ms() > end) throw std::runtime_error("nobody says go");
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (order() == "die") raise(SIGKILL);
    c10d::FileStore store(folder + "/store", settings.size);
    HostWatch watch(settings, store, [this](const Verdict&) {
      told_at = now_ms();
      ++told;
    });
    write("up", std::to_string(getpid()));
    for (;;) {
      std::this_thread::sleep_for(milliseconds(5));
      obey(watch);
      const auto verdict = watch.verdict();
      if (!verdict && order() != "end") continue;
      while (verdict && told == 0) std::this_thread::sleep_for(milliseconds(1));
      write_result(verdict.value_or(Verdict{-1, "ok"}));
      return;
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int ranks_a_host = std::atoi(argv[3]);
  HostWatch::Settings settings{.rank = std::atoi(argv[1]), .size = std::atoi(argv[2])};
  settings.topology = {.hosts = settings.size / ranks_a_host,
                       .host = settings.rank / ranks_a_host,
                       .local_size = ranks_a_host,
                       .local_rank = settings.rank % ranks_a_host};
  settings.address = argv[5];
  settings.host = static_cast<char>('a' + settings.topology.host);
  settings.arrival = milliseconds(std::atoi(argv[6]));
  Worker worker{settings.rank, argv[4]};
  try {
    worker.run(settings);
  } catch (const zero::CommError& error) {
    worker.write_result({-2, error.what()});
    return 4;
  } catch (const std::exception&) {
    return 3;
  }
  return 0;
}
