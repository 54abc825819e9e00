// `zero_bench optimizer`: how fast the optimizers stream memory.
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/zero/bench.h"
#include "apps/zero/plain_loops.h"
#include "benchmarks/programs/subjects.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/optim/factors.h"
#include "zero/optim/narrow.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/sweeps.h"

namespace zero::app::benchmarks {
namespace {

constexpr const char* kDescription =
    "Times the fused optimizers beside plain loops in the same run.\n\n"
    "  zero_bench optimizer --threads 1,2\n"
    "  zero_bench optimizer --parameters 1e9,2e9,4e9 --rounds 5\n\n"
    "GB/s are 1e9 bytes a second of what each loop reads and writes by definition, in bytes an "
    "element: a triad (a = b + 3 c,\n"
    "as STREAM's) 12; AdamW 28 (weights and two moments read and written, gradient read; in bf16 "
    "the 16-bit weights are\n"
    "written too; with split master weights 26: two halves of 16 bits are read and written); SGD "
    "with momentum, Adagrad and Lion 20; LAMB 40 in two sweeps (24 and 16), Muon 28 "
    "(16 and 12) without its matrix products, Adafactor 40 (12, 16 for rows and columns of a "
    "matrix and its directions, and 12). With moments in 8 bits AdamW has 16.25 (2 1/8 "
    "read and written for both).\n"
    "A streaming loop has an optimizer's very reads and writes, but hardly computes: the last "
    "column is the optimizer's speed over that\n"
    "loop's, the median of the rounds. An ordinary\n"
    "store makes the processor read the line first, which is not counted: the triad that stores "
    "past the caches avoids it.\n"
    "Every round runs all loops once, so that a busy moment hits them alike. The last columns but "
    "one are shares of the faster triad.\n"
    "With --parameters it times AdamW's update of whole models instead: bf16 with fp32 weights, 16 "
    "bytes of memory a parameter, beside the\n"
    "streaming loop and the seconds that ZeRO-Offload (2101.06840, table 4) has for that size.";

struct Options {
  int64_t elements = int64_t{1} << 23;
  int rounds = 41;
  std::vector<int> threads{1, 2};
  std::vector<double> parameters;
  JsonFile json;

  std::vector<int64_t> model_sizes() const { return {parameters.begin(), parameters.end()}; }
};

std::optional<int> read_command_line(const Arguments& arguments, Options& options) {
  OptionParser parser("optimizer", kDescription, "zero_bench");
  parser.add_option("--elements", options.elements, "Of each array; more than fit in the caches")
      ->check(positive());
  parser.add_option("--rounds", options.rounds, "Runs of each loop")->check(positive());
  parser.add_option("--threads", options.threads, "Numbers of threads, one after the other")
      ->delimiter(',')
      ->check(positive())
      ->default_str("1,2")
      ->type_name("T,...");
  parser
      .add_option("--parameters", options.parameters,
                  "Of whole models, as 1e9, one after the other; --elements is not used then")
      ->delimiter(',')
      ->check(positive())
      ->default_str("")
      ->type_name("P,...");
  options.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  for (const double parameters : options.parameters) {
    if (parameters >= 1 && parameters <= 1e15) continue;
    throw ConfigError(fmt::format("--parameters has {}; a model has from 1 to 1e15.", parameters));
  }
  options.json.check();
  return std::nullopt;
}

struct Loop {
  std::string name;
  double bytes_per_element;
  std::function<void()> run;
  std::string beside{};  ///< the streaming loop with its reads and writes
  std::vector<double> seconds{};

