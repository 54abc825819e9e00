// `zero_bench pager`: what paging adds to an operator that uses a parameter.
#include <ATen/ops/empty.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/zero/bench.h"
#include "benchmarks/programs/subjects.h"
#include "zero/base/host_allocator.h"
#include "zero/base/ledger.h"
#include "zero/paging/pager.h"
#include "zero/partition/layout.h"

namespace zero::app::benchmarks {
namespace {

constexpr const char* kDescription =
    "Times what stage 3 adds to an operator that uses a parameter, in nanoseconds of processor "
    "time.\n\n"
    "  zero_bench pager --parameters 148\n\n"
    "The operator negates a parameter of --elements elements into an existing tensor; a view is "
    "`parameter.t()`. Each touch\n"
    "is of the next parameter in turn, and each parameter is a unit of its own. A hit finds its "
    "unit present; a miss finds\n"
    "it absent (the budget is 0 bytes) and gathers it from a source that does nothing, so that the "
    "pager's own work is\n"
    "timed and not a copy. A touch is what the pager does for an operator, called without one. "
    "`more` is the difference from\n"
    "the same without paging. A step of 1000 touches repeats and is planned, as in training; "
    "evaluation is served on demand.";

struct Options {
  int64_t parameters = 16;
  int64_t elements = 64;
  int repetitions = 9;
  double min_time = 0.1;
  JsonFile json;
};

std::optional<int> read_command_line(const Arguments& arguments, Options& options) {
  OptionParser parser("pager", kDescription, "zero_bench");
  parser.add_option("--parameters", options.parameters, "Paged parameters")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  parser.add_option("--elements", options.elements, "Of each parameter")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  parser.add_option("--repetitions", options.repetitions, "Timings of each")->check(positive());
  parser.add_option("--min-time", options.min_time, "Seconds of a timing, at least")
      ->check(positive());
  options.json.add_to(parser);
  if (const auto status = parser.read(arguments)) return status;
  options.json.check();
  return std::nullopt;
}

class NullSource : public paging::UnitSource {
 public:
  void gather(int64_t, void*) override {}
  void finish(int64_t) override {}
};

std::vector<at::Tensor> make_parameters(const Options& options) {
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < options.parameters; ++i) {
    parameters.push_back(at::zeros({1, options.elements}, at::kFloat));
  }
  return parameters;
}

partition::Layout layout_of(const std::vector<at::Tensor>& parameters) {
  std::vector<partition::Parameter> described;
  for (const auto& parameter : parameters) {
    described.push_back(
        {.name = "p" + std::to_string(described.size()), .numel = parameter.numel()});
  }
  return {described, 1, 1};  // units of at most a byte: each parameter is its own
}

/// Parameters that are paged as long as it lives. A plan releases a unit after its last use in a
/// step; those that are to be present are pinned, so that every touch is a hit.
struct Paged {
  Paged(const Options& options, bool present)
      : parameters(make_parameters(options)),
        layout(layout_of(parameters)),
        pager(layout, parameters, source, std::make_shared<Ledger>(),
              {.budget_bytes = present ? layout.numel() * 4 : 0}) {
    for (int64_t unit = 0; present && unit < layout.unit_count(); ++unit) {
      pins.push_back(pager.pin(unit));
    }
  }
  std::vector<at::Tensor> parameters;
  partition::Layout layout;
  NullSource source;
  paging::Pager pager;
  std::vector<paging::Pager::Pin> pins;
};

/// Something done once to each parameter in turn.
using Pass = std::function<void(int64_t parameter)>;

struct Case {
  std::string name;
  std::string without;  ///< the case that does the same without paging, if there is one
  Pass pass;
  paging::Pager* pager = nullptr;     ///< that it uses, if any
  paging::PagerCounts counts{};       ///< what the timed passes did
  std::vector<double> nanoseconds{};  ///< processor time of a pass, of each timing
};

/// A step's touches: the pager's trace grows by so many before it ends.
constexpr int64_t kTouches = 1000;

/// A step of the pager with as many touches, from the first parameter on: all have the same trace.
void pass_step(const Case& measured, int64_t parameters) {
  int64_t next = 0;
  for (int64_t i = 0; i < kTouches; ++i) {
    measured.pass(next);
    if (++next == parameters) next = 0;
  }
}

/// Returns the processor time of this process, in nanoseconds.
double processor_time() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

/// Keeps the compiler from leaving out what made `value`.
template <class Value>
void use(const Value& value) {
  asm volatile("" : : "g"(&value) : "memory");
}

/// Adds a timing of at least `min_time` seconds. The ends of the pager's steps are not timed.
void time_case(Case& measured, int64_t parameters, double min_time) {
  auto* pager = measured.pager;
  const auto end_step = [&] {
    if (pager) pager->end_step();
  };
  for (int step = 0; step < 3; ++step) {  // until all that stays allocated is there
    pass_step(measured, parameters);
    end_step();
  }
  const auto before = pager ? pager->counts() : paging::PagerCounts{};
  double spent = 0;
  int64_t passes = 0;
  while (spent < min_time * 1e9) {
    const double begin = processor_time();
    pass_step(measured, parameters);
    spent += processor_time() - begin;
    passes += kTouches;
    end_step();
  }
  measured.nanoseconds.push_back(spent / static_cast<double>(passes));
  if (!pager) return;
  measured.counts.touches += pager->counts().touches - before.touches;
  measured.counts.gathers += pager->counts().gathers - before.gathers;
}

std::vector<Case> make_cases(Paged& present, Paged& absent, const std::vector<at::Tensor>& plain,
                             at::Tensor& output) {
  const auto at = [](const std::vector<at::Tensor>& list, int64_t i) -> const at::Tensor& {
    return list[static_cast<size_t>(i)];
  };
  const auto negate = [&output, at](const std::vector<at::Tensor>& parameters) -> Pass {
    return [&, at](int64_t i) { at::neg_out(output, at(parameters, i)); };
  };
  const auto view = [at](const std::vector<at::Tensor>& parameters) -> Pass {
    return [&, at](int64_t i) { use(at(parameters, i).t()); };
  };
  const auto touch = [](Paged& paged, bool training) -> Pass {
    return [&, training](int64_t i) { use(paged.pager.touch({&i, 1}, training)); };
  };
  return {{"operator, plain", "", negate(plain)},
          {"operator, hit", "operator, plain", negate(present.parameters), &present.pager},
          {"operator, miss", "operator, plain", negate(absent.parameters), &absent.pager},
          {"view, plain", "", view(plain)},
          {"view, absent", "view, plain", view(absent.parameters), &absent.pager},
          {"touch, hit", "", touch(present, true), &present.pager},
          {"touch, hit, evaluation", "", touch(present, false), &present.pager},
          {"touch, miss", "", touch(absent, true), &absent.pager}};
}

}  // namespace

