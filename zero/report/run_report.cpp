#include "zero/report/run_report.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <exception>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/comm/traffic.h"
#include "zero/report/chart.h"
#include "zero/report/curves.h"
#include "zero/report/html.h"
#include "zero/report/plan_of_run.h"

namespace zero::report {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 2> kRunColours{"var(--a)", "var(--b)"};
constexpr size_t kMostRanks = 16;    // that are drawn
constexpr size_t kRankColumns = 8;   // of tables
constexpr size_t kMostEvents = 300;  // of a table

using Runs = std::vector<RunLog>;

/// The names of the runs, which differ: two folders may have one name.
std::vector<std::string> names_of(const Runs& runs) {
  std::vector<std::string> names;
  for (const auto& run : runs) names.push_back(run.name.empty() ? run.path.string() : run.name);
  if (names.size() == 2 && names[0] == names[1]) {
    for (size_t i = 0; i < 2; ++i) names[i] = runs[i].path.parent_path().string();
  }
  if (names.size() == 2 && names[0] == names[1]) names[1] += " (again)";
  return names;
}

std::string grouped(int64_t number) {
  const auto digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    const bool begins = i == 0 || digits[i - 1] == '-';
    if (!begins && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

// Returns the name that --model had, or of a model from a folder what its config.json says.
std::string model_name(const RunLog& run) {
  if (run.weights.empty()) return run.setting("train.model");
  try {
    return parse_json(run.model).value("model_type", std::string("a model"));
  } catch (const std::exception&) {
    return "a model";
  }
}

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::llround(std::max(0.0, seconds)));
  return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                       : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

double median(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return kAbsent;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<double> column(const RunLog& run, double LoggedStep::*member) {
  std::vector<double> values;
  values.reserve(run.steps.size());
  for (const auto& step : run.steps) values.push_back(step.*member);
  return values;
}

std::vector<double> steps_of(const RunLog& run) {
  std::vector<double> values;
  values.reserve(run.steps.size());
  for (const auto& step : run.steps) values.push_back(static_cast<double>(step.step));
  return values;
}

std::string number(double value, const char* form = "{:.5g}") {
  return std::isfinite(value) ? fmt::format(fmt::runtime(form), value) : std::string("-");
}

// --- The head ---

std::string state_of(const RunLog& run) {
  std::string state;
  if (run.end) {
    state = fmt::format("{} after step {} in {}.", run.end->reason, run.end->steps,
                        duration(run.end->seconds));
  } else {
    const auto written = std::chrono::system_clock::to_time_t(run.written);
    std::tm local{};
    localtime_r(&written, &local);
    state = fmt::format(
        "The log has no end: the run goes on, or died. {}, and the log was last written at "
        "{:%Y-%m-%d %H:%M:%S}.",
        run.steps.empty() ? std::string("It has no step yet")
                          : fmt::format("Its last step is {}", run.steps.back().step),
        local);
  }
  if (run.cut) state += " The last line of the log is cut off, and is left out.";
  if (!run.unknown.empty())
    state += fmt::format(" Left out are events that this version does not know: {}.",
                         fmt::join(run.unknown, ", "));
  return state;
}

std::string facts(const Runs& runs, const std::vector<std::string>& names) {
  std::vector<std::string> head{""};
  head.insert(head.end(), names.begin(), names.end());
  std::vector<std::vector<Cell>> rows;
  const auto row = [&](const char* name, auto&& value) {
    std::vector<Cell> cells{{.text = name}};
    bool any = false;
    for (const auto& run : runs) {
      cells.push_back({.text = value(run)});
      any = any || (cells.back().text != "-" && !cells.back().text.empty());
    }
    if (any) rows.push_back(std::move(cells));
  };
  row("state", state_of);
  row("model", [](const RunLog& run) {
    return fmt::format("{}: {} parameters", model_name(run), grouped(run.parameters));
  });
  row("first weights",
      [](const RunLog& run) { return run.weights.empty() ? std::string("random") : run.weights; });
  row("data", [](const RunLog& run) {
    return fmt::format("{}: {} tokens", run.setting("train.data"), grouped(run.train_tokens));
  });
  row("ranks", [](const RunLog& run) {
    return fmt::format("{}, ZeRO stage {}, {}", run.ranks, run.setting("zero_optimization.stage"),
                       run.setting("bf16.enabled") == "true"   ? "bf16"
                       : run.setting("fp16.enabled") == "true" ? "fp16"
                                                               : "fp32");
  });
  row("tiers", [](const RunLog& run) { return run.tiers; });
  row("a step", [](const RunLog& run) {
    return fmt::format("{} tokens in {} micro-batches of {} sequences of {} on each rank",
                       grouped(run.tokens_per_step), run.setting("gradient_accumulation_steps"),
                       run.setting("train_micro_batch_size_per_gpu"), run.setting("train.seq"));
  });
  row("last loss", [](const RunLog& run) {
    return run.steps.empty() ? "-" : number(run.steps.back().loss, "{:.5f}");
  });
  row("best validation", [](const RunLog& run) {
    const auto best = std::ranges::min_element(run.validations, {}, [](const auto& each) {
      return std::isfinite(each.loss) ? each.loss : std::numeric_limits<double>::infinity();
    });
    return best == run.validations.end()
               ? std::string("-")
               : fmt::format("{} after step {}{}", number(best->loss, "{:.5f}"), best->step,
                             best->accuracy ? ", " + to_text(*best->accuracy) : "");
  });
  row("time of a step", [](const RunLog& run) {
    return run.steps.empty()
               ? std::string("-")
               : fmt::format("{} ms (median)", number(median(column(run, &LoggedStep::step_ms))));
  });
  row("tokens a second", [](const RunLog& run) {
    return run.steps.empty()
               ? std::string("-")
               : fmt::format("{} (median)", number(median(column(run, &LoggedStep::tokens_per_s))));
  });
  row("FLOPs of a step", [](const RunLog& run) {
    if (!std::isfinite(run.flops)) return std::string("-");
    return std::isfinite(run.mfu)
               ? fmt::format("{:.4g}, {:.1f} % of the machine's speed in products", run.flops,
                             100 * run.mfu)
               : fmt::format("{:.4g}", run.flops);
  });
  return table(head, rows);
}

// --- Training ---

std::string training(const Runs& runs, const std::vector<std::string>& names) {
  std::vector<Column> charts;
  const auto of_runs = [&](double LoggedStep::*member) {
    std::vector<Curve> all;
    for (size_t i = 0; i < runs.size(); ++i) {
      all.push_back({.name = names[i],
                     .colour = kRunColours[i],
                     .x = steps_of(runs[i]),
                     .y = column(runs[i], member)});
    }
    return all;
  };
  const auto add = [&](const char* title, double LoggedStep::*member, const Axis& axis) {
    charts.push_back({"", curves(title, of_runs(member), axis)});
  };
  auto losses = of_runs(&LoggedStep::loss);
  for (size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].validations.empty()) continue;
    Curve dots{.name = runs.size() > 1 ? names[i] + ", validation" : "validation",
               .colour = runs.size() > 1 ? kRunColours[i] : "var(--b)",
               .x = {},
               .y = {},
               .dots = true};
    for (const auto& each : runs[i].validations) {
      dots.x.push_back(static_cast<double>(each.step));
      dots.y.push_back(each.loss);
    }
    losses.push_back(std::move(dots));
  }
  charts.push_back({"", curves("loss (nats a token)", losses, {.may_be_logarithmic = true})});
  std::vector<Curve> accuracies;
  for (size_t i = 0; i < runs.size(); ++i) {
    Curve line{.name = names[i], .colour = kRunColours[i], .x = {}, .y = {}};
    for (const auto& each : runs[i].validations) {
      if (!each.accuracy) continue;
      line.x.push_back(static_cast<double>(each.step));
      line.y.push_back(each.accuracy->share());
    }
    if (!line.x.empty()) accuracies.push_back(std::move(line));
  }
  if (!accuracies.empty())
    charts.push_back({"", curves("accuracy of validations", accuracies, {})});
  add("learning rate", &LoggedStep::lr, {});
  add("norm of the gradients", &LoggedStep::grad_norm, {.may_be_logarithmic = true});
  add("loss scale", &LoggedStep::loss_scale, {.may_be_logarithmic = true});
  add("tokens a second", &LoggedStep::tokens_per_s, {});
  return heading("Training") + beside(charts);
}

// --- Time ---

/// Shows the parts of the steps' time that `parts_of` returns, the same ones for every step.
template <class PartsOf>
std::string steps_by_part(const RunLog& run, const std::string& title, const PartsOf& parts_of) {
  std::vector<Curve> parts;
  for (const auto& step : run.steps) {
    const auto all = parts_of(step);
    if (parts.empty()) {
      for (size_t p = 0; p < all.size(); ++p)
        parts.push_back(
            {.name = std::string(all[p].name), .colour = part_colour(p), .x = {}, .y = {}});
    }
    for (size_t p = 0; p < all.size(); ++p) {
      parts[p].x.push_back(static_cast<double>(step.step));
      parts[p].y.push_back(all[p].ms);
    }
  }
  std::vector<std::vector<Cell>> rows;
  double sum = 0;
  for (const auto& part : parts) {
    for (const double ms : part.y) sum += ms;
  }
  for (const auto& part : parts) {
    double mine = 0;
    for (const double ms : part.y) mine += ms;
    rows.push_back(
        {{.text = part.name},
         {.text = number(median(part.y), "{:.2f}"), .number = true},
         {.text = sum > 0 ? fmt::format("{:.1f} %", 100 * mine / sum) : "-", .number = true}});
  }
  std::erase_if(parts, [](const Curve& part) {
    return std::ranges::all_of(part.y, [](double ms) { return ms == 0; });
  });
  return layers(title, parts, {.unit = Unit::milliseconds}) +
         table({"part", "ms, median of the steps", "part of their sum"}, rows);
}

std::string times(const Runs& runs, const std::vector<std::string>& names) {
  std::vector<Column> columns;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto& run = runs[i];
    if (run.steps.empty()) continue;
    // A run that was resumed may have measured parts of some steps only: then all have the same.
    const bool split = std::ranges::all_of(
        run.steps, [](const LoggedStep& step) { return step.breakdown.has_value(); });
    auto body = steps_by_part(run, "milliseconds of a step on rank 0", [&](LoggedStep step) {
      if (!split) step.breakdown.reset();
      return time_parts(step);
    });
    if (!split)
      body += paragraph("With --wall-clock-breakdown a run's log has more parts of each step.");
    columns.push_back({runs.size() > 1 ? names[i] : "", std::move(body)});
  }
  return heading("A step's time by part") + beside(columns);
}