  double bytes(int64_t elements) const { return bytes_per_element * static_cast<double>(elements); }
  Summary gb_per_s(int64_t elements) const {
    std::vector<double> rates;
    for (const double s : seconds) rates.push_back(bytes(elements) / s * 1e-9);
    return summarize(rates);
  }
  /// Its rate over another's, round by round.
  Summary share_of(const Loop& other) const {
    std::vector<double> shares;
    for (size_t i = 0; i < seconds.size(); ++i) {
      shares.push_back(bytes_per_element / seconds[i] /
                       (other.bytes_per_element / other.seconds[i]));
    }
    return summarize(shares);
  }
};

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The arrays of an update and the loops over them.
class Arrays {
 public:
  explicit Arrays(int64_t numel)
      : numel_(numel),
        p_(filled(0.5, at::kFloat)),
        m_(filled(1e-3, at::kFloat)),
        v_(filled(1e-6, at::kFloat)),
        g_(filled(1e-3, at::kFloat)),
        g16_(filled(1e-3, at::kBFloat16)),
        p16_(filled(0.5, at::kBFloat16)),
        lower_(filled(0, at::kShort)),
        fp32_{.numel = numel,
              .master = p_.mutable_data_ptr<float>(),
              .state = {m_.mutable_data_ptr<float>(), v_.mutable_data_ptr<float>()},
              .gradient = g_.const_data_ptr()},
        bf16_(fp32_),
        codes_(at::zeros({2, optim::state_bytes(optim::StateFormat::eight_bit, whole(numel))},
                         at::kByte)),
        sgd_(fp32_) {
    bf16_.gradient = g16_.const_data_ptr();
    bf16_.gradient_dtype = at::kBFloat16;
    bf16_.parameter = p16_.mutable_data_ptr();
    bf16_.parameter_dtype = at::kBFloat16;
    split_ = bf16_;
    split_.master = nullptr;
    split_.lower = static_cast<uint16_t*>(lower_.mutable_data_ptr());
    sgd_.state[1] = nullptr;
    sgd16_ = bf16_;
    sgd16_.state[1] = nullptr;
    coded_ = {.wide = bf16_, .state_format = optim::StateFormat::eight_bit};
    coded_.wide.state = {};
    for (int64_t i = 0; i < 2; ++i) coded_.state[static_cast<size_t>(i)] = codes_[i].data_ptr();
  }

  std::vector<Loop> loops() {
    auto* p = fp32_.master;
    auto* m = fp32_.state[0];
    auto* v = fp32_.state[1];
    const std::string stream32 = "streaming loop, fp32";
    const std::string stream_bf16 = "streaming loop, bf16";
    const std::string one32 = "streaming loop, one state, fp32";
    const std::string one16 = "streaming loop, one state, bf16";
    const auto* g = g_.const_data_ptr<float>();
    const auto* g16 = static_cast<const uint16_t*>(bf16_.gradient);
    auto* p16 = static_cast<uint16_t*>(bf16_.parameter);
    return {
        plain("triad", 12, [=](auto b, auto e) { triad(p, g, v, b, e); }),
        plain("triad, stores past the caches", 12,
              [=](auto b, auto e) { triad_past_caches(p, g, v, b, e); }),
        plain(stream32, 28, [=](auto b, auto e) { stream(p, m, v, g, b, e); }),
        {"AdamW, fp32", 28, [this] { optim::update(adamw_, 10, 1e-3, 0.5, fp32_); }, stream32},
        plain(stream_bf16, 28, [=](auto b, auto e) { stream16(p, m, v, g16, p16, b, e); }),
        {"AdamW, bf16", 28, [this] { optim::update(adamw_, 10, 1e-3, 0.5, bf16_); }, stream_bf16},
        {"AdamW, bf16, split", 26, [this] { optim::update(adamw_, 10, 1e-3, 0.5, split_); }},
        {"LibTorch's fused AdamW, fp32", 28,
         [this] {
           at::_fused_adamw_({p_}, {g_}, {m_}, {v_}, {}, {count_}, 1e-3, 0.9, 0.999, 0.01, 1e-8,
                             false, false);
         },
         stream32},
        {"AdamW, bf16, moments in 8 bits", 16.25,
         [this] { optim::update(adamw_, 10, 1e-3, 0.5, coded_); }},
        plain(one32, 20, [=](auto b, auto e) { stream_one(p, m, g, b, e); }),
        with_one("SGD with momentum, fp32", momentum_, sgd_, one32),
        with_one("Adagrad, fp32", adagrad_, sgd_, one32),
        with_one("Lion, fp32", lion_, sgd_, one32),
        plain(one16, 20, [=](auto b, auto e) { stream16_one(p, m, g16, p16, b, e); }),
        with_one("SGD with momentum, bf16", momentum_, sgd16_, one16),
        with_one("Adagrad, bf16", adagrad_, sgd16_, one16),
        with_one("Lion, bf16", lion_, sgd16_, one16),
        {"LAMB, fp32, two sweeps", 40, [this] { optim::update(lamb_, 2, 1e-3, 0.5, fp32_); }},
        {"Muon without its products, fp32", 28,
         [this] {
           optim::Findings found{.direction = v_.mutable_data_ptr<float>()};
           optim::first_sweep(muon_, 2, 0.5, sgd_, found);
           auto second = sgd_;
           second.gradient = found.direction;
           optim::second_sweep(muon_, 2, 1e-3, 1, second);
         }},
        {"Adafactor, fp32, factored", 40, [this] { update_factored(); }},
        {"squared norm, fp32", 4, [=, this] { optim::squared_norm(g, at::kFloat, numel_); }},
        {"squared norm, bf16", 2, [=, this] { optim::squared_norm(g16, at::kBFloat16, numel_); }},
        {"accumulate, bf16 into fp32", 10,
         [=, this] { optim::accumulate(p, g16, at::kBFloat16, numel_); }},
    };
  }

