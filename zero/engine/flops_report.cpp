#include "zero/engine/flops_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace zero {

namespace {

// Makes "87.2 G" of 87,213,000,000.
std::string short_number(double value) {
  constexpr std::array<const char*, 6> kUnits{"", " K", " M", " G", " T", " P"};
  size_t unit = 0;
  for (; value >= 1000 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  return unit == 0 ? fmt::format("{:.0f}", value) : fmt::format("{:.4g}{}", value, kUnits[unit]);
}
std::string short_number(int64_t value) { return short_number(static_cast<double>(value)); }

double share(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

std::string per_second(double flops) {
  const auto number = short_number(flops);
  return number + (number.find(' ') == std::string::npos ? " FLOP/s" : "FLOP/s");
}
// Returns the rate of `flops` in `ms` milliseconds, in words.
std::string rate(double flops, double ms) { return ms > 0 ? per_second(1000 * flops / ms) : "-"; }

std::string grouped_by_number(std::string_view name) {
  std::string kind;
  while (!name.empty()) {
    const auto part = name.substr(0, name.find('.'));
    const bool number = !part.empty() && std::all_of(part.begin(), part.end(),
                                                     [](char c) { return c >= '0' && c <= '9'; });
    if (!kind.empty()) kind += '.';
    kind += number ? std::string_view("*") : part;
    name.remove_prefix(std::min(name.size(), part.size() + 1));
  }
  return kind;
}

std::string shown(const std::string& name) { return name.empty() ? "(model)" : name; }

void add_kinds(const ModuleFlops& module, size_t depth, int64_t deepest,
               std::vector<std::vector<ModuleKind>>& all) {
  if (deepest >= 0 && depth > static_cast<size_t>(deepest)) return;
  if (all.size() <= depth) all.emplace_back();
  const auto name = grouped_by_number(module.name);
  auto& kinds = all[depth];
  auto found = std::find_if(kinds.begin(), kinds.end(),
                            [&](const ModuleKind& kind) { return kind.name == name; });
  if (found == kinds.end()) found = kinds.insert(kinds.end(), ModuleKind{.name = name});
  ++found->modules;
  found->total += module.total;
  for (const auto& child : module.children) add_kinds(child, depth + 1, deepest, all);
}

// Returns a line about the kinds of one depth with the largest `value`: "h.* (12) 85.1 M (68 %)".
template <class Value, class Text>
std::string largest(std::vector<ModuleKind> kinds, int64_t count, double whole, const Value& value,
                    const Text& text) {
  std::stable_sort(kinds.begin(), kinds.end(), [&](const ModuleKind& a, const ModuleKind& b) {
    return value(a.total) > value(b.total);
  });
  std::string line;
  for (size_t i = 0; i < kinds.size() && i < static_cast<size_t>(count); ++i) {
    const auto& kind = kinds[i];
    line += fmt::format("{}{}{} {} ({:.1f} %)", i > 0 ? ", " : "", shown(kind.name),
                        kind.modules > 1 ? fmt::format(" ({} modules)", kind.modules) : "",
                        text(value(kind.total)), share(value(kind.total), whole));
  }
  return line;
}

std::string largest_modules(const StepFlops& step, const FlopsReportOptions& options) {
  const auto& whole = step.model.total;
  const auto milliseconds = [](double ms) { return fmt::format("{:.1f} ms", ms); };
  const auto number = [](double value) { return short_number(value); };
  std::string text = "\nthe largest modules of each depth\n";
  const auto all = kinds_by_depth(step.model, options.module_depth);
  for (size_t depth = 0; depth < all.size(); ++depth) {
    const auto line = [&](const char* of, double total, auto value, auto shown) {
      text += fmt::format("{:>5}  {:<10}  {}\n", *of == 'p' ? fmt::format("{}", depth) : "", of,
                          largest(all[depth], options.top_modules, total, value, shown));
    };
    line(
        "parameters", static_cast<double>(whole.parameters),
        [](const FlopsCount& c) { return static_cast<double>(c.parameters); }, number);
    line(
        "MACs", static_cast<double>(whole.macs),
        [](const FlopsCount& c) { return static_cast<double>(c.macs); }, number);
    line(
        "time", whole.ms, [](const FlopsCount& c) { return c.ms; }, milliseconds);
  }
  return text;
}

void add_rows(const ModuleFlops& module, size_t depth, int64_t deepest, const FlopsCount& whole,
              std::vector<std::pair<std::string, std::string>>& rows) {
  if (deepest >= 0 && depth > static_cast<size_t>(deepest)) return;
  const auto& total = module.total;
  const auto last = module.name.substr(module.name.rfind('.') + 1);
  rows.emplace_back(
      std::string(2 * depth, ' ') + shown(last),
      fmt::format(
          "{:>10}  {:>6.2f}  {:>10}  {:>6.2f}  {:>10}  {:>9.2f}  {:>6.2f}  {:>13}",
          short_number(total.parameters),
          share(static_cast<double>(total.parameters), static_cast<double>(whole.parameters)),
          short_number(total.macs),
          share(static_cast<double>(total.macs), static_cast<double>(whole.macs)),
          short_number(total.flops), total.ms, share(total.ms, whole.ms),
          rate(static_cast<double>(total.flops), total.ms)));
  for (const auto& child : module.children) add_rows(child, depth + 1, deepest, whole, rows);
}

std::string table(const StepFlops& step, const FlopsReportOptions& options) {
  std::vector<std::pair<std::string, std::string>> rows;
  add_rows(step.model, 0, options.module_depth, step.model.total, rows);
  size_t width = 6;
  for (const auto& [name, numbers] : rows) width = std::max(width, name.size());
  auto text = fmt::format(
      "\nmodules, each with those in it\n{:<{}}  {:>10}  {:>6}  {:>10}  {:>6}  {:>10}  {:>9}  "
      "{:>6}  {:>13}\n",
      "module", width, "parameters", "%", "MACs", "%", "FLOPs", "ms", "%", "FLOP/s");
  for (const auto& [name, numbers] : rows)
    text += fmt::format("{:<{}}  {}\n", name, width, numbers);
  return text;
}

}  // namespace

double StepFlops::mfu() const {
  if (peak <= 0 || step_ms <= 0) return 0;
  constexpr double kPasses = 3;  // forward, and backward's two products
  return kPasses * 2 * static_cast<double>(model.total.macs) / (peak * step_ms / 1000);
}

std::vector<std::vector<ModuleKind>> kinds_by_depth(const ModuleFlops& model, int64_t depth) {
  std::vector<std::vector<ModuleKind>> all;
  add_kinds(model, 0, depth, all);
  return all;
}

std::string flops_totals(const StepFlops& step) {
  const auto& total = step.model.total;
  const auto forward = static_cast<double>(total.flops);
  std::string text =
      step.step > 0
          ? fmt::format("FLOPs of step {}{}\n", step.step,
                        step.ranks > 1 ? fmt::format(", of rank 0 of {}", step.ranks) : "")
          : std::string("FLOPs\n");
  const auto line = [&](std::string_view what, const std::string& value) {
    text += fmt::format("{:<22}  {}\n", what, value);
  };
  line("parameters", short_number(total.parameters));
  line("forward",
       fmt::format("{} MACs, {} FLOPs, {:.1f} ms in operators: {}", short_number(total.macs),
                   short_number(total.flops), total.ms, rate(forward, total.ms)));
  line("backward",
       fmt::format("{} FLOPs: {:g} x forward", short_number(step.backward_factor() * forward),
                   step.backward_factor()));
  if (step.step_ms > 0) {
    line("step",
         fmt::format("{} FLOPs, {:.1f} ms: {}{}", short_number(step.flops()), step.step_ms,
                     rate(step.flops(), step.step_ms),
                     step.tokens_per_s > 0 ? fmt::format(", {:.0f} tokens/s{}", step.tokens_per_s,
                                                         step.ranks > 1 ? " of all ranks" : "")
                                           : ""));
  }
  if (const double mfu = step.mfu(); mfu > 0) {
    line("matrix products", per_second(step.peak) + " at best, measured");
    line("MFU", fmt::format("{:.1f} %", 100 * mfu));
  }
  return text;
}

std::string flops_report(const StepFlops& step, const FlopsReportOptions& options) {
  return flops_totals(step) + largest_modules(step, options) +
         (options.detailed ? table(step, options) : "");
}

}  // namespace zero