/// Shows where the link between hosts stood still, if one of the runs has one.
std::string link(const Runs& runs, const std::vector<std::string>& names) {
  std::vector<Column> columns;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto& run = runs[i];
    // A run that was resumed on other hosts has a link in some of its steps.
    const bool known = !run.steps.empty() &&
                       std::ranges::all_of(
                           run.steps, [](const LoggedStep& step) { return step.link.has_value(); });
    if (!known) continue;
    auto body = steps_by_part(run, "milliseconds of rank 0's link in a step", link_parts);
    if (!run.traffic.empty() && run.traffic.front().link) {
      body += paragraph(
          fmt::format("While the link of rank 0 was busy, {:.1f} MB a second left over it.",
                      train::busy_speed(run.traffic.front()) * 1e-6));
    }
    if (run.link) {
      body += paragraph(fmt::format(
          "At the start {:.1f} MB a second were measured, and {:.2f} ms for a small call.",
          run.link->bandwidth * 1e-6, run.link->latency * 1e3));
    }
    columns.push_back({runs.size() > 1 ? names[i] : "", std::move(body)});
  }
  return columns.empty() ? std::string() : heading("The link between hosts") + beside(columns);
}

// --- Memory ---

/// The ranks that a picture shows: all, or those that hold most.
std::vector<size_t> shown_ranks(const std::vector<train::RankMemory>& ranks) {
  std::vector<size_t> shown(ranks.size());
  for (size_t i = 0; i < shown.size(); ++i) shown[i] = i;
  if (shown.size() <= kMostRanks) return shown;
  std::ranges::stable_sort(shown, std::greater<>{},
                           [&](size_t rank) { return ranks[rank].total.peak; });
  shown.resize(kMostRanks);
  std::ranges::sort(shown);
  return shown;
}

