#include "tests/device/testing.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>

namespace zero::simulated {

namespace {

using WaitsByHost = std::array<int64_t, kDevices>;

bool is_right(const std::function<bool()>& right, const Options& options) {
  configure(options);
  try {
    return right();
  } catch (const std::exception&) {
    return false;
  }
}

void check_as_it_stands(const std::function<bool()>& right, const Options& options) {
  TORCH_CHECK(is_right(right, options) && take_reports().empty(),
              "simulated device: with all its waits the schedule is wrong already");
}

LeftOut leave_out_each(const std::function<bool()>& right, int seeds, int64_t Options::*left_out,
                       WaitsByHost Counts::*waits) {
  LeftOut result;
  check_as_it_stands(right, {.executor = Executor::seeded});
  const WaitsByHost number = counts().*waits;
  for (int host = 0; host < kDevices; ++host) {
    for (int64_t wait = 0; wait < number[static_cast<size_t>(host)]; ++wait) {
      bool wrong = false, reported = false, missed = false;
      for (int seed = 0; seed < seeds; ++seed) {
        Options options{.executor = Executor::seeded, .seed = static_cast<uint64_t>(seed)};
        options.*left_out = wait;
        options.left_out_host = host;
        options.places = true;
        const bool ok = is_right(right, options);
        const bool seen = !take_reports().empty();
        wrong = wrong || !ok;
        reported = reported || seen;
        missed = missed || (!ok && !seen);
      }
      ++result.waits;
      ++(missed     ? result.wrong_silent
         : wrong    ? result.wrong_reported
         : reported ? result.right_reported
                    : result.right_silent);
      const auto name = [&] {
        return "host " + std::to_string(host) + ", wait " + std::to_string(wait) + ": " +
               describe_wait(host, wait) + ", in " + place_of_wait(host, wait);
      };
      if (missed) result.missed.push_back(name());
      if (!wrong && !reported) result.implied.push_back(name());
    }
  }
  configure({});
  return result;
}

}  // namespace

std::vector<Options> schedules(int seeds) {
#ifdef ZERO_FEW_SCHEDULES
  if (seeds > 0) return {{.executor = Executor::threads, .delay = std::chrono::microseconds(200)}};
#endif
  if (const char* const wanted = std::getenv("ZERO_SEEDS"))
    seeds = std::max(seeds, std::atoi(wanted));
  std::vector<Options> all;
  for (int i = 0; i < seeds; ++i) {
    const auto seed = static_cast<uint64_t>(i);
    all.push_back({.executor = Executor::threads, .seed = seed});
    all.push_back(
        {.executor = Executor::threads, .seed = seed, .delay = std::chrono::microseconds(200)});
    all.push_back({.executor = Executor::seeded, .seed = seed});
  }
  return all;
}

std::string describe(const Options& options) {
  std::string text = options.executor == Executor::seeded ? "seeded" : "threads";
  if (options.delay.count() > 0) {
    text += ", delays up to " + std::to_string(options.delay.count()) + " us";
  }
  return text + ", seed " + std::to_string(options.seed);
}

std::string reports() {
  std::string lines;
  for (const auto& text : take_reports()) lines += text + "\n";
  return lines;
}

LeftOut leave_out_each_wait(const std::function<bool()>& right, int seeds) {
  return leave_out_each(right, seeds, &Options::left_out_wait, &Counts::waits_by_host);
}

void WaitPlaces::look_at(const std::string& schedule, const std::function<bool()>& right) {
  check_as_it_stands(right, {.executor = Executor::seeded, .places = true});
  std::vector<std::pair<int, std::string>> asked;  // by host and number: who has waited, and where
  const WaitsByHost number = counts().waits_by_host;
  for (int host = 0; host < kDevices; ++host) {
    for (int64_t wait = 0; wait < number[static_cast<size_t>(host)]; ++wait)
      asked.emplace_back(host, place_of_wait(host, wait));
  }
  int64_t wait = 0;
  for (size_t i = 0; i < asked.size(); ++i, ++wait) {
    const auto& [host, name] = asked[i];
    if (i > 0 && host != asked[i - 1].first) wait = 0;
    Place& place = places_[name];
    ++place.waits;
    if (!place.needed_in.empty()) continue;
    const bool ok = is_right(
        right, {.executor = Executor::seeded, .left_out_wait = wait, .left_out_host = host});
    if (!take_reports().empty() || !ok) place.needed_in = schedule;
    ++place.left_out;
  }
  configure({});
}

LeftOut leave_out_each_host_wait(const std::function<bool()>& right, int seeds) {
  return leave_out_each(right, seeds, &Options::left_out_host_wait, &Counts::own_waits_by_host);
}

void run_ranks(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::exception_ptr> failures(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  hosts_met();  // a thread begins after what its maker has waited for
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      const c10::impl::VirtualGuardImpl guard(c10::kPrivateUse1);
      guard.setDevice(device(rank));  // for good: the thread is the host of no other
      try {
        body(rank);
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  hosts_met();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace zero::simulated