int pager(const Arguments& arguments) {
  Options options;
  if (const auto status = read_command_line(arguments, options)) return *status;
  install_host_allocator();
  const auto start = machine();
  const auto plain = make_parameters(options);
  auto output = at::empty({1, options.elements}, at::kFloat);
  Paged present(options, true), absent(options, false);
  auto cases = make_cases(present, absent, plain, output);

  for (int repetition = 0; repetition < options.repetitions; ++repetition) {
    for (auto& measured : cases) time_case(measured, options.parameters, options.min_time);
  }

  fmt::print(
      "machine   {}\n{} parameters of {} elements, each a unit; {} timings of {} s\n\n"
      "{:<24} {:>10} {:>10} {:>10} {:>10}\n",
      describe(start), options.parameters, options.elements, options.repetitions, options.min_time,
      "", "median ns", "least ns", "most ns", "more ns");
  Json results = Json::array();
  for (const auto& measured : cases) {
    const auto time = summarize(measured.nanoseconds);
    const auto without = std::find_if(cases.begin(), cases.end(), [&](const Case& other) {
      return other.name == measured.without;
    });
    Json more;
    if (without != cases.end()) more = time.median - summarize(without->nanoseconds).median;
    fmt::print("{:<24} {:>10.0f} {:>10.0f} {:>10.0f} {:>10}\n", measured.name, time.median,
               time.least, time.most,
               more.is_null() ? "" : fmt::format("{:.0f}", more.get<double>()));
    results.push_back({{"case", measured.name},
                       {"nanoseconds", time.json()},
                       {"more_nanoseconds", more},
                       {"touches", measured.counts.touches},
                       {"gathers", measured.counts.gathers}});
  }
  options.json.write("pager", start,
                     {{"parameters", options.parameters},
                      {"elements", options.elements},
                      {"repetitions", options.repetitions},
                      {"min_time", options.min_time}},
                     results);
  return 0;
}

}  // namespace zero::app::benchmarks