/// Adds a cell for each rank, or for the least and the most of many.
template <class Value>
void add_ranks(std::vector<Cell>& cells, size_t ranks, const Value& value) {
  const auto cell = [](int64_t count) {
    return Cell{.text = count == 0 ? "-" : bytes(count), .number = true};
  };
  if (ranks <= kRankColumns) {
    for (size_t rank = 0; rank < ranks; ++rank) cells.push_back(cell(value(rank)));
    return;
  }
  int64_t least = value(0);
  int64_t most = least;
  for (size_t rank = 1; rank < ranks; ++rank) {
    least = std::min(least, value(rank));
    most = std::max(most, value(rank));
  }
  cells.push_back(cell(least));
  cells.push_back(cell(most));
}

void add_rank_names(std::vector<std::string>& head, size_t ranks) {
  if (ranks > kRankColumns) {
    head.insert(head.end(), {"least of the ranks", "most of the ranks"});
    return;
  }
  for (size_t rank = 0; rank < ranks; ++rank) head.push_back(fmt::format("rank {}", rank));
}

std::string memory_of(const RunLog& run) {
  const auto planned = planned_memory(run);
  std::string body;
  if (run.memory.empty()) {
    if (!planned.memory) return paragraph(planned.note);
    body =
        paragraph("The log has the memory by category once the run has ended; this is the plan.");
  }
  const auto& ranks = run.memory;
  const auto in_use = [&](size_t category) {
    const bool held = std::ranges::any_of(ranks, [&](const train::RankMemory& rank) {
      return rank.usage[category].peak > 0 || rank.formula[category].value_or(0) > 0;
    });
    return held || (planned.memory && planned.memory->peaks[category] > 0);
  };
  std::vector<BarPart> parts;
  std::vector<size_t> categories;
  for (size_t i = 0; i < kCategories; ++i) {
    if (!in_use(i)) continue;
    categories.push_back(i);
    parts.push_back(
        {.name = std::string(zero::name(static_cast<Category>(i))), .colour = part_colour(i)});
  }
  std::vector<Bar> all;
  const auto add = [&](std::string name, auto&& value) {
    Bar bar{.name = std::move(name), .parts = {}};
    for (const size_t category : categories)
      bar.parts.push_back(static_cast<double>(value(category)));
    all.push_back(std::move(bar));
  };
  if (planned.memory) add("plan", [&](size_t i) { return planned.memory->peaks[i]; });
  const auto shown = shown_ranks(ranks);
  for (const size_t rank : shown)
    add(fmt::format("rank {}", rank), [&](size_t i) { return ranks[rank].usage[i].peak; });
  body += bars("most bytes of each category", parts, all, Unit::bytes);
  if (shown.size() < ranks.size())
    body += paragraph(
        fmt::format("Drawn are the {} ranks of {} that held most.", shown.size(), ranks.size()));
  std::vector<std::string> head{"category", "plan", "formula"};
  add_rank_names(head, ranks.size());
  std::vector<std::vector<Cell>> rows;
  const auto start = [&](std::string_view name, int64_t plan, std::optional<int64_t> formula) {
    return std::vector<Cell>{
        {.text = std::string(name)},
        {.text = planned.memory && plan != 0 ? bytes(plan) : "-", .number = true},
        {.text = formula ? bytes(*formula) : "-", .number = true}};
  };
  for (const size_t i : categories) {
    auto cells =
        start(zero::name(static_cast<Category>(i)), planned.memory ? planned.memory->peaks[i] : 0,
              ranks.empty() ? std::nullopt : ranks.front().formula[i]);
    if (!ranks.empty())
      add_ranks(cells, ranks.size(), [&](size_t rank) { return ranks[rank].usage[i].peak; });
    rows.push_back(std::move(cells));
  }
  if (!ranks.empty()) {
    auto cells = start("all but activations, at once", 0, std::nullopt);
    add_ranks(cells, ranks.size(), [&](size_t rank) { return ranks[rank].total.peak; });
    rows.push_back(std::move(cells));
    cells = start("reserved by the allocator", 0, std::nullopt);
    add_ranks(cells, ranks.size(), [&](size_t rank) { return ranks[rank].reserved.peak; });
    rows.push_back(std::move(cells));
  }
  if (planned.memory) rows.push_back(start("all at once", planned.memory->device, std::nullopt));
  body += table(head, rows);
  if (!planned.note.empty()) body += paragraph(planned.note);
  return body;
}

