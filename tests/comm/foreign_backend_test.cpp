// Tests Group over a backend that is not ours: a plain one for threads, with c10d's interface.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"

namespace zero::comm {
namespace {

// The ranks of a plain group lay down the tensors of the call under way here.
struct Table {
  explicit Table(int size) : inputs(static_cast<size_t>(size)), barrier(size) {}
  std::vector<at::Tensor> inputs;
  std::barrier<> barrier;
};

class PlainBackend final : public c10d::Backend {
 public:
  PlainBackend(int rank, int size, Table& table) : c10d::Backend(rank, size), table_(table) {}
  const std::string getBackendName() const override { return "plain"; }
  int calls = 0;

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    return exchange(input, [&] { output.copy_(at::cat(table_.inputs)); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions&) override {
    TORCH_CHECK(output.scalar_type() == input.scalar_type(),
                "plain backends reduce one dtype only");
    return exchange(input, [&] {
      auto sum = at::zeros_like(output);
      for (const auto& theirs : table_.inputs)
        sum += theirs.narrow(0, rank_ * output.numel(), output.numel());
      output.copy_(sum);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    auto input = tensors[0].clone();
    return exchange(input, [&] {
      tensors[0].zero_();
      for (const auto& theirs : table_.inputs) tensors[0] += theirs;
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return exchange(tensors[0], [&] {
      if (options.rootRank != rank_)
        tensors[0].copy_(table_.inputs[static_cast<size_t>(options.rootRank)]);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>&, std::vector<int64_t>&,
                                               const c10d::AllToAllOptions&) override {
    return exchange(input, [&] {
      const auto n = input.numel() / size_;
      for (int r = 0; r < size_; ++r) {
        output.narrow(0, r * n, n)
            .copy_(table_.inputs[static_cast<size_t>(r)].narrow(0, rank_ * n, n));
      }
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    auto nothing = at::empty({0});
    return exchange(nothing, [] {});
  }

 private:
  class Done final : public c10d::Work {
   public:
    Done() { finish(); }
  };

  c10::intrusive_ptr<c10d::Work> exchange(const at::Tensor& input,
                                          const std::function<void()>& read) {
    ++calls;
    table_.inputs[static_cast<size_t>(rank_)] = input;
    table_.barrier.arrive_and_wait();
    read();
    table_.barrier.arrive_and_wait();
    return c10::make_intrusive<Done>();
  }

  Table& table_;
};

void on_plain_ranks(int size, const std::function<void(Group&)>& body) {
  Table table(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      Group group(c10::make_intrusive<PlainBackend>(rank, size, table));
      body(group);
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(GroupOverAnotherBackend, RunsEveryCollective) {
  on_plain_ranks(3, [](Group& group) {
    const auto rank = static_cast<float>(group.rank());
    auto whole = group.empty(12, at::kFloat, Category::gradients);
    auto slice = group.empty(4, at::kFloat, Category::gradients).fill_(rank);
    group.all_gather(whole, slice).wait();
    for (int r = 0; r < 3; ++r) EXPECT_EQ(whole[4 * r].item<float>(), static_cast<float>(r));
    group.reduce_scatter(slice, whole).wait();
    EXPECT_TRUE(at::equal(slice, at::full({4}, 3 * rank)));
    slice.fill_(rank + 1);
    group.all_reduce(slice).wait();
    EXPECT_TRUE(at::equal(slice, at::full({4}, 6.0f)));
    slice.fill_(rank);
    group.broadcast(slice, 2).wait();
    EXPECT_TRUE(at::equal(slice, at::full({4}, 2.0f)));
    auto exchanged = at::empty({12});
    group.all_to_all(exchanged, whole).wait();
    EXPECT_TRUE(at::equal(exchanged, at::full({12}, rank)));
    group.barrier();
    auto scalar = at::full({1}, 1.0f);
    group.all_reduce_control(scalar);
    EXPECT_EQ(scalar[0].item<float>(), 3);
  });
}

TEST(GroupOverAnotherBackend, ReducesLowPrecisionIntoFp32ByConverting) {
  on_plain_ranks(2, [](Group& group) {
    // 1 and 1/512 need more than bfloat16's 8 bits together.
    auto input = at::full({8}, group.rank() == 0 ? 1.0 : 1.0 / 512, at::kBFloat16);
    auto output = at::empty({4});
    group.reduce_scatter(output, input).wait();
    EXPECT_TRUE(at::equal(output, at::full({4}, 1.0f + 1.0f / 512)));
  });
}

TEST(GroupOverAnotherBackend, CountsItsTrafficByDefinition) {
  on_plain_ranks(2, [](Group& group) {
    auto whole = at::full({8}, 1.0f);
    auto slice = at::full({4}, 1.0f);
    EXPECT_EQ(group.traffic().count(Collective::control).calls, 0);
    group.all_gather(whole, slice).wait();
    group.barrier();
    EXPECT_EQ(group.traffic().count(Collective::all_gather).logical_bytes, 16);
    EXPECT_EQ(group.traffic().count(Collective::all_gather).copied_bytes, 16);
    EXPECT_EQ(group.traffic().count(Collective::control).calls, 1);
    // Sums of bf16 into fp32, and of fp32 into bf16, are sent in fp32.
    const auto bf16 = whole.to(at::kBFloat16);
    group.reduce_scatter(slice, bf16).wait();
    EXPECT_EQ(group.traffic().count(Collective::reduce_scatter).logical_bytes, 16);
    auto rounded = slice.to(at::kBFloat16);
    group.reduce_scatter(rounded, whole).wait();
    EXPECT_EQ(group.traffic().count(Collective::reduce_scatter).logical_bytes, 32);
    group.reduce_scatter(rounded, bf16).wait();
    EXPECT_EQ(group.traffic().count(Collective::reduce_scatter).logical_bytes, 40);
    EXPECT_EQ(group.sent_dtype(at::kBFloat16, at::kFloat), at::kFloat);
  });
}

// A backend whose barrier ends a while after it has been issued.
class SlowBackend final : public c10d::Backend {
 public:
  static constexpr std::chrono::milliseconds kTakes{30};
  SlowBackend() : c10d::Backend(0, 2) {}
  const std::string getBackendName() const override { return "slow"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&,
                                                 const c10d::AllgatherOptions&) override {
    return {};
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    EXPECT_TRUE(options.asyncOp) << "no other thread could issue a call while this one waits";
    return c10::make_intrusive<Pending>();
  }

 private:
  class Pending final : public c10d::Work {
   public:
    bool wait(std::chrono::milliseconds) override {
      std::this_thread::sleep_for(kTakes);
      return true;
    }
  };
};

TEST(GroupOverAnotherBackend, CountsTheTimeOfABarrierOnce) {
  Group group(c10::make_intrusive<SlowBackend>());
  const auto before = group.wait_ms();
  const auto begin = std::chrono::steady_clock::now();
  group.barrier();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(group.wait_ms() - before, SlowBackend::kTakes.count());
  EXPECT_LE(group.wait_ms() - before, took.count());
}

TEST(GroupOverAnotherBackend, HasNoWindowsAndOrdinaryMemory) {
  on_plain_ranks(2, [](Group& group) {
    EXPECT_EQ(group.window(100, 1, Category::parameters), nullptr);
    auto memory = group.empty(100, at::kFloat, Category::parameters);
    EXPECT_EQ(group.ledger()->usage(Category::parameters).current, 400);
    EXPECT_EQ(group.local_rank(), group.rank());
    EXPECT_EQ(group.local_size(), 2);
  });
}

// A backend that can only say where its ranks are, and fails in every other way: when it is called
// or waited for, with c10d's exceptions or others.
class BrokenBackend final : public c10d::Backend {
 public:
  BrokenBackend() : c10d::Backend(0, 2) {}
  const std::string getBackendName() const override { return "broken"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&,
                                                 const c10d::AllgatherOptions&) override {
    return c10::make_intrusive<Ended>(nullptr);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor&, at::Tensor&,
                                                      const c10d::ReduceScatterOptions&) override {
    throw OutOfMemory("the device is full");
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&,
                                           const c10d::BroadcastOptions&) override {
    throw std::runtime_error("no route to host");
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&,
                                               std::vector<int64_t>&,
                                               const c10d::AllToAllOptions&) override {
    return c10::make_intrusive<Ended>(
        std::make_exception_ptr(std::runtime_error("connection closed by peer")));
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return c10::make_intrusive<Ended>(
        std::make_exception_ptr(c10::Error(std::string("the cable is unplugged"), nullptr)));
  }

 private:
  class Ended final : public c10d::Work {
   public:
    explicit Ended(const std::exception_ptr& error) { finish(error); }
  };
};

TEST(GroupOverAnotherBackend, ReportsItsErrorsAsCommErrorsThatNameTheCall) {
  Group group(c10::make_intrusive<BrokenBackend>());
  auto tensor = at::full({2}, 1.0f);
  auto other = at::full({2}, 1.0f);
  EXPECT_THAT(zero::message_of<CommError>([&] { group.all_reduce(tensor, "norm"); }),
              ::testing::AllOf(::testing::StartsWith("all_reduce 'norm' failed on rank 0: "),
                               ::testing::HasSubstr("does not support allreduce")));
  EXPECT_EQ(zero::message_of<CommError>([&] { group.broadcast(tensor, 1, "unit 3"); }),
            "broadcast 'unit 3' failed on rank 0: no route to host");
  auto work = group.all_to_all(other, tensor, "unit 4");
  EXPECT_EQ(zero::message_of<CommError>([&] { work.wait(); }),
            "all_to_all 'unit 4' failed on rank 0: connection closed by peer");
  EXPECT_EQ(zero::message_of<CommError>([&] { group.barrier(); }),
            "barrier failed on rank 0: the cable is unplugged");
  EXPECT_THROW(group.reduce_scatter(tensor.narrow(0, 0, 1), other), OutOfMemory)
      << "ours are left as they are";
}

TEST(GroupOverAnotherBackend, SendsControlCallsOverTheControlBackend) {
  Table data_table(2);
  Table control_table(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto data = c10::make_intrusive<PlainBackend>(rank, 2, data_table);
      const auto control = c10::make_intrusive<PlainBackend>(rank, 2, control_table);
      Group group(Transport{.data = data, .control = control});
      const auto asked = control->calls;  // it asks where the ranks are
      EXPECT_EQ(data->calls, 0);
      auto tensor = at::full({4}, 1.0f);
      group.all_reduce(tensor).wait();
      EXPECT_EQ(data->calls, 1);
      EXPECT_EQ(control->calls, asked);
      auto all = at::full({8}, 0.0f);
      group.all_gather_control(all, tensor);
      group.all_reduce_control(tensor);
      group.barrier();
      EXPECT_EQ(data->calls, 1);
      EXPECT_EQ(control->calls, asked + 3);
    });
  }
  for (auto& rank : ranks) rank.join();
}

}  // namespace
}  // namespace zero::comm