  /// Plain loops leave numbers behind that an optimizer should not meet.
  void reset() {
    p_.fill_(0.5);
    m_.fill_(1e-3);
    v_.fill_(1e-6);
    codes_.zero_();
  }

 private:
  at::Tensor filled(double value, at::ScalarType dtype) const {
    return at::full({numel_}, value, at::TensorOptions(dtype));
  }
  static int64_t whole(int64_t numel) { return at::round_up(numel, optim::kCodedBlock); }
  static Loop with_one(std::string name, const Optimizer& optimizer,
                       const optim::Operands& operands, std::string beside) {
    return {std::move(name), 20,
            [&optimizer, &operands] { optim::update(optimizer, 2, 1e-3, 0.5, operands); },
            std::move(beside)};
  }
  Loop plain(std::string name, double bytes, std::function<void(int64_t, int64_t)> pass) const {
    return {std::move(name), bytes,
            [n = numel_, pass = std::move(pass)] { at::parallel_for(0, n, 1 << 15, pass); }};
  }

  // Treats the array as matrices with up to 1024 columns; elements that are left over stay.
  void update_factored() {
    const int64_t columns = std::min<int64_t>(numel_, 1024);
    const int64_t rows = numel_ / columns;
    optim::Findings found{.direction = v_.mutable_data_ptr<float>()};
    auto operands = sgd_;
    operands.state[0] = nullptr;
    operands.numel = rows * columns;
    optim::first_sweep(adafactor_, 2, 0.5, operands, found);
    optim::factored_directions(std::get<Adafactor>(adafactor_), 2,
                               optim::Factors({rows, columns}, {columns, 1}), found.direction,
                               row_var_.mutable_data_ptr<float>(),
                               col_var_.mutable_data_ptr<float>(), found.norms.update);
    operands.gradient = found.direction;
    optim::second_sweep(adafactor_, 2, 1e-3, optim::ratio(adafactor_, found.norms, operands.numel),
                        operands);
  }