std::string memory(const Runs& runs, const std::vector<std::string>& names) {
  std::vector<Curve> held;
  std::vector<Column> columns;
  for (size_t i = 0; i < runs.size(); ++i) {
    held.push_back({.name = names[i],
                    .colour = kRunColours[i],
                    .x = steps_of(runs[i]),
                    .y = column(runs[i], &LoggedStep::memory_peak)});
    columns.push_back({runs.size() > 1 ? names[i] : "", memory_of(runs[i])});
  }
  columns.push_back({"", curves("the most that rank 0 has held so far, without activations", held,
                                {.unit = Unit::bytes})});
  return heading("Memory") + beside(columns);
}

// --- Traffic ---

/// The bytes of one kind on one link in a step, by rank, and the formula's.
struct Flow {
  std::string link;
  std::string kind;
  std::vector<double> measured;
  std::optional<double> formula;  ///< of rank 0
};

std::vector<Flow> flows_of(const RunLog& run) {
  std::vector<Flow> flows;
  const auto steps = static_cast<double>(std::max<int64_t>(1, run.traffic_steps));
  const auto add = [&](std::string link, std::string kind, auto&& measured, auto&& formula) {
    Flow flow{.link = std::move(link), .kind = std::move(kind), .measured = {}, .formula = {}};
    bool any = false;
    for (const auto& rank : run.traffic) {
      flow.measured.push_back(static_cast<double>(measured(rank)) / steps);
      any = any || flow.measured.back() > 0;
    }
    const std::optional<int64_t> expected = formula(run.traffic.front());
    if (expected) flow.formula = static_cast<double>(*expected) / steps;
    if (any || flow.formula.value_or(0) > 0) flows.push_back(std::move(flow));
  };
  if (run.traffic.empty()) return flows;
  const bool hosts = run.traffic.front().hosts > 1;
  const auto none = [](const train::RankTraffic&) { return std::optional<int64_t>(); };
  for (size_t i = 0; i < comm::kCollectives; ++i) {
    const std::string kind(comm::name(static_cast<comm::Collective>(i)));
    add(
        "between ranks", kind, [&](const auto& rank) { return rank.counts[i].logical_bytes; },
        [&](const auto& rank) { return rank.formula[i]; });
    add(
        "copied inside a host", kind, [&](const auto& rank) { return rank.counts[i].copied_bytes; },
        none);
    if (hosts) {
      add(
          "between hosts", kind, [&](const auto& rank) { return rank.counts[i].link_bytes; },
          [&](const auto& rank) { return rank.link_formula[i]; });
    }
  }
  using Traffic = train::RankTraffic;
  const auto add_pair = [&](const char* link, const char* kind, auto measured, auto formula) {
    add(link, kind, measured,
        [&](const Traffic& rank) { return std::optional<int64_t>(formula(rank)); });
  };
  add_pair(
      "disk", "read", [](const Traffic& r) { return r.disk.read; },
      [](const Traffic& r) { return r.disk_read_formula; });
  add_pair(
      "disk", "written", [](const Traffic& r) { return r.disk.written; },
      [](const Traffic& r) { return r.disk_written_formula; });
  add_pair(
      "device and host", "to the host", [](const Traffic& r) { return r.host.down; },
      [](const Traffic& r) { return r.host_formula.down; });
  add_pair(
      "device and host", "to the device", [](const Traffic& r) { return r.host.up; },
      [](const Traffic& r) { return r.host_formula.up; });
  std::ranges::stable_sort(flows, {}, &Flow::link);
  return flows;
}

