// `zero_bench optimizer --parameters`: the seconds in which the host updates a whole model.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "apps/zero/bench.h"
#include "apps/zero/plain_loops.h"
#include "benchmarks/programs/subjects.h"
#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
#include "zero/optim/optimizer.h"
#include "zero/partition/formulas.h"

namespace zero::app::benchmarks {
namespace {

// Held: fp32 master weights and two moments, the gradient and the parameter in bf16.
constexpr partition::StateBytes kBytes{.parameter = 2, .gradient = 2, .optimizer = 12};
constexpr int64_t kBytesHeld = kBytes.parameter + kBytes.gradient + kBytes.optimizer;

// ZeRO-Offload (2101.06840), table 4: CPU-Adam on the two processors of a DGX-2 node.
struct Published {
  int64_t parameters;
  double seconds;
};
constexpr std::array<Published, 5> kPublished{{{1'000'000'000, 0.22},
                                               {2'000'000'000, 0.51},
                                               {4'000'000'000, 1.03},
                                               {8'000'000'000, 2.41},
                                               {10'000'000'000, 2.57}}};

std::optional<double> published_seconds(int64_t parameters) {
  for (const auto& row : kPublished)
    if (row.parameters == parameters) return row.seconds;
  return std::nullopt;
}

/// Throws OutOfMemory before anything is allocated.
void check_fits(const std::vector<int64_t>& sizes) {
  const auto limit = available_memory();
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  if (largest <= limit.available / kBytesHeld) return;
  throw OutOfMemory(fmt::format(
      "--parameters has {}, whose update needs {} ({} bytes a parameter: fp32 weights and two "
      "moments, gradient and parameter in bf16), but only {} are left ({}). At most {:.1f} billion "
      "parameters fit.",
      largest, format_bytes(static_cast<double>(largest) * kBytesHeld), kBytesHeld,
      format_bytes(static_cast<double>(limit.available)), limit.reason,
      static_cast<double>(limit.available) / static_cast<double>(kBytesHeld) * 1e-9));
}

class Model {
 public:
  explicit Model(int64_t parameters)
      : parameters_(parameters),
        master_(array(at::kFloat)),
        m_(array(at::kFloat)),
        v_(array(at::kFloat)),
        gradient_(array(at::kBFloat16)),
        low_(array(at::kBFloat16)),
        operands_{.numel = parameters,
                  .master = master_.mutable_data_ptr<float>(),
                  .state = {m_.mutable_data_ptr<float>(), v_.mutable_data_ptr<float>()},
                  .gradient = gradient_.const_data_ptr(),
                  .gradient_dtype = at::kBFloat16,
                  .parameter = low_.mutable_data_ptr(),
                  .parameter_dtype = at::kBFloat16} {
    gradient_.fill_(1e-3);
    low_.fill_(0.5);
  }

  /// Sets the arrays anew: an optimizer should not meet what the streaming loop leaves behind.
  void reset() {
    master_.fill_(0.5);
    m_.fill_(1e-3);
    v_.fill_(1e-6);
  }
  void update() { optim::update(adamw_, 10, 1e-3, 0.5, operands_); }
  /// AdamW's very reads and writes, hardly computing.
  void stream() {
    at::parallel_for(0, parameters_, 1 << 15, [this](int64_t begin, int64_t end) {
      stream16(operands_.master, operands_.state[0], operands_.state[1],
               static_cast<const uint16_t*>(operands_.gradient),
               static_cast<uint16_t*>(operands_.parameter), begin, end);
    });
  }

 private:
  at::Tensor array(at::ScalarType dtype) const { return at::empty({parameters_}, dtype); }

  int64_t parameters_;
  at::Tensor master_, m_, v_, gradient_, low_;
  optim::Operands operands_;
  Optimizer adamw_ = AdamW{};
};

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Json measure(Model& model, int64_t parameters, int threads, int rounds) {
  at::set_num_threads(threads);
  std::vector<double> updates, streams;
  for (int round = -1; round < rounds; ++round) {  // the first is not counted
    model.reset();
    const double stream = seconds_of([&] { model.stream(); });
    model.reset();
    const double update = seconds_of([&] { model.update(); });
    if (round < 0) continue;
    streams.push_back(stream);
    updates.push_back(update);
  }
  // States are read and written, gradients are read, and parameters written.
  constexpr int64_t kMoved = 2 * kBytes.optimizer + kBytes.gradient + kBytes.parameter;
  const double gigabytes = static_cast<double>(parameters * kMoved) * 1e-9;
  const auto update = summarize(updates);
  const auto stream = summarize(streams);
  const auto published = published_seconds(parameters);
  return {{"parameters", parameters},
          {"threads", threads},
          {"held_bytes", parameters * kBytesHeld},
          {"seconds", update.json()},
          {"gb_per_s", gigabytes / update.median},
          {"streaming_loop_gb_per_s", gigabytes / stream.median},
          {"published_seconds", published ? Json(*published) : Json()}};
}

void print_row(const Json& row) {
  const auto& seconds = row["seconds"];
  const auto& published = row["published_seconds"];
  fmt::print(
      "{:>14} {:>8} {:>10} {:>9.3f} {:>19} {:>9.2f} {:>15.2f} {:>13}\n",
      row["parameters"].get<int64_t>(), row["threads"].get<int>(),
      format_bytes(row["held_bytes"].get<double>()), seconds["median"].get<double>(),
      fmt::format("({:.3f} to {:.3f})", seconds["min"].get<double>(), seconds["max"].get<double>()),
      row["gb_per_s"].get<double>(), row["streaming_loop_gb_per_s"].get<double>(),
      published.is_null() ? "" : fmt::format("{:.2f}", published.get<double>()));
}

}  // namespace

Json whole_models(const std::vector<int64_t>& sizes, const std::vector<int>& threads, int rounds) {
  check_fits(sizes);
  fmt::print(
      "\nAdamW of a whole model, {} rounds\n{:>14} {:>8} {:>10} {:>9} {:>19} {:>9} {:>15} {:>13}\n",
      rounds, "parameters", "threads", "memory", "seconds", "(least to most)", "GB/s",
      "streaming GB/s", "ZeRO-Offload");
  Json results = Json::array();
  for (const int64_t parameters : sizes) {
    Model model(parameters);
    for (const int count : threads) {
      results.push_back(measure(model, parameters, count, rounds));
      print_row(results.back());
    }
  }
  return results;
}

}  // namespace zero::app::benchmarks
