#include "zero/planner/as_ranks.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <exception>
#include <numeric>
#include <thread>
#include <vector>

#include "zero/base/host_allocator.h"

namespace zero::plan {
namespace {

double seconds_of(const Work& work) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

double seconds_as_ranks(int64_t ranks, const std::function<Work()>& prepare) {
  constexpr double kSeconds = 0.02;
  constexpr int kLeast = 3, kMost = 100;
  (void)HostAllocator::instance();  // a run has it too
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  const int before = at::get_num_threads();
  const int threads = std::min(before, static_cast<int>(std::max<int64_t>(1, cores / ranks)));
  std::vector<double> seconds(static_cast<size_t>(ranks));
  std::vector<std::exception_ptr> failures(seconds.size());
  std::barrier together(static_cast<std::ptrdiff_t>(ranks));
  const auto one = [&](size_t rank) {
    at::set_num_threads(threads);
    const c10::NoGradGuard no_grad;
    Work work;
    double second = 0;
    try {
      work = prepare();
      work();  // the first time makes what libraries keep
      second = seconds_of(work);
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
  for (size_t rank = 1; rank < seconds.size(); ++rank) others.emplace_back(one, rank);
  one(0);  // on this thread, whose team of threads is there
  for (auto& other : others) other.join();
  at::set_num_threads(before);
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(ranks);
}

}  // namespace zero::plan