std::string traffic_of(const RunLog& run) {
  const auto flows = flows_of(run);
  if (flows.empty()) {
    return paragraph(run.traffic.empty() ? "The log has the traffic once the run has ended."
                                         : "The ranks sent each other nothing.");
  }
  std::vector<Bar> all;
  std::vector<std::string> head{"link", "what", "formula"};
  add_rank_names(head, run.traffic.size());
  std::vector<std::vector<Cell>> rows;
  for (const auto& flow : flows) {
    std::vector<Cell> cells{
        {.text = flow.link},
        {.text = flow.kind},
        {.text = flow.formula ? say(*flow.formula, Unit::bytes) : "-", .number = true}};
    add_ranks(cells, flow.measured.size(),
              [&](size_t rank) { return int64_t{std::llround(flow.measured[rank])}; });
    rows.push_back(std::move(cells));
    if (!flow.formula) continue;
    double most = 0;
    for (const double each : flow.measured) most = std::max(most, each);
    all.push_back({.name = flow.kind, .parts = {most, 0}});
    all.push_back({.name = "formula", .parts = {0, *flow.formula}});
  }
  auto body = bars("bytes a step of the rank that sent most, and the formula",
                   {{.name = "sent", .colour = "var(--a)"},
                    {.name = "formula of ZeRO's paper", .colour = "var(--p11)"}},
                   all, Unit::bytes) +
              table(head, rows);
  if (run.calls.empty()) return body;
  rows.clear();
  for (const auto& call : run.calls) {
    rows.push_back({{.text = call.op},
                    {.text = std::to_string(call.ranks), .number = true},
                    {.text = bytes(call.message_bytes), .number = true},
                    {.text = grouped(call.calls), .number = true},
                    {.text = number(call.total_ms, "{:.2f}"), .number = true},
                    {.text = number(call.bus_gb_per_s, "{:.2f}"), .number = true}});
  }
  return body + folded("calls of rank 0, by size",
                       table({"call", "ranks", "message", "calls", "ms in all", "bus GB/s"}, rows));
}

