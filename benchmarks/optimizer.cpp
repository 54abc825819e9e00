// How fast the optimizers stream memory, beside plain loops in the same run: a STREAM-like triad
// (with ordinary stores, and with stores past the caches), and a loop that reads and writes the
// very arrays of the update but hardly computes. Prints a table; the last columns are shares of the
// faster triad.
//
//   build/release/benchmarks/benchmark_optimizer [--elements N] [--rounds R] [--threads T...]
//
// GB/s are 1e9 bytes a second of what each loop reads and writes by definition: the triad 12 bytes
// an element, AdamW 28. (An ordinary store of the triad makes the processor read the line first;
// STREAM does not count that either.) Every round runs all loops once, so that a busy moment hits
// them alike; the table has the best and the median of all rounds.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "zero/base/host_allocator.h"
#include "zero/optim/optimizer.h"

#if defined(__x86_64__)
#define ZERO_EVERY_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZERO_EVERY_WIDTH
#endif

namespace {

ZERO_EVERY_WIDTH void triad(float* __restrict a, const float* __restrict b,
                            const float* __restrict c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) a[i] = b[i] + 3.0F * c[i];
}

#if defined(__x86_64__)
/// The same with stores that go past the caches, so that the lines of `a` are not read first.
void triad_past_caches(float* __restrict a, const float* __restrict b, const float* __restrict c,
                       int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i < end && i % 4 != 0; ++i) a[i] = b[i] + 3.0F * c[i];
  const __m128 factor = _mm_set1_ps(3.0F);
  for (; i + 4 <= end; i += 4) {
    _mm_stream_ps(a + i, _mm_add_ps(_mm_loadu_ps(b + i), _mm_mul_ps(factor, _mm_loadu_ps(c + i))));
  }
  for (; i < end; ++i) a[i] = b[i] + 3.0F * c[i];
  _mm_sfence();
}
#endif

/// AdamW's reads and writes with three additions.
ZERO_EVERY_WIDTH void stream(float* __restrict p, float* __restrict m, float* __restrict v,
                             const float* __restrict g, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float x = g[i];
    p[i] += x;
    m[i] += x;
    v[i] += x;
  }
}

/// The same with a 16-bit gradient and a 16-bit copy of the weights.
ZERO_EVERY_WIDTH void stream16(float* __restrict p, float* __restrict m, float* __restrict v,
                               const uint16_t* __restrict g, uint16_t* __restrict low,
                               int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const auto x = static_cast<float>(static_cast<int16_t>(g[i]));
    p[i] += x;
    m[i] += x;
    v[i] += x;
    low[i] = g[i];
  }
}

struct Loop {
  std::string name;
  double bytes_per_element;
  std::function<void()> run;
  std::vector<double> seconds{};
  double best = 0;  // GB/s
  double median = 0;
};

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void in_parallel(int64_t numel, const std::function<void(int64_t, int64_t)>& pass) {
  at::parallel_for(0, numel, 1 << 15, pass);
}

}  // namespace

