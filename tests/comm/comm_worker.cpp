// One rank of a group of processes, for process_test: comm_worker SCENARIO RANK SIZE FOLDER
// [NUMBER]
//
// Rank 1 is the one that comes to grief. Each rank leaves FOLDER/result.RANK: "ok", or the message
// of its CommError, after the milliseconds of the monotonic clock; rank 1 leaves the time of its
// death in FOLDER/death.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <signal.h>
#include <sys/prctl.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/group.h"

namespace {

using zero::Category;
using zero::comm::Group;

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Job {
  std::string scenario;
  int rank = 0;
  int size = 0;
  std::string folder;
  int number = 0;
};

[[noreturn]] void die(const Job& job) {
  std::ofstream(job.folder + "/death") << now_ms() << std::flush;
  raise(SIGKILL);
  std::abort();
}

// A store whose user is killed at the `deadly`-th operation.
class DyingStore final : public c10d::FileStore {
 public:
  DyingStore(const Job& job, int deadly)
      : c10d::FileStore(job.folder + "/store", job.size), job_(job), deadly_(deadly) {}
  using c10d::FileStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    count();
    c10d::FileStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    count();
    return c10d::FileStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    count();
    return c10d::FileStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    count();
    return c10d::FileStore::check(keys);
  }

 private:
  void count() {
    if (deadly_ == 1) die(job_);
    if (deadly_ > 0) --deadly_;
  }
  Job job_;
  int deadly_;
};

void correct_collectives(Group& group) {
  const auto n = int64_t{100'003};
  for (const bool shared : {true, false}) {
    const auto make = [&](int64_t numel) {
      return shared ? group.empty(numel, at::kFloat, Category::gradients) : at::empty({numel});
    };
    auto slice = make(n).fill_(group.rank() + 1);
    auto whole = make(n * group.size());
    group.all_gather(whole, slice, "gather").wait();
    for (int r = 0; r < group.size(); ++r) {
      if (!at::equal(whole.narrow(0, r * n, n), at::full({n}, float(r + 1))))
        throw zero::CommError("wrong all_gather");
    }
    group.reduce_scatter(slice, whole, "scatter").wait();
    if (!at::equal(slice, at::full({n}, float(group.size() * (group.rank() + 1)))))
      throw zero::CommError("wrong reduce_scatter");
    slice.fill_(1);
    group.all_reduce(slice, "reduce").wait();
    if (!at::equal(slice, at::full({n}, float(group.size()))))
      throw zero::CommError("wrong all_reduce");
  }
  auto window = group.window(64 * group.size(), 1, Category::parameters);
  window->memory().narrow(0, 64 * group.rank(), 64).fill_(group.rank() + 5);
  window->publish(0, 1);
  for (int r = 0; r < group.size(); ++r) {
    window->wait(0, r, 1, "window");
    if (window->view()[64 * r + 63].item<int>() != r + 5) throw zero::CommError("wrong window");
  }
  group.barrier("end");
}

void killed_in_collective(const Job& job, Group& group) {
  auto big = group.empty(6'000'000, at::kFloat, Category::gradients).fill_(1);
  auto slice = group.empty(6'000'000 / job.size, at::kFloat, Category::gradients);
  std::thread killer;
  if (job.rank == 1) {
    killer = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(150 + job.number));
      die(job);
    });
  }
  for (;;) group.reduce_scatter(slice, big, "unit 3").wait();
}

// Rank 1 dies while its threads allocate and free as fast as they can.
void killed_in_allocator(const Job& job, Group& group) {
  auto tensor = group.empty(1000, at::kFloat, Category::gradients).fill_(0);
  std::vector<std::thread> threads;
  if (job.rank == 1) {
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        for (;;) group.empty(100'000, at::kFloat, Category::gradients);
      });
    }
    threads.emplace_back([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(150 + job.number));
      die(job);
    });
  }
  for (;;) {
    group.all_reduce(tensor, "unit 4").wait();
    // The survivors can still allocate and reduce afterwards.
    if (job.rank != 1) group.empty(100'000, at::kFloat, Category::gradients);
  }
}

void killed_as_window_owner(const Job& job, Group& group) {
  auto window = group.window(64 * group.size(), 1, Category::parameters);
  group.barrier("start");
  if (job.rank == 1) die(job);
  window->wait(0, 1, 1, "unit 5");
}

void run(const Job& job) {
  const bool dies_in_meeting = job.scenario == "meeting" && job.rank == 1;
  const auto store = c10::make_intrusive<DyingStore>(job, dies_in_meeting ? job.number : 0);
  const std::chrono::milliseconds timeout(job.scenario == "meeting" ? 10'000 : 30'000);
  auto group = zero::comm::shared_memory_group(store, job.rank, job.size, {.timeout = timeout});
  if (job.scenario == "correct") return correct_collectives(*group);
  if (job.scenario == "collective") return killed_in_collective(job, *group);
  if (job.scenario == "allocator") return killed_in_allocator(job, *group);
  if (job.scenario == "window") return killed_as_window_owner(job, *group);
  if (job.scenario == "exception") {
    auto tensor = at::full({10}, 1.0f);
    auto never = group->all_reduce(tensor, "asynchronous, and unmatched");
    if (job.rank == 1) throw std::runtime_error("rank 1 has no data");
    never.wait();
    group->barrier("step 2");
    return;
  }
  if (job.scenario == "exit") {
    group->barrier("step 1");
    if (job.rank == 1) std::_Exit(0);  // without a word
    group->barrier("step 2");
    return;
  }
  if (job.scenario == "meeting") {
    for (;;) group->barrier("after the meeting");
  }
  throw std::invalid_argument("unknown scenario " + job.scenario);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Job job{argv[1], std::atoi(argv[2]), std::atoi(argv[3]), argv[4],
          argc > 5 ? std::atoi(argv[5]) : 0};
  std::string result = "ok";
  try {
    run(job);
  } catch (const zero::CommError& error) {
    result = error.what();
  } catch (const std::exception& error) {
    result = std::string("another exception: ") + error.what();
  }
  std::ofstream(job.folder + "/result." + std::to_string(job.rank)) << now_ms() << " " << result;
  return result == "ok" ? 0 : 3;
}