std::string traffic(const Runs& runs, const std::vector<std::string>& names) {
  std::vector<Column> columns;
  for (size_t i = 0; i < runs.size(); ++i)
    columns.push_back({runs.size() > 1 ? names[i] : "", traffic_of(runs[i])});
  return heading("Traffic of a step by link") + beside(columns);
}

// --- Events ---

std::string events_of(const RunLog& run) {
  if (run.events.empty()) return paragraph("Nothing.");
  std::vector<std::vector<Cell>> rows;
  for (size_t i = 0; i < run.events.size() && i < kMostEvents; ++i) {
    const auto& event = run.events[i];
    using Kind = LoggedEvent::Kind;
    const bool marked = event.kind != Kind::save && event.kind != Kind::profile;
    rows.push_back({{.text = std::to_string(event.step), .number = true},
                    {.text = std::string(name(event.kind)), .marked = marked},
                    {.text = event.text}});
  }
  auto body = table({"step", "", ""}, rows);
  if (run.events.size() > kMostEvents)
    body += paragraph(fmt::format("{} more are in the log.", run.events.size() - kMostEvents));
  return body;
}

std::string events(const Runs& runs, const std::vector<std::string>& names) {
  std::vector<Column> columns;
  for (size_t i = 0; i < runs.size(); ++i)
    columns.push_back({runs.size() > 1 ? names[i] : "", events_of(runs[i])});
  return heading("What was unusual, and saves") + beside(columns);
}