  int64_t numel_;
  at::Tensor p_, m_, v_, g_, g16_, p16_, lower_;
  at::Tensor count_ = at::ones({}, at::kFloat);
  at::Tensor row_var_ = at::ones({numel_ / std::min<int64_t>(numel_, 1024)}, at::kFloat);
  at::Tensor col_var_ = at::ones({std::min<int64_t>(numel_, 1024)}, at::kFloat);
  optim::Operands fp32_, bf16_, split_;
  at::Tensor codes_;  // of both moments in 8 bits
  optim::Operands sgd_, sgd16_;
  optim::NarrowOperands coded_;
  Optimizer adamw_ = AdamW{};
  Optimizer momentum_ = Sgd{.momentum = 0.9};
  Optimizer adagrad_ = Adagrad{};
  Optimizer lion_ = Lion{};
  Optimizer lamb_ = Lamb{};
  Optimizer muon_ = Muon{};
  Optimizer adafactor_ = Adafactor{};
};

Json measure(Arrays& arrays, const Options& options, int threads) {
  at::set_num_threads(threads);
  auto loops = arrays.loops();
  for (int round = -1; round < options.rounds; ++round) {
    arrays.reset();
    for (auto& loop : loops) {
      const double seconds = seconds_of(loop.run);
      if (round >= 0) loop.seconds.push_back(seconds);
    }
  }
  Summary triad;
  for (const auto& loop : loops) {
    if (!loop.name.starts_with("triad")) continue;
    const auto rate = loop.gb_per_s(options.elements);
    triad.most = std::max(triad.most, rate.most);
    triad.median = std::max(triad.median, rate.median);
  }
  Json results = Json::array();
  for (const auto& loop : loops) {
    const auto rate = loop.gb_per_s(options.elements);
    const auto beside = std::find_if(loops.begin(), loops.end(),
                                     [&](const Loop& each) { return each.name == loop.beside; });
    results.push_back(
        {{"loop", loop.name},
         {"threads", threads},
         {"elements", options.elements},
         {"bytes_per_element", loop.bytes_per_element},
         {"gb_per_s", {{"best", rate.most}, {"median", rate.median}}},
         {"share_of_triad",
          {{"best", rate.most / triad.most}, {"median", rate.median / triad.median}}},
         {"beside", loop.beside},
         {"share_of_streaming", beside == loops.end() ? Json() : loop.share_of(*beside).json()}});
  }
  return results;
}

void print_table(const Json& results, const Options& options, int threads) {
  fmt::print(
      "\n{} elements, {} thread{}, {} rounds\n{:<31} {:>10} {:>11} {:>11} {:>13} {:>14} {:>14}\n",
      options.elements, threads, threads == 1 ? "" : "s", options.rounds, "", "bytes/elem",
      "best GB/s", "median GB/s", "best/triad", "median/triad", "of streaming");
  for (const auto& r : results) {
    const auto& share = r["share_of_streaming"];
    fmt::print("{:<31} {:>10} {:>11.2f} {:>11.2f} {:>12.1f}% {:>13.1f}%{}\n",
               r["loop"].get<std::string>(), r["bytes_per_element"].get<double>(),
               r["gb_per_s"]["best"].get<double>(), r["gb_per_s"]["median"].get<double>(),
               100 * r["share_of_triad"]["best"].get<double>(),
               100 * r["share_of_triad"]["median"].get<double>(),
               share.is_null() ? std::string()
                               : fmt::format(" {:>13.1f}%", 100 * share["median"].get<double>()));
  }
}

}  // namespace

int optimizer(const Arguments& arguments) {
  Options options;
  if (const auto status = read_command_line(arguments, options)) return *status;
  const auto start = machine();
  fmt::print("machine   {}\n", describe(start));
  install_host_allocator();
  Json about{{"rounds", options.rounds}, {"threads", options.threads}};
  Json results = Json::array();
  if (options.parameters.empty()) {
    about["elements"] = options.elements;
    Arrays arrays(options.elements);
    for (const int threads : options.threads) {
      const auto rows = measure(arrays, options, threads);
      print_table(rows, options, threads);
      results.insert(results.end(), rows.begin(), rows.end());
    }
  } else {
    about["parameters"] = options.model_sizes();
    results = whole_models(about["parameters"], options.threads, options.rounds);
  }
  options.json.write("optimizer", start, about, results);
  return 0;
}

}  // namespace zero::app::benchmarks