int main(int argc, char** argv) {
  int64_t numel = int64_t{1} << 23;
  int rounds = 41;
  std::vector<int> threads{1, 2};
  CLI::App app("Memory bandwidth of the optimizers");
  app.add_option("--elements", numel, "elements of each array")->capture_default_str();
  app.add_option("--rounds", rounds, "runs of each loop")->capture_default_str();
  app.add_option("--threads", threads, "numbers of threads")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  zero::install_host_allocator();

  const auto tensor = [&](double value, at::ScalarType dtype) {
    return torch::full({numel}, value, at::TensorOptions(dtype));
  };
  auto p = tensor(0.5, at::kFloat), m = tensor(1e-3, at::kFloat), v = tensor(1e-6, at::kFloat),
       g = tensor(1e-3, at::kFloat), g16 = tensor(1e-3, at::kBFloat16),
       low = tensor(0.5, at::kBFloat16);
  auto* master = p.mutable_data_ptr<float>();
  auto* first = m.mutable_data_ptr<float>();
  auto* second = v.mutable_data_ptr<float>();
  const auto* gradient = g.const_data_ptr<float>();
  auto* gradient16 = static_cast<uint16_t*>(g16.mutable_data_ptr());
  auto* parameter16 = static_cast<uint16_t*>(low.mutable_data_ptr());
  const zero::optim::Range fp32{
      .numel = numel, .master = master, .state = {first, second}, .gradient = gradient};
  auto bf16 = fp32;
  bf16.gradient = gradient16;
  bf16.gradient_dtype = at::kBFloat16;
  bf16.parameter = parameter16;
  bf16.parameter_dtype = at::kBFloat16;
  auto sgd = fp32;
  sgd.state[1] = nullptr;
  const zero::Optimizer adamw = zero::AdamW{};
  const zero::Optimizer momentum = zero::Sgd{.momentum = 0.9};
  auto count = torch::ones({});

  for (const int t : threads) {
    at::set_num_threads(t);
    std::vector<Loop> loops {
      {"triad", 12,
       [&] { in_parallel(numel, [&](auto b, auto e) { triad(master, gradient, second, b, e); }); }},
#if defined(__x86_64__)
          {"triad, stores past the caches", 12,
           [&] {
             in_parallel(
                 numel, [&](auto b, auto e) { triad_past_caches(master, gradient, second, b, e); });
           }},
#endif
          {"streaming loop, fp32", 28,
           [&] {
             in_parallel(numel,
                         [&](auto b, auto e) { stream(master, first, second, gradient, b, e); });
           }},
          {"AdamW, fp32", 28, [&] { zero::optim::update(adamw, 10, 1e-3, 0.5, fp32); }},
          {"streaming loop, bf16", 28,
           [&] {
             in_parallel(numel, [&](auto b, auto e) {
               stream16(master, first, second, gradient16, parameter16, b, e);
             });
           }},
          {"AdamW, bf16", 28, [&] { zero::optim::update(adamw, 10, 1e-3, 0.5, bf16); }},
          {"LibTorch's fused AdamW, fp32", 28,
           [&] {
             at::_fused_adamw_({p}, {g}, {m}, {v}, {}, {count}, 1e-3, 0.9, 0.999, 0.01, 1e-8, false,
                               false);
           }},
          {"SGD with momentum, fp32", 20,
           [&] { zero::optim::update(momentum, 2, 1e-3, 0.5, sgd); }},
          {"squared norm, fp32", 4,
           [&] { zero::optim::squared_norm(gradient, at::kFloat, numel); }},
          {"squared norm, bf16", 2,
           [&] { zero::optim::squared_norm(gradient16, at::kBFloat16, numel); }},
      {
        "accumulate, bf16 into fp32", 10,
            [&] { zero::optim::accumulate(master, gradient16, at::kBFloat16, numel); }
      }
    };
    for (int round = -1; round < rounds; ++round) {
      p.fill_(0.5);  // plain loops leave numbers behind that an optimizer should not meet
      m.fill_(1e-3);
      v.fill_(1e-6);
      for (auto& loop : loops) {
        const double seconds = seconds_of(loop.run);
        if (round >= 0) loop.seconds.push_back(seconds);
      }
    }
    double triad_best = 0, triad_median = 0;
    for (auto& loop : loops) {
      std::sort(loop.seconds.begin(), loop.seconds.end());
      const double bytes = loop.bytes_per_element * static_cast<double>(numel) * 1e-9;
      loop.best = bytes / loop.seconds.front();
      loop.median = bytes / loop.seconds[loop.seconds.size() / 2];
      if (!loop.name.starts_with("triad")) continue;
      triad_best = std::max(triad_best, loop.best);
      triad_median = std::max(triad_median, loop.median);
    }
    fmt::print("\n{} elements, {} thread{}, {} rounds\n{:<30} {:>12} {:>12} {:>16} {:>16}\n", numel,
               t, t == 1 ? "" : "s", rounds, "", "best GB/s", "median GB/s", "best / triad",
               "median / triad");
    for (const auto& loop : loops) {
      fmt::print("{:<30} {:>12.2f} {:>12.2f} {:>15.1f}% {:>15.1f}%\n", loop.name, loop.best,
                 loop.median, 100 * loop.best / triad_best, 100 * loop.median / triad_median);
    }
  }
}