// --- Configuration ---

std::string configuration(const Runs& runs, const std::vector<std::string>& names) {
  if (runs.size() == 1) {
    std::vector<std::vector<Cell>> given;
    std::vector<std::vector<Cell>> others;
    for (const auto& setting : runs.front().settings) {
      const bool is_default = setting.origin == "default";
      (is_default ? others : given)
          .push_back({{.text = setting.key}, {.text = setting.value}, {.text = setting.origin}});
    }
    const std::vector<std::string> head{"key", "value", "origin"};
    return heading("Configuration") + table(head, given) +
           folded(fmt::format("{} settings at their defaults", others.size()), table(head, others));
  }
  std::map<std::string, std::array<const LoggedSetting*, 2>> all;
  for (size_t i = 0; i < 2; ++i) {
    for (const auto& setting : runs[i].settings) all[setting.key][i] = &setting;
  }
  const auto words = [](const LoggedSetting* setting) {
    return setting == nullptr ? std::string("-")
                              : fmt::format("{} ({})", setting->value, setting->origin);
  };
  std::vector<std::vector<Cell>> different;
  std::vector<std::vector<Cell>> same;
  for (const auto& [key, pair] : all) {
    const bool equal = pair[0] != nullptr && pair[1] != nullptr && pair[0]->value == pair[1]->value;
    (equal ? same : different)
        .push_back({{.text = key}, {.text = words(pair[0])}, {.text = words(pair[1])}});
  }
  const std::vector<std::string> head{"key", names[0], names[1]};
  return heading("Configuration") +
         (different.empty() ? paragraph("Both runs have the same.")
                            : paragraph("The runs differ in:") + table(head, different)) +
         folded(fmt::format("{} settings that are the same", same.size()), table(head, same));
}

std::string samples(const Runs& runs, const std::vector<std::string>& names) {
  std::vector<Column> columns;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].sample.empty()) continue;
    columns.push_back({runs.size() > 1 ? names[i] : "",
                       "<pre>" + escaped(runs[i].prompt + runs[i].sample) + "</pre>\n"});
  }
  return columns.empty() ? "" : heading("Sample") + beside(columns);
}

bool begins_as_report(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::string type;
  std::string mark;
  return std::getline(in, type) && std::getline(in, mark) && type == "<!DOCTYPE html>" &&
         mark == kPageMark;
}

}  // namespace

std::string report(const std::vector<RunLog>& runs, const ReportOptions& options) {
  if (runs.empty() || runs.size() > 2) {
    throw ConfigError(fmt::format("A report is of one run or of two, and not of {}.", runs.size()));
  }
  const auto names = names_of(runs);
  const auto title = fmt::format("{}", fmt::join(names, " and "));
  return page(title,
              fmt::format("<h1>{}</h1>\n", escaped(title)) + facts(runs, names) +
                  training(runs, names) + times(runs, names) + link(runs, names) +
                  memory(runs, names) + traffic(runs, names) + events(runs, names) +
                  configuration(runs, names) + samples(runs, names) +
                  "<footer>A report by libzero. A pointer that rests on a chart shows the numbers "
                  "below it.</footer>\n",
              options.refresh_seconds);
}

void check_report(const fs::path& file) {
  std::error_code error;
  const auto type = fs::symlink_status(file, error).type();
  if (type == fs::file_type::not_found) {
    const auto folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
    if (!fs::is_directory(folder, error)) {
      throw ConfigError(fmt::format("The report is to be {}, but {} is no folder.", file.string(),
                                    folder.string()));
    }
    return;
  }
  if (type != fs::file_type::regular || !begins_as_report(file)) {
    throw ConfigError(
        fmt::format("{} exists and is no report: it is not overwritten. Name another file (--out).",
                    file.string()));
  }
}

void write_report(const fs::path& file, const std::string& page) {
  check_report(file);
  OutputFile out(file, fail<Error>);
  out.write(page.data(), page.size());
  out.commit();
}

}  // namespace zero::report
