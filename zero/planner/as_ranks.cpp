#include "zero/planner/as_ranks.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <exception>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"

namespace zero::plan {
namespace {

double seconds_of(const Work& work) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Does what seconds_as_ranks does on one host. Calls `begin` when all is prepared.
double seconds_here(int64_t ranks, const std::function<Work()>& prepare,
                    const std::function<void()>& begin) {
  constexpr double kSeconds = 0.02;
  constexpr int kLeast = 3, kMost = 100;
  (void)HostAllocator::instance();  // a run has it too
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  const int before = at::get_num_threads();
  const int threads = std::min(before, static_cast<int>(std::max<int64_t>(1, cores / ranks)));
  std::vector<double> seconds(static_cast<size_t>(ranks));
  std::vector<std::exception_ptr> failures(seconds.size());
  std::barrier together(static_cast<std::ptrdiff_t>(ranks));
  bool complete = true;  // all threads could be started
  const auto one = [&](size_t rank) {
    together.arrive_and_wait();
    if (!complete) return;
    at::set_num_threads(threads);
    const c10::NoGradGuard no_grad;
    Work work;
    double second = 0;
    try {
      work = prepare();
      work();  // the first time makes what libraries keep
      second = seconds_of(work);
      if (rank == 0) begin();
    } catch (...) {
      failures[rank] = std::current_exception();
    }
    together.arrive_and_wait();
    if (std::ranges::any_of(failures, [](const auto& failure) { return failure != nullptr; }))
      return;
    const int count =
        std::clamp(static_cast<int>(kSeconds / std::max(second, 1e-9)), kLeast, kMost);
    std::vector<double> times;
    for (int i = 0; i < count; ++i) times.push_back(seconds_of(work));
    std::ranges::nth_element(times, times.begin() + count / 2);
    seconds[rank] = times[static_cast<size_t>(count / 2)];
  };
  std::vector<std::thread> others;
  others.reserve(seconds.size() - 1);
  std::string reason;
  try {
    for (size_t rank = 1; rank < seconds.size(); ++rank) others.emplace_back(one, rank);
  } catch (const std::exception& error) {
    reason = error.what();
    complete = false;
    // The threads that were started wait for the others.
    (void)together.arrive(static_cast<std::ptrdiff_t>(seconds.size() - others.size()));
  }
  if (complete) one(0);  // on this thread, whose team of threads is there
  for (auto& other : others) other.join();
  if (!complete) {
    throw ConfigError(fmt::format(
        "{} ranks cannot be measured on this machine: only {} of their threads could be "
        "started ({}). Give fewer ranks.",
        ranks, others.size() + 1, reason));
  }
  at::set_num_threads(before);
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(ranks);
}

}  // namespace

double seconds_as_ranks(int64_t ranks, const std::function<Work()>& prepare, const OfHosts& hosts) {
  if (!hosts) return seconds_here(ranks, prepare, [] {});
  constexpr double kFailed = -1;
  double seconds = kFailed;
  std::exception_ptr failure;
  bool begun = false;
  const auto begin = [&] {
    begun = true;
    (void)hosts(0);
  };
  try {
    seconds = seconds_here(ranks, prepare, begin);
  } catch (...) {
    failure = std::current_exception();
  }
  if (!begun) begin();
  const auto all = hosts(seconds);
  if (failure) std::rethrow_exception(failure);
  if (std::ranges::find(all, kFailed) != all.end())
    throw Error("Another host could not measure what this one has measured.");
  return std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
}

}  // namespace zero::plan
